"""The mixture of experts: choosing and applying the routed experts."""

from typing import Any

from jaxtyping import Array, Float, Int

from qwen4jax.pallas.moe import limits, reference
from qwen4jax.pallas.registry import Kernel, Operation

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
EXPERTS = Operation(
    "moe.experts",
    {
        "reference": reference.experts,
        "triton": Kernel(
            "qwen4jax.pallas.moe.triton_kernels.experts",
            needs=("triton",),
            refuses=limits.refuses_experts,
        ),
    },
)


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


def experts(
    x: Float[Array, "T D"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Any,
    down: Any,
    *,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """`sum_j weights[t, j] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))`, `e = ids[t, j]`.

    Args:
        x: tokens.
        ids: experts of each token, distinct within a token.
        weights: float32.
        gate_up: [E, 2, I, D] (gate, up), an array or a stored form of `quant.py`, dequantised
            exactly where it is used.
        down: [E, D, I], likewise.
        implementation: see `EXPERTS`; by default the fastest.

    Returns:
        float32, summed in float32 in the order of `ids`' columns or of the experts.
    """
    return EXPERTS.run(implementation, x.shape[0], x, ids, weights, gate_up, down)
