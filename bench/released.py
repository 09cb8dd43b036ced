"""The released model without a checkpoint: random weights in the stored forms, a filled state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qwen4jax.config import LINEAR, SPARSE, Config, ExpertFormat, Quantization
from qwen4jax.decode.capacity import GB, MemoryPlan
from qwen4jax.params import Params, init_params
from qwen4jax.quant import ScaledTable
from qwen4jax.state import DecodeState, abstract_state, init_state
from qwen4jax.weights.arrange import arrange, tiled
from qwen4jax.weights.placement import Placement

# 16 heads of about 1.25 million rows stand in for the 51 GB table, which `bench.table` fills
STAND_IN_ROWS = 1_250_000


def released_config(
    *,
    layers: int = 48,
    experts: ExpertFormat = "nvfp4",
    draft: ExpertFormat = "bf16",
    draft_vocab: int | None = None,
    table_rows: int = STAND_IN_ROWS,
) -> Config:
    """Qwen3.8-Flash-Next as an NVFP4 checkpoint stores it, with fewer layers and n-gram rows.

    `draft` is the form that the draft head was quantised to when it was loaded, `draft_vocab` how
    many ids it drafts, `table_rows` about how many rows each of 16 n-gram heads has.
    """
    return Config.flash_next(
        num_hidden_layers=layers,
        layer_types=tuple(SPARSE if i % 4 == 3 else LINEAR for i in range(layers)),
        ngram_vocab_size_base=table_rows,
        quantization=Quantization(
            experts=experts,
            mtp_experts=draft,
            ngram_embedding="fp8",
            draft=draft,
            draft_vocab=draft_vocab,
        ),
    )


def tiny_config(experts: ExpertFormat = "nvfp4") -> Config:
    """A model for a CPU, stored as the released one is."""
    return Config.tiny(quantization=Quantization(experts=experts))


def require_memory(plan: MemoryPlan, available: int) -> None:
    """Ends the program with the arithmetic if the plan does not fit."""
    if plan.total > available:
        raise SystemExit(f"does not fit: {plan.describe()} is over {available / GB:.1f} GB")


def state_shapes(
    config: Config, *, batch: int, context: int, drafts: int, kv_dtype: str | None, room: int
) -> dict:
    """Arguments of `init_state` for `batch` requests of `context` tokens that grow by `room`."""
    longest = min(context + room, config.max_position_embeddings)
    return dict(slots=batch, max_length=longest, drafts=drafts, kv_dtype=kv_dtype)


def build(config: Config, seed: int = 0, *, table: Placement = "device") -> Params:
    """Random parameters on the device, in the order and the places that `load` gives them."""
    params = arrange(init_params(config, seed))
    if table == "pinned":
        params = jax.tree.map(_pinned, params, is_leaf=lambda x: isinstance(x, ScaledTable))
    return jax.block_until_ready(params)


def describe(config: Config, kind: str) -> Params:
    """Shapes of what `build` gives on a kind of device, its table on the device."""
    params = jax.eval_shape(lambda: init_params(config))
    in_tiles = kind != "cpu" and config.dtype == "bfloat16"
    return jax.eval_shape(tiled, params) if in_tiles else params


def _pinned(x: Any) -> Any:
    if not isinstance(x, ScaledTable):
        return x
    return x.replace(
        weight=jax.device_put(x.weight, x.weight.sharding.with_memory_kind("pinned_host"))
    )


def filled_state(config: Config, shapes: dict, context: int, seed: int = 1) -> DecodeState:
    """A state whose slots hold `context` tokens of random keys, values and recurrent states."""
    state = init_state(config, **shapes)
    slots = state.slots
    table = jnp.copy(state.page_table)
    noisy = jax.tree.map(_noise, state)
    ids = jax.random.randint(jax.random.key(seed), (slots, 16), 0, config.vocab_size, jnp.int32)
    return noisy.replace(
        length=jnp.full((slots,), context, jnp.int32),
        page_table=table,
        ngram_ids=ids[:, : config.ngram_size - 1],
        token=ids[:, 8],
        drafts=ids[:, 9 : 9 + noisy.drafts.shape[1]],
    )


# without `keep_unused` the argument, of which only the shape is read, is dropped before it could be
# donated, and the cache is held twice
@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _noise(like: jax.Array) -> jax.Array:
    """Values in [-0.5, 0.5) by a hash of their place: no random bits to hold beside the caches."""
    if jnp.issubdtype(like.dtype, jnp.integer):
        return like
    mixed = jnp.zeros(like.shape, jnp.uint32)
    for axis in range(like.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis)
        mixed = (mixed ^ place) * jnp.uint32(2654435761)
        mixed = mixed ^ (mixed >> 15)
    return ((mixed >> 8).astype(jnp.float32) * 2.0**-24 - 0.5).astype(like.dtype)


def device_bytes() -> int:
    """Memory the process may use on the first device."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0)


def abstract(config: Config, shapes: dict) -> DecodeState:
    """Shapes of the state that `filled_state` would make."""
    return abstract_state(config, **shapes)
