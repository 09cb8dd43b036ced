# pyright: reportArgumentType=false
"""Where in a Triton program loaded values are used first.

A load does not wait, what uses it does. The compiler puts a tile into shared memory, for a product,
right where it is loaded, and ptxas moves loads down to their uses: then a program waits for some of
its bytes before it has asked for the others. With a `tl.debug_barrier()` below the loads, which
none of them crosses, and `from_here` below that, all of them are under way at once.
"""

import triton
import triton.language as tl


@triton.jit
def from_here(loaded):
    """The same values, of 16 or 32 bits, for uses after this place in the program only."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [loaded],
        dtype=loaded.dtype,
        is_pure=False,
        pack=32 // loaded.dtype.primitive_bitwidth,
    )
