# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
"""Weights that memory sends to the level-2 cache before a warp has registers for them.

It pays where a program's rows are long and lie a row apart, in bfloat16: an H200 takes 159 us
instead of 206 for the routed experts of 4 tokens, and 576 instead of 619 for 16. NVFP4 lies in one
piece, and memory does not bound its programs (`triton_gate_up.py`): asking for all of a program's
own weights took 57 us instead of 47, for those of a program one wave later 59.
"""

import triton
import triton.language as tl

# a line for each of the first threads: `$2` bytes, `$3` lines, `$4` bytes apart
_ASK = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
.reg .b64 a;
mov.u32 t, %tid.x;
setp.lt.u32 p, t, $3;
mad.wide.u32 a, t, $4, $1;
@p cp.async.bulk.prefetch.L2.global [a], $2;
mov.b32 $0, $2;
}""")


@triton.jit
def ask(
    weight,
    row,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    W: tl.constexpr,
):
    """Asks for steps FIRST to LAST of a program's rows of bfloat16 [..., N]; waits not.

    Args:
        weight: the matrices.
        row: the first, over all matrices.
        FIRST: step of a warp.
        LAST: step after the last, or more than there are.
        N: columns.
        C: columns of a chunk.
        SPLIT: of `triton_stored.weight_pointers`.
        W: warps.
    """
    EACH: tl.constexpr = C * W if SPLIT else C
    END: tl.constexpr = min(LAST, N // EACH)
    if END > FIRST:
        ROWS: tl.constexpr = 16 * (1 if SPLIT else W)
        first = weight + row * N + FIRST * EACH
        tl.inline_asm_elementwise(
            _ASK,
            "=r,l,r,r,r",
            [first.to(tl.int64), (END - FIRST) * EACH * 2, ROWS, N * 2],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
