"""What the kernels take, known without their language."""

import jax.numpy as jnp

# groups that a program chooses among, and the blocks of one, in short rows to long ones
GROUPS, SHORT, MIDDLE, LONG = 4096, 4, 8, 16
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
    size = group_of(scores.shape[-1])
    if best is not None and best.shape[-1] != -(-scores.shape[-1] // size):
        return f"is for the best of {size} blocks each in rows of {scores.shape[-1]}"
    return None


def group_of(width):
    """Blocks of a group in rows of `width` blocks."""
    return next((size for size in (SHORT, MIDDLE) if width <= GROUPS * size), LONG)
