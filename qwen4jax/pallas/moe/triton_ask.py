# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""Asking memory for what a later launch reads."""

import triton
import triton.language as tl

# by one thread: whoever else reads the bytes soon finds them in the cache
_ASK = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
mov.b32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, $2;
}""")


@triton.jit
def ask(array, program, PROGRAMS: tl.constexpr, SIZE: tl.constexpr):
    """Has memory send a program's share of SIZE elements to the cache; waits not.

    A share is whole pieces of 16 elements; the last program's ends with the array.
    """
    SHARE: tl.constexpr = min((SIZE + PROGRAMS * 16 - 1) // (PROGRAMS * 16) * 16, SIZE)
    first = array + tl.minimum(program * SHARE, SIZE - SHARE)
    BYTES: tl.constexpr = SHARE * array.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        _ASK, "=r,l,r", [first.to(tl.int64), BYTES], dtype=tl.int32, is_pure=False, pack=1
    )
