"""What the kernels take, known without their language."""

import jax.numpy as jnp

# groups that a program chooses among, and the blocks of one, in short rows to long ones
GROUPS, SHORT, MIDDLE, LONG = 4096, 4, 8, 16
# blocks chosen: the candidates of a long row are held in registers
_MOST = 512

# Mosaic: lines of a row that a warpgroup holds in registers, blocks of a line in short rows and in
# long ones, and most blocks of both: a fourth warpgroup with long lines would spill
MOSAIC_LINES = 64
_MOSAIC_COLUMNS = {64: 16384, 128: 24576}


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


def refuses_mosaic(scores, index, best=None, *, blocks, ratio):
    """What keeps the Mosaic kernel from these arguments, if anything."""
    if scores.dtype != jnp.float32:
        return f"is for float32 scores, these are {scores.dtype}"
    width, most = scores.shape[-1], max(_MOSAIC_COLUMNS.values())
    if width > most:
        return f"is for up to {most} blocks a row, these are {width}"
    if width % (columns := mosaic_columns(width)):
        return f"is for multiples of {columns} blocks in rows of this length, not {width}"
    if blocks % MOSAIC_LINES or blocks > _MOST:
        return f"chooses multiples of 64 blocks up to {_MOST}, not {blocks}"
    if ratio not in (1, 2, 4, 8):
        return f"is for blocks of 1, 2, 4 or 8 tokens, not {ratio}"
    return None


def mosaic_columns(width):
    """Blocks of a line of rows of `width` blocks."""
    return next(columns for columns, most in _MOSAIC_COLUMNS.items() if width <= most)
