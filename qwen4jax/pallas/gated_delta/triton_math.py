# pyright: reportGeneralTypeIssues=false
"""What the Triton kernels of Gated DeltaNet share: elementary functions."""

import triton
import triton.language as tl

# exp(-88) is the last normal float32, as in the reference
DECAY_FLOOR = tl.constexpr(-88.0)


@triton.jit
def log1p(x):
    """`log(1 + x)` of x in [0, 1], to float32 rounding: 2 atanh(x / (2 + x)) as a series.

    The hardware's logarithm is exact to 2**-22 absolutely, and decays are often smaller.
    """
    s = x / (2.0 + x)
    s2 = s * s
    p = 1.0 / 19.0
    for i in tl.static_range(8):
        p = p * s2 + 1.0 / (17.0 - 2.0 * i)
    return 2.0 * s * (1.0 + s2 * p)


@triton.jit
def exp(x):
    """`exp(x)`, below the normal numbers 0: four instructions less than where those are kept."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], tl.float32, True, 1
    )


@triton.jit
def silu(x):
    """`x sigmoid(x)` by the hardware's reciprocal, which is exact to 2**-23."""
    return x * tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + exp(-x)], tl.float32, True, 1
    )
