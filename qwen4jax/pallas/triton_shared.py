# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Shared memory of a Triton program that is addressed by computed numbers.

The language has neither a scatter within a program nor a list that a loop reads from. So a few
lines of inline assembly do it. An access happens once for every element of a block, and where a
block has fewer elements than there are threads, threads repeat each other's. What other threads
wrote is there after a `tl.debug_barrier()`.
"""

import triton
import triton.language as tl

_PUT = tl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
_PUT_IF = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.b32 [$1], $3; mov.b32 $0, 0; }"
)
_GET = tl.constexpr("ld.shared.b32 $0, [$1];")
_GET_4 = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")


def words(count):
    """PTX for `allocate`: at least so many words, in whole kilobytes.

    Triton's own shared memory lies behind it, and tiles of some products want its boundaries.
    """
    count = -(-count // 256) * 256
    return f"{{ .shared .align 1024 .b32 words[{count}]; mov.b32 $0, words; }}"


@triton.jit
def allocate(WORDS: tl.constexpr):
    """Address of `words(count)`, which hold anything. Once in a program."""
    unused = tl.program_id(0)
    return tl.inline_asm_elementwise(WORDS, "=r,r", [unused], dtype=tl.int32, is_pure=False, pack=1)


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


@triton.jit
def get_settled(memory, word):
    """Reads words that are not written any more: loops with loads under way may move it about."""
    return tl.inline_asm_elementwise(
        _GET, "=r,r", [memory + 4 * word], dtype=tl.int32, is_pure=True, pack=1
    )
