"""The mixture of experts: choosing and applying the routed experts."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen4jax.pallas import counters
from qwen4jax.pallas.moe import limits, reference
from qwen4jax.pallas.registry import Kernel, Operation
from qwen4jax.pallas.skinny_matmul import projections

ROUTE = Operation(
    "moe.route",
    {
        "reference": reference.route,
        "triton": Kernel(
            "qwen4jax.pallas.moe.triton_kernels.route",
            needs=("triton",),
            refuses=limits.refuses_route,
        ),
    },
)


def _separate(x, gate, shared_gate, k, counter, *, renormalize):
    """`router` as two operations."""
    logits, share = projections(x, (gate, shared_gate), out_dtypes=(x.dtype, jnp.float32))
    return (*route(logits, k, renormalize=renormalize), share), counter


ROUTER = Operation(
    "moe.router",
    {
        "reference": reference.router,
        "separate": _separate,
        "triton": Kernel(
            "qwen4jax.pallas.moe.triton_kernels.router",
            needs=("triton",),
            refuses=limits.refuses_router,
        ),
    },
)
EXPERTS = Operation(
    "moe.experts",
    {
        "reference": reference.experts,
        "triton": Kernel(
            "qwen4jax.pallas.moe.triton_kernels.experts",
            needs=("triton",),
            refuses=limits.refuses_experts,
        ),
        "mosaic_hopper": Kernel(
            "qwen4jax.pallas.moe.mosaic_hopper.experts",
            needs=("triton",),
            devices=limits.MOSAIC_DEVICES,
            devices_text=limits.MOSAIC_TEXT,
            refuses=limits.refuses_mosaic,
        ),
        "triton_sorted": Kernel(
            "qwen4jax.pallas.moe.triton_many.experts",
            needs=("triton",),
            refuses=limits.refuses_sorted,
        ),
    },
)


class Shared(NamedTuple):
    """The expert that every token passes.

    Attributes:
        gate: plain matrix.
        up: plain matrix.
        down: plain matrix.
        logit: of its share in each token's sum, float32.
    """

    gate: Float[Array, "S D"]
    up: Float[Array, "S D"]
    down: Float[Array, "D S"]
    logit: Float[Array, "T 1"]


def route(
    logits: Float[Array, "T E"], k: int, *, renormalize: bool, implementation: str | None = None
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The `k` experts of each token and their weights.

    Softmax over all experts in float32, then the `k` largest (ties to the lower expert), divided by
    their sum if `renormalize`.

    Returns:
        Expert ids in falling order of weight, and the weights in float32.
    """
    return ROUTE.run(implementation, logits.shape[0], logits, k, renormalize=renormalize)


class Routing(NamedTuple):
    """What the router decides.

    Attributes:
        ids: experts of each token, in falling order of weight.
        weights: of each, float32.
        share: logit of the shared expert's share, float32.
    """

    ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    share: Float[Array, "T 1"]


def router(
    x: Float[Array, "T D"],
    gate: Float[Array, "E D"],
    shared_gate: Float[Array, "1 D"],
    k: int,
    counter: Int[Array, " N"] | None = None,
    *,
    renormalize: bool,
    implementation: str | None = None,
) -> tuple[Routing, Int[Array, " N"]]:
    """The `k` experts of each token, their weights, and the logit of the shared expert's share.

    Logits are `gate @ x[t]`, added up in float32 and rounded to the dtype of `x`. The `k` largest
    are chosen (ties to the lower expert); their weights are those of `route`.

    Args:
        x: tokens.
        gate: of the router.
        shared_gate: of the shared expert, whose logit is not rounded.
        k: choices of a token.
        counter: in its first places zeros, by which the programs of a launch learn who is last
            (`counters`), None for a fresh one. One array serves all calls of a program, each with
            what the one before it returned.
        renormalize: whether the weights are divided by their sum.
        implementation: see `ROUTER`; by default the fastest.

    Returns:
        The choice, and the counter for the next call.
    """
    inputs = (x, gate, shared_gate, k, counters.fresh() if counter is None else counter)
    chosen, left = ROUTER.run(implementation, x.shape[0], *inputs, renormalize=renormalize)
    return Routing(*chosen), left


def experts(
    x: Float[Array, "T D"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Any,
    down: Any,
    shared: Shared | None = None,
    *,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """`sum_j weights[t, j] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))`, `e = ids[t, j]`.

    A shared expert adds `sigmoid(logit[t])` times the same of its matrices.

    Args:
        x: tokens.
        ids: experts of each token, distinct within a token.
        weights: float32.
        gate_up: [E, 2, I, D] (gate, up), an array or a stored form of `quant.py`, dequantised
            exactly where it is used.
        down: [E, D, I], likewise.
        shared: the shared expert, if it takes part.
        out_dtype: of the result, by default float32.
        implementation: see `EXPERTS`; by default the fastest.

    Returns:
        Summed in float32, in the order of `ids`' columns or of the experts, the shared one last,
        and rounded once.
    """
    inputs = (x, ids, weights, gate_up, down, shared)
    return EXPERTS.run(implementation, x.shape[0], *inputs, out_dtype=out_dtype or jnp.float32)
