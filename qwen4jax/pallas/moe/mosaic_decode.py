"""Stored weights as left operands of wgmma in registers, for the Mosaic kernel of the experts.

Lane 4 r + t of a warp has rows r and r + 8 of its 16, in wgmma's operand as in what it loads here.
The order of the columns is free as long as the right operand has the same one. So a lane loads 16
bytes of a row at once, converts them where they are, and names the registers as wgmma wants them:
`triton_tiles.put` puts tokens in that order of columns, `turn` hidden values.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

# its type has the function's first parameter, which callers do not give
_inline: Any = plgpu.inline_mgpu
TILE: Any = plgpu.Layout.WGMMA
# [64 rows, 64 bytes] where lane 4 r + t of a warp has rows r and r + 8 of its 16, bytes 16 t to
# 16 t + 15
BYTES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 64), (16, 64), (8, 64), (16,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# [64, 8] where lanes of wgmma's sums have the rows that `decode` has as these columns
TURNED = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (32, 8), (16, 8), (8, 8), (2, 8), (2,))),
    warp_dims=(-5,),
    lane_dims=(-9, -7, -3, -2),
    vector_dim=-1,
)
# [8, 64], the transpose of WGMMA's
LYING = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (8, 16), (8, 8), (2, 8), (1,))),
    warp_dims=(-8,),
    lane_dims=(-2, -5),
    vector_dim=-1,
)


@_inline(
    arg_types=(BYTES,),
    return_type=plgpu.ShapeDtypeStruct((64, 128), jnp.float16, layout=TILE),
)
def decode(ctx, w):
    """e4m3 [64, 128] as float16, columns in another order: bytes stay with their lanes."""
    del ctx
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    # [64 columns, half of the rows]
    given = w.astype(ir.F16Type.get()).registers.reshape(2, 2)
    # [16 columns, half of them, half of the rows]
    made = np.empty((8, 2, 2), dtype=object)
    for block, i, side, rows in np.ndindex(2, 4, 2, 2):
        at = 4 * i + 2 * side
        taken = vector.extract_strided_slice(pair, given[block, rows], [at], [2], [1])
        made[block * 4 + i, side, rows] = taken
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 128))
    return mgpu.FragmentedArray(
        _registers=made.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


@_inline(
    arg_types=(TILE,),
    return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.bfloat16, layout=TURNED),
)
def turn(ctx, x):
    """Rounded to bfloat16, rows in the order of `decode`'s columns."""
    del ctx
    layout = TURNED.to_mgpu()
    registers = x.astype(ir.BF16Type.get()).registers.reshape(layout.registers_shape((64, 8)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


@_inline(
    arg_types=(TILE,),
    return_type=plgpu.ShapeDtypeStruct((8, 64), jnp.float32, layout=LYING),
)
def lie(ctx, x):
    """The transpose."""
    del ctx
    one, layout = ir.VectorType.get((1,), ir.F32Type.get()), LYING.to_mgpu()
    given = x.registers.reshape(2)
    made = np.empty((2, 2), dtype=object)
    for half, column in np.ndindex(2, 2):
        taken = vector.extract_strided_slice(one, given[half], [column], [1], [1])
        made[half, column] = taken
    registers = made.reshape(layout.registers_shape((8, 64)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
