"""The released model without a checkpoint: random weights in the stored forms, a filled state."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from qwen4jax.config import LINEAR, SPARSE, Config, ExpertFormat, Quantization
from qwen4jax.params import Params, declare, init_params, tensors
from qwen4jax.state import DecodeState, abstract_state, init_state

# 16 heads of about 1.25 million rows stand in for the 51 GB table until it can stay on the host
STAND_IN_ROWS = 1_250_000
GB = 1e9


def released_config(*, layers: int = 48, experts: ExpertFormat = "nvfp4") -> Config:
    """Qwen3.8-Flash-Next as an NVFP4 checkpoint stores it, with fewer layers and n-gram rows."""
    return Config.flash_next(
        num_hidden_layers=layers,
        layer_types=tuple(SPARSE if i % 4 == 3 else LINEAR for i in range(layers)),
        ngram_vocab_size_base=STAND_IN_ROWS,
        quantization=Quantization(experts=experts, ngram_embedding="fp8"),
    )


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run holds on the device, before anything is allocated.

    Attributes:
        weights: parameters without the n-gram tables.
        table: n-gram tables.
        state: decode state.
        work: estimate of what the compiled round needs besides.
    """

    weights: int
    table: int
    state: int
    work: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.table + self.state + self.work

    def describe(self) -> str:
        """The arithmetic, in GB."""
        parts = dataclasses.asdict(self)
        terms = " + ".join(f"{name} {value / GB:.1f}" for name, value in parts.items())
        return f"{terms} = {self.total / GB:.1f} GB"


def plan_memory(config: Config, state: DecodeState) -> MemoryPlan:
    """The plan for `config`'s parameters and a state (abstract or not)."""
    declared = declare(config)
    everything = sum(t.nbytes for t in tensors(declared))
    tables = [layer.ple.ngram_embedding for layer in declared.layers if layer.ple is not None]
    table = sum(t.nbytes for t in tensors(tables))
    held = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(state))
    logits = state.slots * (state.drafts.shape[1] + 1) * config.vocab_size * 4
    return MemoryPlan(everything - table, table, held, 2 * logits + int(2 * GB))


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


def build(config: Config, seed: int = 0) -> Params:
    """Random parameters on the device."""
    return jax.block_until_ready(init_params(config, seed))


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
