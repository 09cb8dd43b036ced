# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Shared memory of a Triton program that is addressed by computed numbers.

The language has neither a scatter within a program nor a count in bins that keeps up with the
memory's own. So a few lines of inline assembly do it. An access happens once for every element of a
block: a block that counts must have no fewer elements than there are threads, or threads repeat
each other's. What other threads wrote is there after a `tl.debug_barrier()`.
"""

import triton
import triton.language as tl

# bins of a count, of which a program has two, each with a word for what is in no bin; and a list
BINS = tl.constexpr(2048)
COUNTS = tl.constexpr(BINS.value + 4)
LISTED = tl.constexpr(2048)

_ALLOCATE = tl.constexpr(
    f"{{ .shared .align 16 .b32 words[{2 * COUNTS.value + LISTED.value}]; mov.b32 $0, words; }}"
)
_PUT = tl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
_PUT_IF = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.b32 [$1], $3; mov.b32 $0, 0; }"
)
_CLEAR = tl.constexpr("st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;")
_COUNT = tl.constexpr("red.shared.add.u32 [$1], 1; mov.b32 $0, 0;")
_GET = tl.constexpr("ld.shared.b32 $0, [$1];")
_GET_4 = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")


@triton.jit
def allocate():
    """Address of 2 * COUNTS + LISTED words, which hold anything. Once in a program."""
    unused = tl.program_id(0)
    return tl.inline_asm_elementwise(
        _ALLOCATE, "=r,r", [unused], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def put(memory, word, value):
    """Writes words."""
    tl.inline_asm_elementwise(
        _PUT, "=r,r,r", [memory + 4 * word, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def put_if(memory, word, value, there):
    """Writes those words that are `there`."""
    args = [memory + 4 * word, there.to(tl.int32), value]
    tl.inline_asm_elementwise(_PUT_IF, "=r,r,r,r", args, dtype=tl.int32, is_pure=False, pack=1)


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


@triton.jit
def get(memory, word):
    """Reads words."""
    return tl.inline_asm_elementwise(
        _GET, "=r,r", [memory + 4 * word], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def get_4(memory, word):
    """Reads four words each, from multiples of four on."""
    return tl.inline_asm_elementwise(
        _GET_4,
        "=r,=r,=r,=r,r",
        [memory + 4 * word],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
