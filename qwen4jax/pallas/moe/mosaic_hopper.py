"""The routed experts of a few tokens in Pallas Mosaic GPU, for Hopper: CTAs that stay.

The floor is the bytes of the chosen experts: 364 MB in bfloat16 for 4 tokens, 85 us at 4.3 TB/s,
182 MB and 42 us in FP8. A multiprocessor has 128 KB of FP8 or 160 KB of bfloat16 under way all the
time, TMA brings them to shared memory, and wgmma multiplies 64 rows of them with 8 columns. Of up
to 8 tokens the columns are the tokens themselves, whichever expert they chose. More tokens are
gathered, 8 pairs of one expert a tile, and an expert with more pairs has several tiles, whose
weights the cache has.

An H200 takes 101 us for 4 tokens in bfloat16, 62 in FP8; Triton's kernels take 150 and 97. With
the shared expert 32 tokens in bfloat16 take 579 us instead of 887, 128 in FP8 646 instead of 991.

FP8 is decoded to float16, in one instruction a pair of weights, and a scale of 128 x 128 weights
multiplies the sums of a step. Tokens and hidden values come into float16 by a power of two of each
column (`triton_tiles.put`, `mosaic_products`), which keeps their bits.

NVFP4 through the same ring, decoded in registers with its scales, was no faster than in Triton: 394
to 438 us and 391 for 128 tokens, 56 and 39 for 4, with two to four warpgroups a multiprocessor that
multiply; it is Triton's.

The shared expert has launches of its own, three after each other: with it 4 tokens in FP8 take
71.2 us, without it 61.8.

All CTAs have to run at once: those that need a tile's hidden values wait for those that make them.
So no two such launches may run side by side, and the kernel is for GPUs with 132 multiprocessors,
each of which has room for its one or two CTAs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.moe import limits
from qwen4jax.pallas.moe import mosaic_products as products
from qwen4jax.pallas.moe.mosaic_work import Sizes, Tiles
from qwen4jax.pallas.moe.triton_tiles import gathered_kernel, sum_kernel, tiles_kernel
from qwen4jax.pallas.mosaic_layouts import SWIZZLED
from qwen4jax.pallas.skinny_matmul import projections, skinny_matmul
from qwen4jax.pallas.triton_call import triton_call

TILES = {"bf16": Tiles(128, 5), "fp8": Tiles(128, 4, ctas=2)}
# columns of a program of `sum_kernel`
_SUMMED = 256


def experts(x, ids, weights, gate_up, down, shared, *, out_dtype):
    """See `qwen4jax.pallas.moe.experts`; `limits.refuses_mosaic` says what it takes."""
    form, hidden, width = limits.form(gate_up) or "", x.shape[1], gate_up.shape[-2]
    tiles, (tile_experts, places, count, columns, scales) = _tiles(x, ids, gate_up.shape[0], form)
    w1, s1, _ = limits.stored_arrays(gate_up)
    w2, s2, _ = limits.stored_arrays(down)
    given = dict(experts=tile_experts, count=count, x=columns)
    # TMA has five dimensions, two of which are tiles: matrices come in halves
    given["gate_up"] = w1.reshape(-1, width, hidden)
    given["down"] = w2.reshape(-1, hidden // 2, width)
    if form == "fp8":
        given |= dict(scales=scales, gate_up_scale=s1, down_scale=s2)
    z = Sizes(tiles, hidden, width, form, len(columns) > 1, TILES[form])
    parts = parts_of(given, z)
    own, logit = parts, weights
    if shared is not None:
        own, logit = _shared(x, shared), shared.logit
    return triton_call(
        parts,
        places,
        weights,
        own,
        logit,
        kernel=sum_kernel,
        name=f"experts_tiles_sum_{len(x)}x{ids.shape[1]}x{hidden}",
        out=jax.ShapeDtypeStruct(x.shape, out_dtype),
        grid=(-(-hidden // _SUMMED), len(x)),
        num_warps=4,
        K=ids.shape[1],
        D=hidden,
        BLOCK=_SUMMED,
        SHARED=shared is not None,
    )


def _tiles(x, ids, experts_, form):
    """How many tiles there can be, and what `triton_tiles` makes of them."""
    (tokens, hidden), choices = x.shape, ids.shape[1]
    few, shape = tokens <= limits.FEW_TOKENS, jax.ShapeDtypeStruct
    dtype = jnp.float16 if form == "fp8" else x.dtype
    if few:
        tiles = min(ids.size, experts_)
        # tokens in bfloat16 serve as they are
        columns = shape((1, 8, hidden) if form == "fp8" else (1, 1, 8), dtype)
        grid = 9 if form == "fp8" else 1
        size: dict[str, Any] = dict(P=limits.power_of_2(ids.size))
    else:
        tiles = limits.most_tiles(ids.size, experts_, 8)
        columns = shape((tiles, 8, hidden), dtype)
        grid = experts_
        size = dict(TP=limits.power_of_2(tokens), KP=limits.power_of_2(choices))
        size |= dict(EP=limits.power_of_2(experts_ + 1))
    made = triton_call(
        ids,
        x,
        kernel=tiles_kernel if few else gathered_kernel,
        name=f"experts_tiles_{form}_{tokens}x{choices}x{hidden}",
        out=(
            shape((ids.size,), jnp.int32),
            shape(ids.shape, jnp.int32),
            shape((1,), jnp.int32),
            columns,
            shape(columns.shape[:2], jnp.float32),
        ),
        grid=(grid,),
        num_warps=8 if few else 4,
        num_stages=1,
        T=tokens,
        K=choices,
        E=experts_,
        D=hidden,
        DP=limits.power_of_2(hidden),
        FORM=form,
        **size,
    )
    if few and form == "bf16":
        made = (*made[:3], x[None], made[4])
    return tiles, made


def _shared(x, shared):
    """The shared expert's part of each token, before its share, float32."""
    f32 = jnp.float32
    gate, up = projections(x, (shared.gate, shared.up), out_dtypes=(f32, f32))
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    return skinny_matmul(h, shared.down, out_dtype=f32)


# compiled apart, so that a program with many layers lowers one
@functools.partial(jax.jit, static_argnames=("z",))
def parts_of(given: dict[str, jax.Array], z: Sizes) -> jax.Array:
    """Each column's `down @ (silu(gate @ x) * (up @ x))` of its tile's expert.

    Args:
        given: `experts` [tiles], `count` [1] of tiles, `x` [tiles or 1, 8, D], `gate_up`
            [2 E, I, D] and `down` [2 E, D/2, I]; of FP8 also `scales` [tiles or 1, 8] of columns,
            and of blocks `gate_up_scale` [E, 2, I/128, D/128] and `down_scale` [E, D/128, I/128].
        z: sizes.

    Returns:
        float32 [tiles, 8, D], of which tiles from `count` on and columns of no pair are undefined.
    """

    def body(refs):
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR((z.tiles,)))
        _roles(
            z,
            load=functools.partial(products.load, z, refs),
            multiply=functools.partial(products.multiply, z, refs, ready),
        )

    return launch(z, body, given)["parts"]


def _roles(z, load, multiply):
    """Runs what each warpgroup of a CTA does."""
    role = lax.axis_index("role")

    @pl.when(role == z.cut.consumers)
    def _():
        # the other warps would do the same for nothing
        plgpu.warp_map(lambda warp: pl.when(warp == 0)(load))

    @pl.when(role < z.cut.consumers)
    def _():
        multiply(role)


def launch(z, body, given):
    """Runs `body` in all CTAs; the arrays that it makes by name."""
    stages, columns, consumers = z.cut.stages, z.cut.columns, z.cut.consumers
    weights, wide = (jnp.float8_e4m3fn, 128) if z.form == "fp8" else (jnp.bfloat16, 64)
    shape: Any = jax.ShapeDtypeStruct
    outs = dict(
        hidden=shape((z.tiles, z.width, 8), jnp.bfloat16),
        parts=shape((z.tiles, 8, z.hidden), jnp.float32),
    )
    lines: Any = (
        plgpu.TilingTransform((8, wide)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    scratch: Any = dict(
        w_tiles=plgpu.SMEM((stages, 2, 64 * consumers, columns), weights, transforms=lines),
        x_tiles=plgpu.SMEM((stages, 8, columns), z.tokens, transforms=SWIZZLED),
        h_tile=plgpu.SMEM((consumers, 8, z.width), z.tokens, transforms=SWIZZLED),
        full=plgpu.Barrier(num_barriers=stages),
        x_full=plgpu.Barrier(num_barriers=stages),
        empty=plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
    )

    def kernel(given, outs, scratch):
        # a simulated launch of one product is given the other's
        body(outs | given | scratch)

    kernel.__name__ = f"experts_{z.form}_{z.tiles}x{z.hidden}x{z.width}"
    return plgpu.kernel(
        kernel,
        out_type=outs,
        grid=(z.lanes,),
        grid_names=("lane",),
        num_threads=consumers + 1,
        thread_name="role",
        scratch_types=[scratch],
    )(given)
