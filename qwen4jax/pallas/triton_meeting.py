# pyright: reportArgumentType=false
"""All programs of a launch meet: what each stored before, all read afterwards.

A second launch costs its start and a latency; this is an atomic and a look at it. All programs must
run at once, so an implementation that meets refuses GPUs with fewer multiprocessors than it has
programs. And launches that meet must not run beside each other: each would hold multiprocessors
that the other waits for. They do not when each takes the counter that the one before returned.
"""

import triton
import triton.language as tl

# Every meeting adds 2**31 in all and so turns the sign, whatever it was and however many they are.
# After 2**24 looks, seconds, some program will never run: an error instead of a wait without end.
_MEET = tl.constexpr("""{
.reg .pred p;
.reg .b32 before, now, looks;
mov.b32 $0, 0;
mov.u32 now, %tid.x;
setp.ne.u32 p, now, 0;
@p bra MET;
atom.acq_rel.gpu.global.add.u32 before, [$1], $2;
mov.b32 looks, 0;
LOOK:
ld.acquire.gpu.global.u32 now, [$1];
xor.b32 now, now, before;
setp.lt.s32 p, now, 0;
@p bra MET;
add.u32 looks, looks, 1;
setp.lt.u32 p, looks, 16777216;
@p bra LOOK;
trap;
MET:
}""")


@triton.jit
def meet(counter, N: tl.constexpr):
    """Waits until all N programs of a grid of one axis are here; `counter` is an int32's place."""
    own = tl.where(tl.program_id(0) == 0, 2147483648 - (N - 1), 1).to(tl.int32)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _MEET, "=r,l,r", [counter.to(tl.int64), own], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
