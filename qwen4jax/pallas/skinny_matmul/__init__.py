"""Dense projections of few rows: every weight is read once."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qwen4jax import quant
from qwen4jax.pallas.registry import HOPPER, Kernel, Operation
from qwen4jax.pallas.skinny_matmul import reference

_TRITON = "qwen4jax.pallas.skinny_matmul.triton_kernels"
_TRITON_ARGMAX = "qwen4jax.pallas.skinny_matmul.triton_argmax"
_MOSAIC = "qwen4jax.pallas.skinny_matmul.mosaic_hopper"
# above these cuBLAS is as good, and larger tiles than the kernels' are better: of one weight, and
# of several
MOST_ROWS, MOST_ROWS_TOGETHER = 512, 128
MOST_WEIGHTS = 4
# the narrow operand of wgmma, in Mosaic
MOST_TOKENS = 32


def _refuses(x: Any, weights: Sequence[Any], most_rows: int = MOST_ROWS_TOGETHER) -> str | None:
    rows = x.size // max(x.shape[-1], 1)
    plain = [w for w in weights if not isinstance(w, quant.Quantized)]
    if any(a.dtype != jnp.bfloat16 for a in (x, *plain)):
        return "takes bfloat16 rows, and weights in bfloat16, block-scaled FP8 or NVFP4"
    if any(isinstance(w, quant.ScaledTable) for w in weights):
        return "multiplies with no table"
    if not 1 <= rows <= most_rows:
        return f"takes 1 to {most_rows} rows, not {rows}"
    if len(weights) > MOST_WEIGHTS:
        return f"takes up to {MOST_WEIGHTS} weights, not {len(weights)}"
    if x.shape[-1] % 128:
        return f"takes inputs in multiples of 128, not {x.shape[-1]}"
    return None


def _refuses_one(x: Any, w: Any, bias: Any, **_: Any) -> str | None:
    # NVFP4 has no square tiles: it would be read and decoded for every 32 rows
    most_rows = MOST_ROWS_TOGETHER if isinstance(w, quant.Nvfp4) else MOST_ROWS
    return "adds no bias" if bias is not None else _refuses(x, (w,), most_rows)


def _refuses_several(x: Any, weights: Sequence[Any], biases: Sequence[Any], **_: Any) -> str | None:
    return "adds no bias" if any(b is not None for b in biases) else _refuses(x, weights)


def _refuses_mosaic(x: Any, weights: Sequence[Any], dtypes: Sequence[Any]) -> str | None:
    rows = x.size // max(x.shape[-1], 1)
    if any(isinstance(w, quant.Quantized) for w in weights):
        return "takes no weights in a stored form"
    if any(a.dtype != jnp.bfloat16 for a in (x, *weights)):
        return "takes bfloat16 rows and weights"
    if any(jnp.dtype(t) not in (jnp.bfloat16, jnp.float32) for t in dtypes):
        return "gives bfloat16 or float32"
    if not 1 <= rows <= MOST_TOKENS:
        return f"takes 1 to {MOST_TOKENS} rows, not {rows}"
    if x.shape[-1] % 128 or any(len(w) % 8 for w in weights):
        return "takes inputs in multiples of 128 and outputs of 8"
    if any(
        jnp.dtype(t) == jnp.float32 and len(w) % 32 for w, t in zip(weights, dtypes, strict=True)
    ):
        return "gives float32 outputs in multiples of 32"
    return None


def _refuses_one_mosaic(x: Any, w: Any, bias: Any, *, out_dtype: Any) -> str | None:
    return "adds no bias" if bias is not None else _refuses_mosaic(x, (w,), (out_dtype,))


def _refuses_several_mosaic(
    x: Any, weights: Sequence[Any], biases: Sequence[Any], *, out_dtypes: Sequence[Any]
) -> str | None:
    if any(b is not None for b in biases):
        return "adds no bias"
    return _refuses_mosaic(x, weights, out_dtypes)


IMPLEMENTATIONS = Operation(
    "skinny_matmul",
    {
        "reference": reference.skinny_matmul,
        "triton": Kernel(f"{_TRITON}.skinny_matmul", needs=("triton",), refuses=_refuses_one),
        "mosaic_hopper": Kernel(f"{_MOSAIC}.skinny_matmul", refuses=_refuses_one_mosaic, **HOPPER),
    },
)
PROJECTIONS = Operation(
    "skinny_matmul.projections",
    {
        "reference": reference.projections,
        "triton": Kernel(f"{_TRITON}.projections", needs=("triton",), refuses=_refuses_several),
        "mosaic_hopper": Kernel(
            f"{_MOSAIC}.projections", refuses=_refuses_several_mosaic, **HOPPER
        ),
    },
)


def _separate(x: Any, w: Any) -> tuple[Any, Any]:
    """`argmax` of `skinny_matmul`, by whatever that runs."""
    return reference.best_and_finite(skinny_matmul(x, w, out_dtype=jnp.float32))


ARGMAX = Operation(
    "skinny_matmul.argmax",
    {
        "reference": reference.argmax,
        "separate": _separate,
        "triton": Kernel(
            f"{_TRITON_ARGMAX}.argmax", needs=("triton",), refuses=lambda x, w: _refuses(x, (w,))
        ),
    },
)


def skinny_matmul(
    x: Float[Array, "*rows I"],
    w: Float[Array, "O I"] | quant.Nvfp4 | quant.BlockFp8,
    bias: Float[Array, " O"] | None = None,
    *,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*rows O"]:
    """`x @ w.T + bias`, accumulated in float32 and rounded once.

    Args:
        x: rows of activations.
        w: weight as in the checkpoint, [outputs, inputs], plain or in a stored form, whose values
            then are exact: not rounded to the rows' dtype.
        bias: added before rounding.
        out_dtype: of the result, by default `x.dtype`.
        implementation: see `IMPLEMENTATIONS`; by default the fastest.
    """
    rows = x.size // max(x.shape[-1], 1)
    out_dtype = out_dtype or x.dtype
    return IMPLEMENTATIONS.run(implementation, rows, x, w, bias, out_dtype=out_dtype)


def projections(
    x: Float[Array, "*rows I"],
    weights: Sequence[Float[Array, "_ I"] | quant.Nvfp4 | quant.BlockFp8],
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    *,
    out_dtypes: Sequence[Any] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows _"], ...]:
    """`skinny_matmul` of the same rows with several weights, in one launch.

    The weights stay the arrays that they are, so that a checkpoint's tensors need no second,
    concatenated copy.

    Args:
        x: rows of activations.
        weights: each [outputs, inputs], plain or in a stored form.
        biases: one for each weight, or None; by default none at all.
        out_dtypes: of the results, by default `x.dtype`.
        implementation: see `PROJECTIONS`; by default the fastest.
    """
    rows = x.size // max(x.shape[-1], 1)
    biases = tuple(biases or (None,) * len(weights))
    out_dtypes = tuple(out_dtypes or (x.dtype,) * len(weights))
    return PROJECTIONS.run(implementation, rows, x, tuple(weights), biases, out_dtypes=out_dtypes)


def argmax(
    x: Float[Array, "*rows I"],
    w: Float[Array, "O I"] | quant.Nvfp4 | quant.BlockFp8,
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, "*rows"], Bool[Array, "*rows"]]:
    """Number of each row's largest output of `skinny_matmul` in float32, which nobody else reads.

    The lowest number among equals, -0 and 0 too; the first NaN if there is one (`jnp.argmax`).

    Args:
        x: rows of activations.
        w: as `skinny_matmul`; at least one output.
        implementation: see `ARGMAX`; by default the fastest.

    Returns:
        The numbers, int32, and whether all outputs of a row are finite.
    """
    rows = x.size // max(x.shape[-1], 1)
    return ARGMAX.run(implementation, rows, x, w)
