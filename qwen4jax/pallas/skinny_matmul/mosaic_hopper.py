"""Dense projections in Pallas Mosaic GPU, for Hopper: wgmma, fed by TMA.

The floor is the weight's bytes over the bandwidth: 1.27 GB of lm_head take 293 us at 4.34 TB/s, the
52 MB of a DeltaNet's q, k, v 12 us. A kernel of this language is a captured call of a CUDA graph,
which costs more than a native node: it is for the long projections.

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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.mosaic_layouts import LINES, SWIZZLED

COLUMNS = 128  # of a tile: a row of it is two swizzled lines of 128 bytes
_PROCESSORS = 132
_SHARED = 220 * 1024  # bytes of shared memory that the CTAs of a multiprocessor plan with


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


# two small CTAs, but one large for the longest weights
NARROW = Tiles()
WIDE = Tiles(consumers=2, ctas=1)


def skinny_matmul(x, w, bias, *, out_dtype):
    """See `qwen4jax.pallas.skinny_matmul`."""
    return projections(x, (w,), (bias,), out_dtypes=(out_dtype,))[0]


def projections(x, weights, biases, *, out_dtypes):
    """See `qwen4jax.pallas.skinny_matmul`."""
    assert not any(b is not None for b in biases)
    rows, outputs = x.size // x.shape[-1], sum(map(len, weights))
    # several weights in large tiles were wrong on the device (10,240 + 6,144 + 48 + 48 outputs)
    tiles = WIDE if outputs > 65536 and len(weights) == 1 else NARROW
    dtypes = tuple(jnp.dtype(t) for t in out_dtypes)
    ys = multiply(x.reshape(rows, -1), tuple(weights), dtypes=dtypes, tiles=tiles)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)


@functools.partial(jax.jit, static_argnames=("dtypes", "tiles"))
def multiply(
    x: jax.Array, weights: tuple[jax.Array, ...], *, dtypes: tuple[Any, ...], tiles: Tiles
) -> tuple[jax.Array, ...]:
    """`x [rows, I] @ w [O, I].T` for each weight, as [rows, O] of its dtype."""
    rows, steps = len(x), x.shape[1] // COLUMNS
    tokens = -(-rows // 8) * 8
    if rows > 8 and rows != tokens:
        # TMA fills what a box has beyond the array with zeros, but not the last of several boxes
        x = jnp.pad(x, ((0, tokens - rows), (0, 0)))
    splits = tiles.splits
    if not splits:
        # TMA takes the float32 sums from shared memory in swizzled lines of 32
        whole = any(len(w) % 32 for w in weights)
        splits = 1 if whole else _splits(_count(weights, tiles), steps)
    # a part of a sum, or what is rounded to float32, takes another way out of the kernel
    final = tuple(splits == 1 and t == jnp.bfloat16 for t in dtypes)
    outputs = tuple(map(len, weights))
    (ys,) = _kernel(rows, outputs, steps // splits, splits, final, tiles)(x, weights)
    given = zip(ys, final, dtypes, strict=True)
    return tuple(y if done else y.sum(0).astype(t) for y, done, t in given)


def _count(weights: Sequence[Any], tiles: Tiles) -> int:
    """Tiles of all weights."""
    return sum(-(-len(w) // (64 * tiles.consumers)) for w in weights)


def _splits(tiles: int, steps: int) -> int:
    """The fewest equal parts of the columns with which nine multiprocessors in ten have a tile."""
    parts = [n for n in range(1, steps + 1) if steps % n == 0]
    return next((n for n in parts if 10 * n * tiles >= 9 * _PROCESSORS), parts[-1])


def _kernel(
    rows: int,
    outputs: tuple[int, ...],
    steps: int,
    splits: int,
    final: tuple[bool, ...],
    tiles: Tiles,
) -> Any:
    """Takes x and the weights, gives for each [rows, O] if `final`, or float32 [splits, rows, O].

    A CTA of lane `l` owns the tiles `l`, `l + lanes`, ... of all weights, one after the other.
    """
    tokens = -(-rows // 8) * 8
    height = 64 * tiles.consumers
    counts = [-(-o // height) for o in outputs]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    lanes = min(sum(counts), max(1, _PROCESSORS * tiles.ctas // splits))
    kept = tiles.consumers * tokens * 64 * (2 * any(final) + 8 * (not all(final)))
    under_way = (_SHARED // tiles.ctas - kept) // ((height + tokens) * COLUMNS * 2)
    stages = min(tiles.stages, under_way)

    def mine():
        """Tiles of this CTA."""
        return (sum(counts) - lax.axis_index("lane") + lanes - 1) // lanes

    def of_weight(number, run):
        """Calls `run` for the weight of this CTA's tile `number`, with the tile's first output."""
        tile = lax.axis_index("lane") + number * lanes
        for i, (first, count) in enumerate(zip(firsts, counts, strict=True)):
            here = functools.partial(run, i, (tile - first) * height)
            if len(counts) == 1:
                here()
            else:
                pl.when((tile >= first) & (tile < first + count))(here)

    def load(x, weights, x_tiles, w_tiles, full, empty):
        split = lax.axis_index("split")

        def one(step, carry):
            slot = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            columns = pl.ds((split * steps + lax.rem(step, steps)) * COLUMNS, COLUMNS)

            def ask(i, top):
                tile = weights[i].at[pl.ds(top, height), columns]
                plgpu.copy_gmem_to_smem(tile, w_tiles.at[slot], full.at[slot])

            of_weight(step // steps, ask)
            # fewer rows than a tile of 8 has: the rest comes as zeros
            tile = x.at[pl.ds(0, tokens), columns]
            plgpu.copy_gmem_to_smem(tile, x_tiles.at[slot], full.at[slot])
            return carry

        lax.fori_loop(0, mine() * steps, one, ())

    def consume(role, outs, x_tiles, w_tiles, rounded, upright, turned, full, empty):
        def one(number, carry):
            def accumulate(acc):
                def add(k, carry):
                    step = number * steps + k
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(full.at[slot])
                    rows_of_weight = w_tiles.at[slot, pl.ds(role * 64, 64)]
                    plgpu.wgmma(acc, rows_of_weight, x_tiles.at[slot].T)
                    plgpu.wgmma_wait(0)

                    @pl.when(step + stages < mine() * steps)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot])

                    return carry

                lax.fori_loop(0, steps, add, ())
                return acc[...]

            sums = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((64, tokens), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if any(final):
                value = plgpu.layout_cast(sums.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
                rounded.at[role].T[...] = value
            if not all(final):
                # wgmma's layout holds pairs of tokens, which float32 cannot store transposed
                upright[role] = plgpu.layout_cast(sums, plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                turned[role] = plgpu.load(upright.at[role].T, layout=LINES, optimized=False)
            plgpu.commit_smem()

            def put(i, top):
                columns = pl.ds(top + role * 64, 64)
                if final[i]:
                    source, target = rounded, outs[i].at[:, columns]
                else:
                    source, target = turned, outs[i].at[lax.axis_index("split"), :, columns]
                plgpu.copy_smem_to_gmem(source.at[role, pl.ds(0, rows)], target)

            of_weight(number, put)
            return carry

        lax.fori_loop(0, mine(), one, ())
        plgpu.wait_smem_to_gmem(0)

    def body(x, weights, outs, x_tiles, w_tiles, rounded, upright, turned, full, empty):
        role = lax.axis_index("role")

        @pl.when(role == tiles.consumers)
        def _():
            load(x, weights, x_tiles, w_tiles, full, empty)

        @pl.when(role < tiles.consumers)
        def _():
            consume(role, outs, x_tiles, w_tiles, rounded, upright, turned, full, empty)

    def out(o, done):
        if done:
            return jax.ShapeDtypeStruct((rows, o), jnp.bfloat16)
        return jax.ShapeDtypeStruct((splits, rows, o), jnp.float32)

    body.__name__ = f"skinny_matmul_{rows}x{sum(outputs)}x{steps * splits * COLUMNS}"
    staging = {
        "rounded": plgpu.SMEM((tiles.consumers, tokens, 64), jnp.bfloat16) if any(final) else None,
        "upright": plgpu.SMEM((tiles.consumers, 64, tokens), jnp.float32),
        "turned": plgpu.SMEM((tiles.consumers, tokens, 64), jnp.float32),
    }
    if all(final):
        staging |= {"upright": None, "turned": None}
    scratch: Any = staging | {
        "x_tiles": plgpu.SMEM((stages, tokens, COLUMNS), jnp.bfloat16, transforms=SWIZZLED),
        "w_tiles": plgpu.SMEM((stages, height, COLUMNS), jnp.bfloat16, transforms=SWIZZLED),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=tiles.consumers, num_barriers=stages),
    }
    return plgpu.kernel(
        body,
        out_type=(tuple(map(out, outputs, final)),),
        grid=(lanes, splits),
        grid_names=("lane", "split"),
        num_threads=tiles.consumers + 1,
        thread_name="role",
        scratch_types=scratch,
    )
