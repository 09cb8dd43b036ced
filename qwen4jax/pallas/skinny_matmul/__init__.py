"""Dense projections of few rows: every weight is read once."""

from typing import Any

from jaxtyping import Array, Float

from qwen4jax.pallas.registry import Operation
from qwen4jax.pallas.skinny_matmul import reference

IMPLEMENTATIONS = Operation("skinny_matmul", {"reference": reference.skinny_matmul})


def skinny_matmul(
    x: Float[Array, "*rows I"],
    w: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    *,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*rows O"]:
    """`x @ w.T + bias`, accumulated in float32 and rounded once.

    Args:
        x: rows of activations.
        w: weight as in the checkpoint, [outputs, inputs].
        bias: added before rounding.
        out_dtype: of the result, by default `x.dtype`.
        implementation: see `IMPLEMENTATIONS`; by default the fastest.
    """
    rows = x.size // x.shape[-1]
    return IMPLEMENTATIONS.run(implementation, rows, x, w, bias, out_dtype=out_dtype or x.dtype)
