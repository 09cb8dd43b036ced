"""One optimiser step: float32 masters, a forward pass in the model's dtype, AdamW."""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int

from qwen4jax.config import Config, Quantization
from qwen4jax.params import Params, declare, init_params
from qwen4jax.quant import ScaledTable
from qwen4jax.train.losses import Metrics, Mode, total_loss
from qwen4jax.train.recipe import Recipe
from qwen4jax.weights.names import leaves

# one, so that a reader who knows nothing of a scale gets the same table
TABLE_SCALE = 1.0
_LARGEST_E4M3 = 448.0
_EMBEDDINGS = ("embed_tokens", "lm_head")
_TABLE = "ngram_embedding"


class TrainState(struct.PyTreeNode):
    """What a run carries from step to step.

    Attributes:
        step: steps done.
        masters: the parameters, float32 and plain.
        optimiser: AdamW's moments.
    """

    step: Int[Array, ""]
    masters: Params
    optimiser: Any


def master_config(config: Config) -> Config:
    """The same model as float32 masters: nothing in a stored form."""
    return config.replace(dtype="float32", quantization=Quantization())


def init_masters(config: Config, seed: int) -> Params:
    """Masters to begin with: as `init_params`, but for what training wants smaller.

    The output head starts near zero, so that the first distribution is even; what goes back into
    the streams is divided by the root of the number of sublayers; the n-gram table starts low in
    e4m3's range.
    """
    params = init_params(master_config(config), seed)
    back = (2 * config.num_hidden_layers) ** -0.5
    scales = {
        "embed_tokens": 0.5,
        "lm_head": 0.5 * config.hidden_size**-0.5,
        "out_proj": back,
        "o_proj": back,
        "down_proj": back,
        _TABLE: 0.1,
    }
    paths, flat = zip(*leaves(params), strict=True)
    scaled = [x * scales.get(_last(p), 1.0) for p, x in zip(paths, flat, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), scaled)


def in_compute_dtype(masters: Params, config: Config) -> Params:
    """The masters as the forward pass reads them: each rounded as the exported file will be."""
    dtype = jnp.dtype(config.dtype)
    fp8 = config.quantization.ngram_embedding == "fp8"
    paths, flat = zip(*leaves(masters), strict=True)
    cast = [
        _as_e4m3(x).astype(dtype) if fp8 and _last(p) == _TABLE else x.astype(dtype)
        for p, x in zip(paths, flat, strict=True)
    ]
    plain = config.replace(quantization=Quantization())
    return jax.tree.unflatten(jax.tree.structure(masters), cast).replace(config=plain)


def exported(masters: Params, config: Config) -> Params:
    """The parameters in the stored forms of `config`, for `qwen4jax.weights.save`."""
    values = dict(leaves(masters))
    found = []
    for path, declared in leaves(declare(config)):
        table = f".{_TABLE}." in path
        if path.endswith(".weight_scale") and table:
            found.append(jnp.asarray(TABLE_SCALE, declared.dtype))
            continue
        value = values[path.removesuffix(".weight") if table else path]
        if declared.dtype == "float8_e4m3fn":
            value = jnp.clip(value / TABLE_SCALE, -_LARGEST_E4M3, _LARGEST_E4M3)
        found.append(value.astype(declared.dtype))
    return jax.tree.unflatten(jax.tree.structure(declare(config)), found)


def learning_rate(recipe: Recipe, step: Int[Array, ""], steps: Int[Array, ""]) -> Any:
    """The rate of step `step` (from 0) of `steps`: a line up, then a cosine down."""
    total, done = steps.astype(jnp.float32), step.astype(jnp.float32) + 1
    warmup = jnp.maximum(1.0, recipe.warmup * total)
    fallen = jnp.clip((done - warmup) / jnp.maximum(total - warmup, 1.0), 0.0, 1.0)
    low = recipe.final_rate
    cosine = low + (1 - low) * 0.5 * (1 + jnp.cos(math.pi * fallen))
    return recipe.learning_rate * jnp.minimum(done / warmup, cosine)


def make_optimiser(masters: Params, recipe: Recipe) -> optax.GradientTransformation:
    """AdamW after clipping, for a rate of -1: the schedule multiplies what it returns."""
    treedef = jax.tree.structure(masters)
    decays = treedef.unflatten([_decays(p, x) for p, x in leaves(masters)])
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(b1=recipe.betas[0], b2=recipe.betas[1]),
        optax.add_decayed_weights(recipe.weight_decay, mask=decays),
    )


def init_train_state(config: Config, recipe: Recipe) -> TrainState:
    """The state before the first step."""
    masters = init_masters(config, recipe.seed)
    # typed as optax sees a tree: it knows nothing of dataclasses
    tree: Any = masters
    moments = make_optimiser(masters, recipe).init(tree)
    return TrainState(jnp.zeros((), jnp.int32), masters, moments)


@functools.partial(jax.jit, static_argnames=("config", "recipe"), donate_argnames=("state",))
def train_step(
    state: TrainState,
    window: Int[Array, "B W"],
    mode: Mode,
    steps: Int[Array, ""],
    *,
    config: Config,
    recipe: Recipe,
) -> tuple[TrainState, Metrics]:
    """One step.

    Args:
        state: donated.
        window: ids, see `losses.tokens_needed`.
        mode: of the step.
        steps: of the whole run, for the schedule.
        config: what is trained, in its stored forms.
        recipe: how.

    Returns:
        The state, and the metrics of `losses.total_loss` with the gradient's norm before clipping.
    """

    def loss(masters: Params) -> tuple[Array, Metrics]:
        return total_loss(in_compute_dtype(masters, config), window, mode, recipe)

    gradient, metrics = jax.grad(loss, has_aux=True)(state.masters)
    optimiser, tree = make_optimiser(state.masters, recipe), cast(Any, state.masters)
    updates, moments = optimiser.update(gradient, state.optimiser, tree)
    rate = learning_rate(recipe, state.step, steps)
    changed = [
        x - rate * (recipe.table_rate if _last(path) == _TABLE else 1.0) * update
        for (path, x), update in zip(leaves(state.masters), jax.tree.leaves(updates), strict=True)
    ]
    masters = jax.tree.unflatten(jax.tree.structure(state.masters), changed)
    metrics["gradient_norm"] = optax.global_norm(gradient)
    return TrainState(state.step + 1, masters, moments), metrics


@functools.partial(jax.jit, static_argnames=("config", "recipe"))
def evaluate_step(
    masters: Params, window: Int[Array, "B W"], mode: Mode, *, config: Config, recipe: Recipe
) -> Metrics:
    """The metrics of a batch without a step."""
    return total_loss(in_compute_dtype(masters, config), window, mode, recipe)[1]


def _as_e4m3(table: Array) -> Array:
    """The table rounded as it will be stored; the derivative is that of the masters."""
    limited = jnp.clip(table / TABLE_SCALE, -_LARGEST_E4M3, _LARGEST_E4M3)
    stored = ScaledTable(
        limited.astype(jnp.float8_e4m3fn), jnp.asarray(TABLE_SCALE, jnp.bfloat16)
    ).dequantize()
    return table + jax.lax.stop_gradient(stored - table)


def _decays(path: str, leaf: Array) -> bool:
    tensor = leaf.ndim > 1 and min(leaf.shape) > 1
    return tensor and _last(path) not in (*_EMBEDDINGS, _TABLE, "conv1d")


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def parameter_bytes(config: Config) -> int:
    """Bytes of the exported tensors."""
    return sum(math.prod(t.shape) * jnp.dtype(t.dtype).itemsize for _, t in leaves(declare(config)))
