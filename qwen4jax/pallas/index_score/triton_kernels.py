"""Block scores on a GPU: a program multiplies a tile of keys by the queries of one request.

Bytes: 256 for a key of 128 channels and 4 for each of its scores; 14k keys for 4 queries are
3.9 MB, 0.9 us at 4.3 TB/s, and 64k keys for 32 requests 570 MB, 130 us. What a short call takes is
the chain page number -> key -> score. So all queries of a request share a load, a request's tiles
spread over the GPU, a program asks for all its keys before it waits for one (4.6 -> 3.6 us for 14k
keys of one request), and only many requests loop over tiles with loads under way.

The keys are the product's rows, so that few queries leave none of it idle. Its columns are
ordered (pair of heads, query, head in the pair): a thread then holds whole pairs to add up.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.pallas.triton_order import from_here

# keys of a tile: the rows of one warpgroup's product
_TILE = 64
# columns of the product, at most: queries times heads
_COLUMNS = 64
# tiles of a program where there are enough programs, and how many loads are under way
_LOOP, _STAGES = 4, 3
# programs above which they loop: what 132 processors hold at once, several times
_MANY = 4096


def index_score(query, index_key, page_table, complete, *, group=None):
    """See `qwen4jax.pallas.index_score`."""
    rows, places, heads, channels = query.shape
    width = page_table.shape[1] * index_key.shape[1]
    padded = max(2, triton.next_power_of_2(heads))
    together = min(triton.next_power_of_2(places), max(1, _COLUMNS // padded))
    # a product has 8 columns or more
    together = max(together, 8 // padded)
    tiles = -(-width // _TILE)
    parts = -(-places // together)
    loop = _LOOP if tiles * parts * rows > _MANY else 1
    groups = 1 if group is None else -(-width // group)
    scores, best = triton_call(
        query,
        index_key,
        page_table,
        complete,
        kernel=_index_score,
        name=f"index_score_{rows}x{places}x{width}",
        out=(
            jax.ShapeDtypeStruct((rows, places, width), jnp.float32),
            jax.ShapeDtypeStruct((rows, places, groups), jnp.float32),
        ),
        grid=(-(-tiles // loop), parts, rows),
        num_warps=4,
        num_stages=_STAGES,
        PLACES=places,
        HEADS=heads,
        CHANNELS=channels,
        PAGES=page_table.shape[1],
        PAGE=index_key.shape[1],
        SCALE=channels**-0.5,
        TOGETHER=together,
        PAIRS=padded // 2,
        DEPTH=max(16, triton.next_power_of_2(channels)),
        TILE=_TILE,
        LOOP=loop,
        STAGES=_STAGES if loop > 1 else 1,
        GROUP=group or 0,
    )
    return scores if group is None else (scores, best)


@triton.jit
def _index_score(
    query_ptr,
    key_ptr,
    table_ptr,
    complete_ptr,
    out_ptr,
    best_ptr,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    TOGETHER: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    place = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    seen = tl.load(complete_ptr + row * PLACES + place, mask=place < PLACES, other=0)
    most = tl.max(seen, 0)
    channel = tl.arange(0, DEPTH)
    query = _load_query(
        query_ptr + row * (PLACES * HEADS * CHANNELS),
        channel,
        PLACES,
        HEADS,
        CHANNELS,
        TOGETHER,
        PAIRS,
    )
    for i in tl.range(0, LOOP, num_stages=STAGES):
        block = (tl.program_id(0) * LOOP + i) * TILE + tl.arange(0, TILE)
        # does not wait for how many blocks there are
        page = tl.load(table_ptr + row * PAGES + block // PAGE, mask=block < PAGES * PAGE, other=0)
        live = block < most
        at = (tl.maximum(page, 0).to(tl.int64) * PAGE + block % PAGE) * CHANNELS
        # what no query sees may be NaN
        there = live[:, None] & (channel < CHANNELS)[None, :]
        key = tl.load(key_ptr + at[:, None] + channel[None, :], mask=there, other=0.0)
        columns = query
        if LOOP == 1:
            # all keys and queries are under way before any is waited for
            tl.debug_barrier()
            key, columns = from_here(key), from_here(query)
        dots = tl.dot(key, tl.trans(columns), input_precision="ieee")
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = tl.sum(tl.sum(tl.reshape(dots, (TILE, PAIRS, TOGETHER, 2)), 3), 1) * SCALE
        score = tl.where(block[:, None] < seen[None, :], score, float("-inf"))
        _store(out_ptr, score, row, place, block, PLACES, PAGES * PAGE)
        if GROUP > 0:
            best = tl.max(tl.reshape(score, (TILE // GROUP, GROUP, TOGETHER)), 1)
            group = (tl.program_id(0) * LOOP + i) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            _store(best_ptr, best, row, place, group, PLACES, (PAGES * PAGE + GROUP - 1) // GROUP)


@triton.jit
def _load_query(
    query_ptr,
    channel,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The product's columns, each a row: [pairs of heads x queries x 2, channels]."""
    column = tl.arange(0, PAIRS * TOGETHER * 2)
    head = column // (2 * TOGETHER) * 2 + column % 2
    place = tl.program_id(1) * TOGETHER + column // 2 % TOGETHER
    at = (place * HEADS + head) * CHANNELS
    there = (head < HEADS) & (place < PLACES)
    there = there[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(query_ptr + at[:, None] + channel[None, :], mask=there, other=0.0)


@triton.jit
def _store(ptr, score, row, place, block, PLACES: tl.constexpr, WIDTH: tl.constexpr):
    here = ptr + (row * PLACES + place)[None, :] * WIDTH + block[:, None]
    tl.store(here, score, mask=(place < PLACES)[None, :] & (block < WIDTH)[:, None])
