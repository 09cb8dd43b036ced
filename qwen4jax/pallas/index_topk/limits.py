"""What the kernels take, known without their language."""

import jax.numpy as jnp

# groups that a program chooses among, and the blocks of one, in short rows and in long ones
GROUPS, SHORT, LONG = 4096, 4, 16
# blocks chosen: the candidates of a long row are held in registers
_MOST = 512


def refuses(scores, index, best=None, *, blocks, ratio):
    """What keeps the Triton kernel from these arguments, if anything."""
    if scores.dtype != jnp.float32:
        return f"is for float32 scores, these are {scores.dtype}"
    if scores.shape[-1] > GROUPS * LONG:
        return f"is for up to {GROUPS * LONG} blocks a row, these are {scores.shape[-1]}"
    if blocks > _MOST:
        return f"chooses up to {_MOST} blocks, not {blocks}"
    if best is not None and best.shape[-1] != -(-scores.shape[-1] // LONG):
        return f"is for the best of {LONG} blocks each"
    return None
