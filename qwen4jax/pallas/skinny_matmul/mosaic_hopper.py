"""The dense projection in Pallas Mosaic GPU, for Hopper: wgmma, fed by TMA.

The floor is the weight's bytes over the bandwidth: 1.27 GB of lm_head take 293 us at 4.34 TB/s, the
52 MB of a DeltaNet's q, k, v 12 us. A kernel of this language is a captured call of a CUDA graph (1
to 2 us of host time, 0.8 us more on the device than a native node): it is for the long projections.

wgmma multiplies 64 rows at the least, so the weight's rows are its left operand and the tokens,
8, 16, 24 or 32 of them, the narrow right one: `acc[64, tokens] += w[64, 128] @ x[tokens, 128].T`.
One warpgroup does nothing but ask for tiles, several stages ahead over all the work of its CTA, so
that the memory is never idle between two tiles; the others multiply. x travels with the weight's
tile: it is small, and the L2 cache keeps it.

Where a weight has too few rows to occupy the chip, its columns are divided between CTAs, whose
float32 sums a fusion of XLA adds in a fixed order (a cluster that adds them was slower).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COLUMNS = 128  # of a tile: a row of it is two swizzled lines of 128 bytes
MOST_ROWS = 32
_PROCESSORS = 132
_SHARED = 220 * 1024  # bytes of shared memory that the CTAs of a multiprocessor plan with
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# [tokens, 64] where a warp holds two rows, and a lane one column of each half of them
_LINES = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (32,), (1,))),
    warp_dims=(-6,),
    lane_dims=(-2,),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        consumers: warpgroups that multiply, each 64 rows of a tile of the weight.
        stages: tiles that are under way at a time, fewer where shared memory says so.
        ctas: per multiprocessor.
        splits: parts of the columns, each summed by its own CTA; 0 takes as few as fill the chip.
    """

    consumers: int = 1
    stages: int = 5
    ctas: int = 2
    splits: int = 0


# as measured on an H200 in the idioms' runs: two small CTAs, but one large for the longest weights
NARROW = Tiles()
WIDE = Tiles(consumers=2, ctas=1)


def refuses(x, w, bias, *, out_dtype) -> str | None:
    """What keeps this kernel from the arguments of `skinny_matmul`, if anything."""
    rows = x.size // x.shape[-1]
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        return f"multiplies bfloat16, not {x.dtype} with {w.dtype}"
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        return f"rounds to bfloat16 or float32, not {jnp.dtype(out_dtype)}"
    if bias is not None:
        return "adds no bias"
    if not 1 <= rows <= MOST_ROWS:
        return f"takes 1 to {MOST_ROWS} rows, not {rows}"
    if w.shape[0] % 8 or w.shape[1] % COLUMNS:
        return f"takes outputs by 8 and inputs by {COLUMNS}, not {w.shape[0]} and {w.shape[1]}"
    return None


def skinny_matmul(x, w, bias, *, out_dtype):
    """See `qwen4jax.pallas.skinny_matmul`."""
    assert bias is None
    rows = x.size // x.shape[-1]
    long = w.shape[0] > 65536 or (rows > 24 and w.shape[0] >= 16384)
    tiles = WIDE if long else NARROW
    y = multiply(x.reshape(rows, -1), w, out_dtype=jnp.dtype(out_dtype), tiles=tiles)
    return y.reshape(*x.shape[:-1], w.shape[0])


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles"))
def multiply(x: jax.Array, w: jax.Array, *, out_dtype: Any, tiles: Tiles) -> jax.Array:
    """`x [rows, I] @ w [O, I].T` as [rows, O]."""
    rows, steps = len(x), w.shape[1] // COLUMNS
    tokens = -(-rows // 8) * 8
    if rows > 8 and rows != tokens:
        # TMA fills what a box has beyond the array with zeros, but not the last of several boxes
        x = jnp.pad(x, ((0, tokens - rows), (0, 0)))
    splits = tiles.splits or _splits(-(-len(w) // (64 * tiles.consumers)), steps)
    final = splits == 1 and out_dtype == jnp.bfloat16
    y = _kernel(rows, len(w), steps // splits, splits, final, tiles)(x, w)
    return y if final else y.sum(0).astype(out_dtype)


def _splits(tiles: int, steps: int) -> int:
    """The fewest equal parts of the columns with which nine multiprocessors in ten have a tile."""
    parts = [n for n in range(1, steps + 1) if steps % n == 0]
    return next((n for n in parts if 10 * n * tiles >= 9 * _PROCESSORS), parts[-1])


def _kernel(rows: int, outputs: int, steps: int, splits: int, final: bool, tiles: Tiles) -> Any:
    """Takes x and w, gives [rows, O] in bfloat16 if `final`, or float32 [splits, rows, O]."""
    tokens = -(-rows // 8) * 8
    height = 64 * tiles.consumers
    count = -(-outputs // height)
    lanes = min(count, max(1, _PROCESSORS * tiles.ctas // splits))  # CTAs along the outputs
    kept = tiles.consumers * tokens * 64 * (2 if final else 8)
    under_way = (_SHARED // tiles.ctas - kept) // ((height + tokens) * COLUMNS * 2)
    stages = min(tiles.stages, under_way)

    def load(x, w, x_tiles, w_tiles, full, empty):
        lane, split = lax.axis_index("lane"), lax.axis_index("split")

        def one(step, carry):
            slot = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            top = (lane + step // steps * lanes) * height
            columns = pl.ds((split * steps + lax.rem(step, steps)) * COLUMNS, COLUMNS)
            tile = w.at[pl.ds(top, height), columns]
            plgpu.copy_gmem_to_smem(tile, w_tiles.at[slot], full.at[slot])
            # fewer rows than a tile of 8 has: the rest comes as zeros
            tile = x.at[pl.ds(0, tokens), columns]
            plgpu.copy_gmem_to_smem(tile, x_tiles.at[slot], full.at[slot])
            return carry

        lax.fori_loop(0, _mine() * steps, one, ())

    def multiply(role, out, x_tiles, w_tiles, upright, turned, full, empty):
        lane, split = lax.axis_index("lane"), lax.axis_index("split")
        mine = _mine()

        def one(tile, carry):
            def accumulate(acc):
                def add(k, carry):
                    step = tile * steps + k
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(full.at[slot])
                    weights = w_tiles.at[slot, pl.ds(role * 64, 64)]
                    plgpu.wgmma(acc, weights, x_tiles.at[slot].T)
                    plgpu.wgmma_wait(0)

                    @pl.when(step + stages < mine * steps)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot])

                    return carry

                lax.fori_loop(0, steps, add, ())
                return acc[...]

            sums = pl.run_scoped(accumulate, plgpu.ACC((64, tokens), jnp.float32))
            columns = pl.ds((lane + tile * lanes) * height + role * 64, 64)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if final:
                sums = plgpu.layout_cast(sums.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
                turned.at[role].T[...] = sums
                target = out.at[:, columns]
            else:
                # wgmma's layout holds pairs of tokens, which float32 cannot store transposed
                upright[role] = plgpu.layout_cast(sums, plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                turned[role] = plgpu.load(upright.at[role].T, layout=_LINES, optimized=False)
                target = out.at[split, :, columns]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(turned.at[role, pl.ds(0, rows)], target)
            return carry

        lax.fori_loop(0, mine, one, ())
        plgpu.wait_smem_to_gmem(0)

    def _mine():
        """Tiles of this CTA."""
        return (count - lax.axis_index("lane") + lanes - 1) // lanes

    def body(x, w, out, x_tiles, w_tiles, upright, turned, full, empty):
        role = lax.axis_index("role")

        @pl.when(role == tiles.consumers)
        def _():
            load(x, w, x_tiles, w_tiles, full, empty)

        @pl.when(role < tiles.consumers)
        def _():
            multiply(role, out, x_tiles, w_tiles, upright, turned, full, empty)

    body.__name__ = f"skinny_matmul_{rows}x{outputs}x{steps * splits * COLUMNS}"
    dtype = jnp.bfloat16 if final else jnp.float32
    upright = plgpu.SMEM((tiles.consumers, 64, tokens), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, outputs) if final else (splits, rows, outputs), dtype),
        grid=(lanes, splits),
        grid_names=("lane", "split"),
        num_threads=tiles.consumers + 1,
        thread_name="role",
        scratch_types=dict(
            x_tiles=plgpu.SMEM((stages, tokens, COLUMNS), jnp.bfloat16, transforms=_SWIZZLED),
            w_tiles=plgpu.SMEM((stages, height, COLUMNS), jnp.bfloat16, transforms=_SWIZZLED),
            upright=None if final else upright,
            turned=plgpu.SMEM((tiles.consumers, tokens, 64), dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=tiles.consumers, num_barriers=stages),
        ),
    )
