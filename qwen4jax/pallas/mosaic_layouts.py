"""How several Mosaic kernels lay matrices out, in shared memory and in registers."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

# of wgmma's bfloat16 operands: swizzled lines of 128 bytes
SWIZZLED: Any = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
# [rows, 64] where a warp holds two rows, and a lane one column of each half of them
LINES = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (32,), (1,))),
    warp_dims=(-6,),
    lane_dims=(-2,),
    vector_dim=-1,
)
