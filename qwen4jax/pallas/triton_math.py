# pyright: reportGeneralTypeIssues=false
"""Elementary functions of Triton kernels, by the hardware's approximations but for `softplus`.

Relative errors are about 2**-22, and of an exponential 2**-24 |x| more, for its argument is rounded
once. `tl.exp` and `tl.sigmoid` keep numbers below the normal ones and divide
exactly, which is several instructions more.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def exp(x):
    """`exp(x)`, below the normal numbers 0."""
    return _exp2(x * _LOG2_E)


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))`."""
    return _reciprocal(_exp2(x * -_LOG2_E) + 1.0)


@triton.jit
def silu(x):
    """`x sigmoid(x)`, in the order of operations that was measured: `x` is negated by itself."""
    return x * _reciprocal(1.0 + exp(-x))


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, to float32 rounding."""
    return tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x)))


@triton.jit
def _log1p(x):
    """`log(1 + x)` of x in [0, 1], to float32 rounding: 2 atanh(x / (2 + x)) as a series.

    The hardware's logarithm is exact to 2**-22 absolutely, and decays are often smaller.
    """
    s = x / (2.0 + x)
    s2 = s * s
    p = 1.0 / 19.0
    for i in tl.static_range(8):
        p = p * s2 + 1.0 / (17.0 - 2.0 * i)
    return 2.0 * s * (1.0 + s2 * p)
