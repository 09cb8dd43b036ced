"""Attention to selected tokens in Pallas Mosaic GPU, for Hopper: blocks by TMA, sums by wgmma.

Bytes: 1 kB of keys and values for each token and kv head of 256 channels in bfloat16. The 2,051
tokens of 4 queries with 2 kv heads are 16.8 MB, 3.9 us at 4.3 TB/s, those of 128 queries 538 MB,
125 us. A kernel of this language is a captured call of a CUDA graph, which costs more than a native
node; what finds the pages before it and adds its parts up after it are fusions of XLA.

There is no gather by a vector of places on Hopper. One warpgroup reads them one by one and asks for
four tokens with one copy where they lie side by side, as those of a selected block do, else for
each alone. TMA can not put four rows into a tile of wgmma, which has eight, so they come as they
are in memory, and the other warpgroup puts them into tiles, with zeros in place of what no token
is, which may be NaN: a weight of zero would not silence it.

Both products have 16 columns, a query head of a kv head each: 64 tokens by heads, then 64 channels
by heads. The weights of the second are two bfloat16 parts side by side, so that it is a float32 sum
to 2**-17. A selection is split until the chip is full; the parts are merged in their order.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.mosaic_layouts import LINES, SWIZZLED
from qwen4jax.pallas.sparse_attention.limits import MOSAIC_HEADS as HEADS
from qwen4jax.span import physical

TILE = 64  # tokens: the rows of one warpgroup's product, and the depth of the other's
_BLOCK = 4  # tokens that are copied at once where they lie side by side
_STAGES = 2  # tiles of bfloat16 under way, twice as many of e4m3
_LONGEST = 16  # tiles of a part, as far as shared memory goes
_CTAS = 132  # one for each multiprocessor
_PRODUCT = plgpu.Layout.WGMMA
_OVER_ROWS = plgpu.Layout.WGMMA.reduce(0)
# [rows, 64] where a lane holds 16 bytes of a row, as they lie in memory and in a tile
_COPIED = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (4, 64), (8,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


# compiled apart, so that a program with many layers lowers one
@jax.jit
def sparse_attention(query, gate, key, value, slots, page_table=None):
    """See `qwen4jax.pallas.sparse_attention`."""
    rows, places, heads, channels = query.shape
    kv_heads, queries = key.shape[2], rows * places
    if page_table is not None:
        slots = physical(page_table, slots, key.shape[1])
    attend = _kernel((queries, heads, channels), kv_heads, slots.shape[-1], key.dtype)
    # TMA reads from boundaries of 16 bytes only, else it is an illegal instruction
    slots = jnp.pad(slots, [(0, 0), (0, 0), (0, -slots.shape[-1] % TILE)], constant_values=-1)
    parts, logs = attend(
        query.reshape(queries, kv_heads, -1, channels),
        key.reshape(-1, kv_heads, channels),
        value.reshape(-1, kv_heads, channels),
        slots.reshape(-1),
    )
    out = _merge(parts, logs)[:, : heads // kv_heads].reshape(query.shape)
    out = out * jax.nn.sigmoid(gate.astype(jnp.float32))
    return out.astype(query.dtype).reshape(rows, places, -1)


def _merge(parts, logs):
    """The values [pairs, heads, channels] of parts that are normed, of weights 2**logs.

    Sums are written out: XLA makes two kernels of them, of reductions three.
    """
    count = range(logs.shape[1])
    top = functools.reduce(jnp.maximum, (logs[:, i] for i in count))
    base = jnp.where(top == -jnp.inf, 0, top)
    weights = [jnp.exp2(logs[:, i] - base) for i in count]
    total = sum(weights[1:], weights[0])
    terms = [parts[:, i] * weight[..., None] for i, weight in enumerate(weights)]
    return sum(terms[1:], terms[0]) / jnp.where(total == 0, 1, total)[..., None]


def _kernel(sizes: tuple[int, ...], kv_heads: int, width: int, kept_in: Any) -> Any:
    """Takes queries, keys, values, places of all queries in a row; gives values and weights.

    The places of a query are `width`, then -1 to a whole tile.
    Both are of each part of each pair of query and kv head, [pairs, parts, 16 heads, channels].
    """
    tiles = -(-width // TILE)
    stages = 2 * _STAGES // jnp.dtype(kept_in).itemsize
    queries, heads, channels = sizes
    shared, pairs = heads // kv_heads, queries * kv_heads
    parts = min(tiles, max(_CTAS // pairs, -(-tiles // _LONGEST)))
    longest = -(-tiles // parts)
    chunks = channels // 64
    # places of a part, and of one copy of them
    places = longest * TILE
    at_once = min(places, 256)

    def load(head, mine, slots, keys, values, keys_read, values_read, full, empty):
        def one(i, carry):
            slot = lax.rem(i, stages)

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            def copy(place, to, count):
                for pool, read in ((keys, keys_read), (values, values_read)):
                    source = pool.at[pl.ds(place, count), head]
                    target = read.at[slot, pl.ds(to, count)]
                    plgpu.copy_gmem_to_smem(source, target, full.at[slot])

            def blocks(b, carry):
                """Asks for four blocks, each with a warp of its own."""
                first = b * 4 * _BLOCK
                found = [slots[i * TILE + first + token] for token in range(4 * _BLOCK)]

                @plgpu.warp_map
                def _(warp):
                    to = first + warp * _BLOCK
                    # a warp cannot load
                    mine = found[:_BLOCK]
                    for w in range(1, 4):
                        others = found[w * _BLOCK : (w + 1) * _BLOCK]
                        pairs = zip(others, mine, strict=True)
                        mine = [jnp.where(warp == w, other, own) for other, own in pairs]
                    place = jnp.maximum(mine[0], 0)
                    # what stands for no token is not kept, but it is in the pool
                    aside = place <= keys.shape[0] - _BLOCK
                    for token in range(1, _BLOCK):
                        missing = mine[token] < 0
                        aside = aside & (missing | (mine[token] == place + token))

                    def together():
                        copy(place, to, _BLOCK)
                        # for the copies that are not needed
                        for _ in range(2 * (_BLOCK - 1)):
                            plgpu.barrier_arrive(full.at[slot])

                    def alone():
                        for token in range(_BLOCK):
                            copy(jnp.maximum(mine[token], 0), to + token, 1)

                    lax.cond(aside, together, alone)

                return carry

            return lax.fori_loop(0, TILE // _BLOCK // 4, blocks, carry)

        lax.fori_loop(0, mine, one, ())

    def to_tiles(read, tile, there):
        """Puts rows into tiles of wgmma, zeros where there is nothing."""
        rows = plgpu.load(read, layout=_COPIED, optimized=False)
        if rows.dtype != jnp.bfloat16:
            rows = rows.astype(jnp.float32).astype(jnp.bfloat16)
        if there is not None:
            rows = jnp.where(there, rows, jnp.zeros_like(rows))
        tile[...] = rows

    def products(width, *operands):
        """Of 64 rows each with the same columns, all under way at once."""

        def run(*accs):
            for acc, (left, right) in zip(accs, operands, strict=True):
                plgpu.wgmma(acc, left, right)
            plgpu.wgmma_wait(0)
            return tuple(acc[...] for acc in accs)

        accs = [plgpu.WGMMAAccumulatorRef((TILE, width), jnp.float32)] * len(operands)
        return [plgpu.layout_cast(sums, _PRODUCT) for sums in pl.run_scoped(run, *accs)]

    def over_rows(vector):
        return lax.broadcast_in_dim(vector, (TILE, HEADS), (1,))

    def selected(slots, layout, shape):
        """Which tokens of a tile there are, for each of the other numbers of their rows."""
        slot = plgpu.load(slots, layout=layout.reduce(1), optimized=False)
        return lax.broadcast_in_dim(slot, shape, (0,)) >= 0

    def add(i, carry, mine, scratch):
        """A tile's share in the softmax: its maximum, its sum by row, the weighted values."""
        top, total, outs = carry
        slot = lax.rem(i, stages)
        tile, weights = scratch["tile"], scratch["weights"]
        slots = scratch["slots"].at[pl.ds(i * TILE, TILE)]
        plgpu.barrier_wait(scratch["full"].at[slot])
        to_tiles(scratch["keys"].at[slot], tile.at[0], None)
        there = selected(slots, _COPIED, (TILE, channels))
        to_tiles(scratch["values"].at[slot], tile.at[1], there)
        plgpu.commit_smem()

        @pl.when(i + stages < mine)
        def _():
            plgpu.barrier_arrive(scratch["empty"].at[slot])

        (score,) = products(HEADS, (tile.at[0], scratch["queries"].T))
        there = selected(slots, _PRODUCT, score.shape)
        score = jnp.where(there, score * (channels**-0.5 * math.log2(math.e)), -jnp.inf)
        higher = jnp.maximum(top, jnp.max(score, axis=0))
        # before the first token there is no maximum to subtract
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        weight = jnp.exp2(score - over_rows(base))
        kept = over_rows(jnp.exp2(top - base))
        coarse = weight.astype(jnp.bfloat16)
        fine = (weight - coarse.astype(jnp.float32)).astype(jnp.bfloat16)
        weights.at[pl.ds(0, HEADS)].T[...] = coarse
        weights.at[pl.ds(HEADS, HEADS)].T[...] = fine
        plgpu.commit_smem()
        values = [tile.at[1, :, pl.ds(c * 64, 64)].T for c in range(chunks)]
        both = products(2 * HEADS, *((value, weights.T) for value in values))
        sums = [
            out * kept + (sums[:, :HEADS] + sums[:, HEADS:])
            for out, sums in zip(outs, both, strict=True)
        ]
        return higher, total * kept + weight, tuple(sums)

    def body(query, keys, values, slots, parts_out, logs_out, scratch):
        part, pair = lax.axis_index("part"), lax.axis_index("pair")
        row, head = pair // kv_heads, lax.rem(pair, kv_heads)
        first = part * tiles // parts
        mine = (part + 1) * tiles // parts - first
        role, given = lax.axis_index("role"), scratch["given"]

        @pl.when(role == 1)
        def _():
            for at in range(0, places, at_once):
                source = slots.at[pl.ds((row * tiles + first) * TILE + at, at_once)]
                plgpu.copy_gmem_to_smem(source, scratch["slots"].at[pl.ds(at, at_once)], given)
            source = query.at[row, head]
            plgpu.copy_gmem_to_smem(source, scratch["given_queries"].at[pl.ds(0, shared)], given)

        plgpu.barrier_wait(given)

        @pl.when(role == 1)
        def _():
            read = scratch["keys"], scratch["values"]
            load(
                head, mine, scratch["slots"], keys, values, *read, scratch["full"], scratch["empty"]
            )

        @pl.when(role == 0)
        def _():
            number = plgpu.broadcasted_iota(jnp.int32, (HEADS, channels), 0, layout=_COPIED)
            to_tiles(scratch["given_queries"], scratch["queries"], number < shared)
            zeros = plgpu.layout_cast(jnp.zeros((TILE, HEADS), jnp.float32), _PRODUCT)
            top = plgpu.layout_cast(jnp.full((HEADS,), -jnp.inf, jnp.float32), _OVER_ROWS)
            step = functools.partial(add, mine=mine, scratch=scratch)
            top, total, outs = lax.fori_loop(0, mine, step, (top, zeros, (zeros,) * chunks))
            total = jnp.sum(total, axis=0)
            # of nothing selected: zeros, with the weight 2**-inf
            total = jnp.where(total == 0, 1.0, total)
            logs_out[pair, part] = top + jnp.log(total) * math.log2(math.e)
            for c, out in enumerate(outs):
                scratch["upright"][...] = out / over_rows(total)
                plgpu.commit_smem()
                turned = plgpu.load(scratch["upright"].T, layout=LINES, optimized=False)
                parts_out[pair, part, :, pl.ds(c * 64, 64)] = turned

    body.__name__ = f"sparse_attention_{queries}x{heads}x{width}"
    bf16, f32 = jnp.bfloat16, jnp.float32
    scratch: dict[str, Any] = {
        "slots": plgpu.SMEM((-(-places // at_once) * at_once,), jnp.int32),
        "given_queries": plgpu.SMEM((HEADS, channels), bf16),
        "queries": plgpu.SMEM((HEADS, channels), bf16, transforms=SWIZZLED),
        "keys": plgpu.SMEM((stages, TILE, channels), kept_in),
        "values": plgpu.SMEM((stages, TILE, channels), kept_in),
        # of keys, then of values
        "tile": plgpu.SMEM((2, TILE, channels), bf16, transforms=SWIZZLED),
        "weights": plgpu.SMEM((2 * HEADS, TILE), bf16, transforms=SWIZZLED),
        "upright": plgpu.SMEM((TILE, HEADS), f32),
        "given": plgpu.Barrier(num_arrivals=-(-places // at_once) + 1),
        "full": plgpu.Barrier(num_arrivals=2 * TILE, num_barriers=stages),
        "empty": plgpu.Barrier(num_barriers=stages),
    }
    shape = jax.ShapeDtypeStruct
    return plgpu.kernel(
        body,
        out_type=(shape((pairs, parts, HEADS, channels), f32), shape((pairs, parts, HEADS), f32)),
        grid=(parts, pairs),
        grid_names=("part", "pair"),
        num_threads=2,
        thread_name="role",
        scratch_types=(scratch,),
    )
