"""Block scores in Pallas Mosaic GPU, for Hopper: pages by TMA, one product for all queries.

The floor is the keys' bytes and the scores': 256 for a key of 128 channels and 4 for each of its
scores. 16k keys for 4 queries are 4.5 MB, 1 us at 4.3 TB/s, and those of 32 requests 143 MB, 33 us.
A kernel of this language is a captured call of a CUDA graph, which costs more than a native node.

64 keys are the rows of wgmma, its left operand. The columns are (head, query), 8 queries for each
head even where there are fewer: the product takes as long as it takes to read the keys from shared
memory, for 16 columns as for 32, and the heads are then whole registers to add up. What is read of
pages that no query sees, or of none, gives rows of the product that are replaced by -inf.

A CTA owns every so many tiles of one request. One warpgroup looks up their pages and asks for them,
several tiles ahead; the other multiplies, adds up and turns the tile to rows of scores.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.mosaic_layouts import LINES

TILE = 64  # keys: the rows of one warpgroup's product
_COLUMNS = 128  # of the product, at most: heads times queries
_STAGES = 3  # tiles under way
_CTAS = 396  # that share the work: three for each multiprocessor
_KEYS = plgpu.Layout.WGMMA


def index_score(query, index_key, page_table, complete, *, group=None):
    """See `qwen4jax.pallas.index_score`."""
    scores = _scores(query, index_key, page_table, complete)
    if group is None:
        return scores
    spare = [(0, 0), (0, 0), (0, -scores.shape[-1] % group)]
    groups = jnp.pad(scores, spare, constant_values=-jnp.inf)
    return scores, jnp.max(groups.reshape(*scores.shape[:2], -1, group), axis=-1)


# compiled apart, so that a program with many layers lowers one
@jax.jit
def _scores(query, index_key, page_table, complete):
    rows, places, heads, channels = query.shape
    if places > 8 and places % 8:
        # TMA fills what a box has beyond the array with zeros, but not the last of several boxes
        query = jnp.pad(query, ((0, 0), (0, -places % 8), (0, 0), (0, 0)))
    together = min(-(-places // 8), max(1, _COLUMNS // heads // 8)) * 8
    kernel = _kernel(
        (rows, places, heads, channels), page_table.shape[1], index_key.shape, together
    )
    # TMA reads from boundaries of 16 bytes only, else it is an illegal instruction
    complete = jnp.pad(complete, ((0, 0), (0, -places % 4)))
    scores = kernel(query, index_key, page_table, complete.reshape(-1))
    return scores[:, :places, : page_table.shape[1] * index_key.shape[1]]


def _kernel(sizes: tuple[int, ...], pages: int, pool: tuple[int, ...], together: int) -> Any:
    """Takes queries, keys, pages and the limits of all queries in a row; gives the scores.

    A request's limits are in fours.
    There are more than asked for where TMA takes eights of queries and lines of 32 blocks.
    """
    rows, places, heads, channels = sizes
    _, per_page, _ = pool
    # of a page or a part of it, that is copied at once
    part = min(per_page, TILE)
    width = pages * per_page
    tiles, parts = -(-width // TILE), -(-places // together)
    lanes = min(tiles, max(1, _CTAS // (parts * rows)))
    tall = places if places <= 8 else -(-places // 8) * 8
    pitch = -(-places // 4) * 4

    def load(lane, row, keys, table, keys_read, mine, full, empty):
        def of_tile(i):
            first = (lane + i * lanes) * TILE
            return [first + j * part for j in range(TILE // part)]

        def pages_of(i):
            # a page beyond the table, or none, is some page: its scores are not kept
            found = [table[row, jnp.minimum(b // per_page, pages - 1)] for b in of_tile(i)]
            return [jnp.maximum(page, 0) for page in found]

        def one(i, found):
            slot = lax.rem(i, _STAGES)
            following = pages_of(i + 1)

            @pl.when(i >= _STAGES)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            for j, (block, page) in enumerate(zip(of_tile(i), found, strict=True)):
                source = keys.at[page, pl.ds(lax.rem(block, per_page), part)]
                target = keys_read.at[slot, pl.ds(j * part, part)]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])
            return following

        lax.fori_loop(0, mine, one, pages_of(0))

    def put(lane, row, first, i, turned, out):
        blocks = pl.ds((lane + i * lanes) * TILE, TILE)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(turned, out.at[row, pl.ds(first, together), blocks])

    def score(i, queries, keys_read, mine, full, empty):
        """Scores [64, queries] of a tile that is there, not yet limited."""
        slot = lax.rem(i, _STAGES)
        plgpu.barrier_wait(full.at[slot])

        def multiply(acc):
            plgpu.wgmma(acc, keys_read.at[slot], queries.T)
            return acc[...]

        columns = (TILE, heads * together)
        dots = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(columns, jnp.float32))

        @pl.when(i + _STAGES < mine)
        def _():
            plgpu.barrier_arrive(empty.at[slot])

        dots = jnp.maximum(plgpu.layout_cast(dots, _KEYS), 0.0)
        total = dots[:, :together]
        for head in range(1, heads):
            total = total + dots[:, head * together : (head + 1) * together]
        return total * channels**-0.5

    def body(query, keys, table, complete, out, scratch):
        lane, row = lax.axis_index("lane"), lax.axis_index("row")
        first = lax.axis_index("part") * together
        queries, limits, keys_read = scratch["queries"], scratch["limits"], scratch["keys"]
        given, full, empty = scratch["given"], scratch["full"], scratch["empty"]
        role = lax.axis_index("role")

        @pl.when(role == 1)
        def _():
            # of the next request too where this one has fewer queries
            source = complete.at[pl.ds(row * pitch + first, together)]
            plgpu.copy_gmem_to_smem(source, limits, given)
            for head in range(heads):
                source = query.at[row, pl.ds(first, together), head]
                target = queries.at[pl.ds(head * together, together)]
                plgpu.copy_gmem_to_smem(source, target, given)

        # read apart, so that the first keys need not wait for the queries
        most = complete[row * pitch + first]
        for i in range(1, min(together, places)):
            most = jnp.maximum(most, complete[row * pitch + jnp.minimum(first + i, places - 1)])
        seen = jnp.minimum((most + TILE - 1) // TILE, tiles)
        # tiles of this CTA, and those of them of which something is seen
        mine = (tiles - lane + lanes - 1) // lanes
        live = (seen - lane + lanes - 1) // lanes

        @pl.when(role == 1)
        def _():
            load(lane, row, keys, table, keys_read, live, full, empty)

        @pl.when(role == 0)
        def _():
            upright, turned = scratch["upright"], scratch["turned"]
            plgpu.barrier_wait(given)
            limit = plgpu.load(limits, layout=_KEYS.reduce(0), optimized=False)
            limit = lax.broadcast_in_dim(limit, (TILE, together), (1,))
            number = plgpu.broadcasted_iota(jnp.int32, (TILE, together), 0, layout=_KEYS)

            def of_keys(i, carry):
                total = score(i, queries, keys_read, live, full, empty)
                block = number + (lane + i * lanes) * TILE
                total = jnp.where(block < limit, total, -jnp.inf)
                # wgmma's layout holds pairs of queries, which float32 cannot store transposed
                upright[...] = total
                plgpu.commit_smem()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                turned[...] = plgpu.load(upright.T, layout=LINES, optimized=False)
                put(lane, row, first, i, turned, out)
                return carry

            lax.fori_loop(0, live, of_keys, ())

            @pl.when(live < mine)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                nothing = jnp.full((together, TILE), -jnp.inf, jnp.float32)
                turned[...] = plgpu.layout_cast(nothing, LINES)

            def of_nothing(i, carry):
                put(lane, row, first, i, turned, out)
                return carry

            lax.fori_loop(live, mine, of_nothing, ())
            plgpu.wait_smem_to_gmem(0)

    body.__name__ = f"index_score_{rows}x{places}x{width}"
    line = min(channels, 64)
    swizzled: Any = (
        plgpu.TilingTransform((8, line)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * line),  # pyright: ignore[reportAbstractUsage]
    )
    bf16, f32 = jnp.bfloat16, jnp.float32
    scratch: dict[str, Any] = {
        "queries": plgpu.SMEM((heads * together, channels), bf16, transforms=swizzled),
        "limits": plgpu.SMEM((together,), jnp.int32),
        "keys": plgpu.SMEM((_STAGES, TILE, channels), bf16, transforms=swizzled),
        "upright": plgpu.SMEM((TILE, together), f32),
        "turned": plgpu.SMEM((together, TILE), f32),
        "given": plgpu.Barrier(num_arrivals=heads + 1),
        "full": plgpu.Barrier(num_arrivals=TILE // part, num_barriers=_STAGES),
        "empty": plgpu.Barrier(num_barriers=_STAGES),
    }
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, tall, -(-width // 32) * 32), f32),
        grid=(lanes, parts, rows),
        grid_names=("lane", "part", "row"),
        num_threads=2,
        thread_name="role",
        scratch_types=(scratch,),
    )
