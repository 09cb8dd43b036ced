# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Counts in bins of shared memory, which the language has none of that keeps up with it.

A block that counts must have no fewer elements than there are threads, or threads repeat each
other's.
"""

import triton
import triton.language as tl

from qwen4jax.pallas import triton_shared

# bins of a count, of which a program has two, each with a word for what is in no bin; and a list
BINS = tl.constexpr(2048)
COUNTS = tl.constexpr(BINS.value + 4)
LISTED = tl.constexpr(2048)
WORDS = tl.constexpr(triton_shared.words(2 * COUNTS.value + LISTED.value))

_CLEAR = tl.constexpr("st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;")
_COUNT = tl.constexpr("red.shared.add.u32 [$1], 1; mov.b32 $0, 0;")


@triton.jit
def clear(memory, THREADS: tl.constexpr):
    """Sets all bins to 0."""
    thread = tl.arange(0, THREADS)
    for i in tl.static_range(BINS // 4 // THREADS):
        at = memory + 16 * (thread + i * THREADS)
        tl.inline_asm_elementwise(
            _CLEAR, "=r,r,r", [at, tl.zeros_like(at)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def count(memory, word):
    """Adds 1 to words."""
    tl.inline_asm_elementwise(
        _COUNT, "=r,r", [memory + 4 * word], dtype=tl.int32, is_pure=False, pack=1
    )
