# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
"""Attention to selected tokens on a GPU: four queries of a request read together what any selects.

Bytes: 2,051 tokens of a query with 2 kv heads are 4.2 MB, and 8,192 queries read 34 GB, mostly from
the second-level cache, 6 ms if it gives 5.5 TB/s. Neighbours select much the same: with four fifths
of the blocks in common four of them select 3,300 tokens together instead of 8,200; up to a context
of 2,051 tokens they select all. So a first kernel lists for each four queries the tokens that any
of them selects, in order, with a bit for each query, and a program of the second goes through the
list once. Where nothing is in common it reads as much as one query alone at a time would.

With 12 heads of a kv head, 16 with spare ones, four queries are the 64 rows of a warpgroup's
product: 768 cycles of it for 32 tokens (weights in two bfloat16 parts, see `triton_kernels`), and
32 kB take 1,400 cycles of a processor's share of that cache.

A NaN or infinity among the values of a token reaches all four queries if one selects it.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.sparse_attention.limits import TOGETHER
from qwen4jax.pallas.triton_call import triton_call

# tokens of a step, warps of a program, and of the loop as in `triton_kernels`
_TILE, _WARPS, _STAGES = 32, 4, 4
# words of marks, each of eight tokens, that a listing program counts at a time, and its warps
_WORDS, _LIST_WARPS = 1024, 8


def sparse_attention(query, gate, key, value, slots, page_table):
    """See `qwen4jax.pallas.sparse_attention`."""
    rows, places, heads, channels = query.shape
    kv_heads, page = key.shape[2], key.shape[1]
    tiles = rows * -(-places // TOGETHER)
    listed, count, room = _listed(slots, page_table, page)
    return triton_call(
        query,
        gate,
        key,
        value,
        listed,
        count,
        kernel=_attention,
        name=f"sparse_attention_together_{rows}x{places}x{heads}x{slots.shape[-1]}",
        out=jax.ShapeDtypeStruct((rows, places, heads * channels), query.dtype),
        grid=(tiles * kv_heads,),
        num_warps=_WARPS,
        num_stages=_STAGES,
        PLACES=places,
        KV_HEADS=kv_heads,
        SHARED=heads // kv_heads,
        HEADS=16,
        CHANNELS=channels,
        DEPTH=max(16, triton.next_power_of_2(channels)),
        SCALE=channels**-0.5 * math.log2(math.e),
        TOGETHER=TOGETHER,
        TILE=_TILE,
        ROOM=room,
        STAGES=_STAGES,
    )


def _listed(slots, page_table, page):
    """What each four queries select, `place * 2**TOGETHER + queries`, how many, and the room."""
    rows, places, width = slots.shape
    tiles = rows * -(-places // TOGETHER)
    fields = 32 // TOGETHER
    words = page_table.shape[1] * page // fields
    room = min(fields * words, TOGETHER * width)
    pitch = -(-words // _WORDS) * _WORDS
    shape = jax.ShapeDtypeStruct
    listed, count, _ = triton_call(
        slots,
        page_table,
        kernel=_list,
        name=f"sparse_attention_list_{rows}x{places}x{width}",
        out=(
            shape((tiles, room), jnp.int32),
            shape((tiles,), jnp.int32),
            shape((tiles, pitch), jnp.int32),
        ),
        grid=(tiles,),
        num_warps=_LIST_WARPS,
        num_stages=1,
        PLACES=places,
        WIDTH=width,
        PAGE=page,
        PAGES=page_table.shape[1],
        TOGETHER=TOGETHER,
        ROOM=room,
        WORDS=_WORDS,
        PITCH=pitch,
    )
    return listed, count, room


@triton.jit
def _list(
    slots_ptr,
    table_ptr,
    out_ptr,
    count_ptr,
    marks_ptr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
    PITCH: tl.constexpr,
):
    """Marks tokens, a bit of a word's field for each query; then lists the marked ones in order."""
    FIELDS: tl.constexpr = 32 // TOGETHER
    ONES: tl.constexpr = ((1 << 32) - 1) // ((1 << TOGETHER) - 1)
    tile = tl.program_id(0).to(tl.int64)
    TILES: tl.constexpr = (PLACES + TOGETHER - 1) // TOGETHER
    row, first = tile // TILES, tile % TILES * TOGETHER
    marks = marks_ptr + tile * PITCH
    slots = slots_ptr + (row * PLACES + first) * WIDTH
    # the queries' selections are one run of entries
    entries = tl.minimum(TOGETHER, PLACES - first) * WIDTH
    lane = tl.arange(0, WORDS)
    last = tl.full((WORDS,), 0, tl.int32)
    for start in tl.range(0, entries, WORDS):
        entry = start + lane
        token = tl.load(slots + entry, mask=entry < entries, other=-1)
        last = tl.maximum(last, tl.where(token < PAGES * PAGE, token, 0))
    # nothing lies beyond the last token selected
    pieces = tl.max(last, 0) // (FIELDS * WORDS) + 1
    for i in tl.range(0, pieces):
        tl.store(marks + i * WORDS + lane, tl.zeros((WORDS,), tl.int32))
    tl.debug_barrier()
    for start in tl.range(0, entries, WORDS):
        entry = start + lane
        token = tl.load(slots + entry, mask=entry < entries, other=-1)
        there = (token >= 0) & (token < PAGES * PAGE)
        bit = 1 << (entry // WIDTH + token % FIELDS * TOGETHER).to(tl.int32)
        tl.atomic_or(marks + token // FIELDS, bit, mask=there, sem="relaxed")
    tl.debug_barrier()

    field = tl.arange(0, FIELDS)[None, :]
    total = tl.zeros((), tl.int32)
    for i in tl.range(0, pieces):
        number = i * WORDS + lane
        # past the first-level cache, which atomics do not write
        mark = tl.load(marks + number, cache_modifier=".cg")
        at = row * PAGES + number // (PAGE // FIELDS)
        page = tl.load(table_ptr + at, mask=mark != 0, other=-1)
        mark = tl.where(page >= 0, mark, 0)
        filled = mark
        for q in tl.static_range(1, TOGETHER):
            filled |= mark >> q
        filled &= ONES
        own = _sum(filled, ONES, TOGETHER)
        before = total + tl.cumsum(own, 0) - own
        below = filled[:, None] & ((1 << (TOGETHER * field)) - 1)
        put = before[:, None] + _sum(below, ONES, TOGETHER)
        slot = (page * PAGE + number % (PAGE // FIELDS) * FIELDS)[:, None] + field
        taken = (mark[:, None] >> (TOGETHER * field)) & ((1 << TOGETHER) - 1)
        tl.store(out_ptr + tile * ROOM + put, (slot << TOGETHER) + taken, mask=taken != 0)
        total += tl.sum(own, 0)
    tl.store(count_ptr + tile, total)


@triton.jit
def _sum(filled, ONES: tl.constexpr, TOGETHER: tl.constexpr):
    """Of a word's fields, each 0 or 1: the product's last field has it, no other runs over."""
    return ((filled * ONES) >> (32 - TOGETHER)) & ((1 << TOGETHER) - 1)


@triton.jit
def _attention(
    query_ptr,
    gate_ptr,
    key_ptr,
    value_ptr,
    listed_ptr,
    count_ptr,
    out_ptr,
    PLACES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    TILES: tl.constexpr = (PLACES + TOGETHER - 1) // TOGETHER
    member = tl.arange(0, TOGETHER * HEADS)
    own = member // HEADS
    place = tile % TILES * TOGETHER + own
    head = (tile // TILES * PLACES + place) * (KV_HEADS * SHARED) + kv_head * SHARED
    channel = tl.arange(0, DEPTH)
    at = (head + member % HEADS)[:, None] * CHANNELS + channel[None, :]
    there = ((member % HEADS < SHARED) & (place < PLACES))[:, None] & (channel < CHANNELS)[None, :]
    query = tl.load(query_ptr + at, mask=there, other=0.0)
    count = tl.load(count_ptr + tile)
    listed = listed_ptr + tile * ROOM

    top = tl.full((TOGETHER * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((TOGETHER * HEADS,), tl.float32)
    out = tl.zeros((TOGETHER * HEADS, DEPTH), tl.float32)
    for i in tl.range(0, (count + TILE - 1) // TILE, num_stages=STAGES):
        entry = i * TILE + tl.arange(0, TILE)
        word = tl.load(listed + entry, mask=entry < count, other=0)
        found = ((word >> TOGETHER).to(tl.int64) * KV_HEADS + kv_head) * CHANNELS
        read = (word != 0)[:, None] & (channel < CHANNELS)[None, :]
        key = tl.load(key_ptr + found[:, None] + channel[None, :], mask=read, other=0.0)
        value = tl.load(value_ptr + found[:, None] + channel[None, :], mask=read, other=0.0)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        chosen = ((word[None, :] >> own[:, None]) & 1) != 0
        score = tl.where(chosen, score * SCALE, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        # before the first token there is no maximum to subtract
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weight, 1)
        coarse = weight.to(query.dtype)
        out = tl.dot(coarse, value.to(query.dtype), out * kept[:, None], input_precision="ieee")
        if query.dtype != tl.float32:
            fine = (weight - coarse.to(tl.float32)).to(query.dtype)
            out = tl.dot(fine, value.to(query.dtype), out)
        top = higher

    total = tl.where(total == 0, 1.0, total)
    gate = tl.load(gate_ptr + at, mask=there, other=0.0).to(tl.float32)
    out = out / total[:, None] * tl.sigmoid(gate)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)
