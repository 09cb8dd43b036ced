"""Selection of blocks in Pallas Mosaic GPU, for Hopper: bisection by counting, order by wgmma.

Bytes: the row's scores once and 2,051 indices out, 66 kB for 14k blocks, 0.02 us of bandwidth; what
takes time is that every step waits for the one before: up to 32 counts over all warpgroups.

A CTA is a query. Its warpgroups hold a tile of 64 lines of the row each, in registers, as integers
that order as the scores do. Bit by bit they find the highest number that at least as many keys
reach as blocks are wanted, and stop as soon as a count is exact. Mosaic has no prefix sum, gather
or scatter of vectors, so what is taken is put together by products with zeros and ones, all of
small integers, which bfloat16 and float32 hold exactly:

1. A line's mask times a triangle are the counts from its start to each column; ties count 256, so
   that both counts come out of one product.
2. With the counts of the lines before, ties cut where the blocks are enough, a line knows which
   places of the result are its own. `reached[line, column]` counts those up to a column.
3. A place of the result picks its line: a matrix of one 1 a row times `reached`. How many columns
   have not reached the place is the column.

The result is in the order of the blocks. No atomics, nothing depends on who is first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.index_topk.limits import MOSAIC_LINES as LINES
from qwen4jax.pallas.index_topk.limits import mosaic_columns
from qwen4jax.pallas.mosaic_layouts import SWIZZLED

# below the key of any score
_NONE = -(2**31)
# what a tie counts where both counts share a number: more than a line has columns
_TIE = 256
_TILE = plgpu.Layout.WGMMA
_OVER_LINES = _TILE.reduce(1)
_OVER_COLUMNS = _TILE.reduce(0)
# numbers of which each warp has all, two to a lane: their sum needs no other warp. A sum over warps
# goes through memory that Mosaic gives a kernel once, whichever warpgroup wants it
_IN_EACH_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((LINES,), (2,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)


# compiled apart, so that a program with many layers lowers one
@functools.partial(jax.jit, static_argnames=("blocks", "ratio"))
def index_topk(scores, index, best=None, *, blocks, ratio):
    """See `qwen4jax.pallas.index_topk`; what `best` knows is not used."""
    del best
    rows, places, width = scores.shape
    queries, columns = rows * places, mosaic_columns(width)
    scores = scores.reshape(queries, width)
    if width < LINES * columns:
        spare = ((0, 0), (0, LINES * columns - width))
        scores = jnp.pad(scores, spare, constant_values=-jnp.inf)
    scores = scores.reshape(queries, -1, columns)
    groups = -(-scores.shape[1] // LINES)
    room = blocks * ratio + ratio - 1
    i32, bf16 = jnp.int32, jnp.bfloat16
    scratch: Any = dict(
        # of each line, for a count and the next one
        counts=plgpu.SMEM((2, groups * LINES), i32),
        triangle=plgpu.SMEM((columns, columns), bf16, transforms=SWIZZLED),
        # first the masks, then `reached`
        matrix=plgpu.SMEM((groups * LINES, columns), bf16, transforms=SWIZZLED),
        picks=plgpu.SMEM((groups, LINES, LINES), bf16, transforms=SWIZZLED),
        # of each line those above the threshold and at it
        taken=plgpu.SMEM((2, groups * LINES), i32),
        # places of the result of each line
        starts=plgpu.SMEM((groups * LINES,), i32),
        ends=plgpu.SMEM((groups * LINES,), i32),
        chosen=plgpu.SMEM((blocks,), i32),
        all_here=plgpu.Barrier(num_arrivals=groups),
    )

    def kernel(scores, index, out, scratch):
        _select(scores, index, out, scratch, blocks, ratio)

    kernel.__name__ = f"index_topk_{rows}x{places}x{width}"
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((queries * room,), i32),
        grid=(queries,),
        grid_names=("query",),
        num_threads=groups,
        thread_name="group",
        scratch_types=[scratch],
    )(scores, index.reshape(queries))
    return out.reshape(rows, places, room)


def _select(scores, index, out, scratch, blocks, ratio):
    query, group = lax.axis_index("query"), lax.axis_index("group")
    index = index[query]
    complete = lax.div(index + 1, ratio)
    key = _keys(scores, query, group, complete)

    @pl.when(group == 0)
    def _():
        _fill_triangle(scratch["triangle"])

    bound = _threshold(key, complete, group, blocks, scratch)
    total = _reach(key, bound, group, blocks, scratch)
    _pick(scores.shape[1], total, group, blocks, scratch)
    _meet(scratch)

    start = query * (blocks * ratio + ratio - 1)
    _put(out, start, group, scratch, blocks, ratio)

    @pl.when(group == 0)
    def _():
        for m in range(ratio - 1):
            token = complete * ratio + m
            out[start + blocks * ratio + m] = jnp.where(token <= index, token, -1)


def _meet(scratch):
    """Waits for all warpgroups, whose stores are seen after it."""
    plgpu.barrier_arrive(scratch["all_here"])
    plgpu.barrier_wait(scratch["all_here"])


def _first_line(group, lines):
    """Of a warpgroup's tile; the last one overlaps its neighbour, so that it ends with the row."""
    return jnp.minimum(group * LINES, lines - LINES)


def _keys(scores, query, group, complete):
    """The tile's scores as integers of the same order, -0 as +0; `_NONE` for what is no block."""
    _, lines, columns = scores.shape
    first = _first_line(group, lines)
    score = _load(scores.at[query, pl.ds(first, LINES)], _TILE)
    bits = lax.bitcast_convert_type(jnp.where(score == 0.0, 0.0, score), jnp.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    line = first + _lines()
    valid = jnp.where(line >= group * LINES, complete - line * columns, 0)
    there = _count_up(key.shape, 1) < lax.broadcast_in_dim(valid, key.shape, (0,))
    return jnp.where(there, key, _NONE)


def _fill_triangle(triangle):
    columns = triangle.shape[0]
    shape = (LINES, columns)
    for first in range(0, columns, LINES):
        upper = _count_up(shape, 0) + first <= _count_up(shape, 1)
        triangle[pl.ds(first, LINES)] = jnp.where(upper, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()


def _threshold(key, complete, group, blocks, scratch):
    """The highest number that `blocks` keys reach, or one that just so many do, or all."""
    counts = scratch["counts"]

    def more(carry):
        bit, _, count = carry
        return (bit >= 0) & (count != blocks)

    def one(carry):
        bit, bound, count = carry
        candidate = bound + lax.shift_left(jnp.int32(1), bit)
        # a warpgroup that is ahead writes into the other half
        half = lax.rem(bit, 2)
        counts[half, pl.ds(group * LINES, LINES)] = _of_lines(key >= candidate)
        _meet(scratch)
        reach = jnp.sum(_load(counts.at[half], _IN_EACH_WARP))
        good = reach >= blocks
        return bit - 1, jnp.where(good, candidate, bound), jnp.where(good, reach, count)

    # few keys are all taken
    count = jnp.where(complete <= blocks, blocks, -1)
    return lax.while_loop(more, one, (jnp.int32(31), jnp.int32(_NONE), count))[1]


def _reach(key, bound, group, blocks, scratch):
    """Writes what of the result each line has, and each column up to it; says how much there is."""
    matrix, taken = scratch["matrix"], scratch["taken"]
    mine = pl.ds(group * LINES, LINES)
    shape = key.shape
    above, tie = key > bound, (key == bound) & (key != _NONE)
    matrix[mine] = jnp.where(above, 1.0, jnp.where(tie, 1.0 * _TIE, 0.0)).astype(jnp.bfloat16)
    of_line = [_of_lines(which) for which in (above, tie)]
    taken[0, mine], taken[1, mine] = of_line
    plgpu.commit_smem()
    _meet(scratch)

    def multiply(acc):
        plgpu.wgmma(acc, matrix.at[mine], scratch["triangle"])
        plgpu.wgmma_wait(0)
        return acc[...]

    sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    both = plgpu.layout_cast(sums, _TILE).astype(jnp.int32)
    up_to = both & (_TIE - 1), both >> 8

    square = (LINES, LINES)
    earlier = _count_up(square, 1) < _count_up(square, 0)
    before, totals = [], []
    for i in range(2):
        lines = lax.broadcast_in_dim(_load(taken.at[i, mine], _OVER_COLUMNS), square, (1,))
        tiles_of = [taken.at[i, pl.ds(g, LINES)] for g in range(0, taken.shape[1], LINES)]
        of_tiles = [jnp.sum(_load(tile, _IN_EACH_WARP)) for tile in tiles_of]
        tiles = sum(jnp.where(g < group, n, 0) for g, n in enumerate(of_tiles))
        before.append(jnp.sum(jnp.where(earlier, lines, 0), axis=1) + tiles)
        totals.append(sum(of_tiles))
    room = blocks - totals[0]
    start = before[0] + jnp.minimum(before[1], room)
    end = before[0] + of_line[0] + jnp.minimum(before[1] + of_line[1], room)
    wide = [lax.broadcast_in_dim(x, shape, (0,)) for x in (*before, start)]
    reached = wide[0] + up_to[0] + jnp.minimum(wide[1] + up_to[1], room) - wide[2]
    matrix[mine] = reached.astype(jnp.float32).astype(jnp.bfloat16)
    scratch["starts"][mine], scratch["ends"][mine] = start, end
    plgpu.commit_smem()
    _meet(scratch)
    return totals[0] + jnp.minimum(totals[1], room)


def _pick(lines, total, group, blocks, scratch):
    """Writes the block of each place of the result, -1 where there is none."""
    matrix, picks = scratch["matrix"], scratch["picks"].at[group]
    groups, columns = scratch["picks"].shape[0], matrix.shape[1]
    square, shape = (LINES, LINES), (LINES, columns)

    def some(n, carry):
        first = (group + n * groups) * LINES
        place = first + _count_up(square, 0)

        def multiply(acc):
            def add(g, carry):
                base, line = carry
                of = pl.ds(g * LINES, LINES)
                start, end = (
                    lax.broadcast_in_dim(_load(scratch[name].at[of], _OVER_COLUMNS), square, (1,))
                    for name in ("starts", "ends")
                )
                here = (start <= place) & (place < end)
                picks[...] = jnp.where(here, 1.0, 0.0).astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.wgmma(acc, picks, matrix.at[of])
                plgpu.wgmma_wait(0)
                number = _first_line(g, lines) + _count_up(square, 1)
                base = base + jnp.sum(jnp.where(here, start, 0), axis=1)
                return base, line + jnp.sum(jnp.where(here, number, 0), axis=1)

            nothing = plgpu.layout_cast(jnp.zeros((LINES,), jnp.int32), _OVER_LINES)
            base, line = lax.fori_loop(0, groups, add, (nothing, nothing))
            return acc[...], base, line

        accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        sums, base, line = pl.run_scoped(multiply, accumulator)
        reached = plgpu.layout_cast(sums, _TILE).astype(jnp.int32)
        places = first + _lines()
        rank = lax.broadcast_in_dim(places - base, shape, (0,))
        column = jnp.sum(jnp.where(reached <= rank, 1, 0), axis=1)
        block = jnp.where(places < total, line * columns + column, -1)
        scratch["chosen"][pl.ds(first, LINES)] = block
        return carry

    mine = lax.div(blocks // LINES - group + groups - 1, groups)
    lax.fori_loop(0, mine, some, ())


def _put(out, start, group, scratch, blocks, ratio):
    """Writes the tokens of the blocks chosen, 64 at a time."""
    chosen, groups = scratch["chosen"], scratch["picks"].shape[0]
    few = LINES // ratio
    shape = (LINES, few)

    def some(n, carry):
        tile = group + n * groups
        block = _load(chosen.at[pl.ds(tile * few, few)], _OVER_COLUMNS)
        member = _count_up(shape, 0) - _count_up(shape, 1) * ratio
        token = lax.broadcast_in_dim(block, shape, (1,)) * ratio + member
        here = (member >= 0) & (member < ratio)
        # the one token that is here; less than 0 if there is no block
        token = jnp.sum(jnp.where(here, token, 0), axis=1)
        out[pl.ds(start + tile * LINES, LINES)] = jnp.maximum(token, -1)
        return carry

    tiles = blocks * ratio // LINES
    lax.fori_loop(0, lax.div(tiles - group + groups - 1, groups), some, ())


def _of_lines(which):
    """How many are true of each line."""
    return jnp.sum(jnp.where(which, 1, 0), axis=1)


def _lines():
    return plgpu.layout_cast(lax.iota(jnp.int32, LINES), _OVER_LINES)


def _count_up(shape, axis):
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), _TILE)


def _load(ref: Any, layout: Any) -> Any:
    return plgpu.load(ref, layout=layout, optimized=False)
