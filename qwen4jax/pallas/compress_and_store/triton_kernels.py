"""Norms, rotations and cache writes of a sparse-attention layer on a GPU, in one launch.

Bytes: 31 kB a token (24 query heads and their gates read and written, 2 kv heads, 5 index heads),
so that 4 tokens are nothing and 128 are 4 MB, 1 us; what counts is that it is one kernel of one
round trip to memory. Programs share the work by heads: four query heads, or a token's kv heads, or
its index queries; others pool index keys, some blocks of a request each. Only the first of these
reads the ring, for only a span's first block begins before it, and writes it, with a barrier
between. A chunk of 8,192 tokens is 254 MB, 60 us.

A rotation wants each channel's partner, which another thread holds: it is loaded a second time.
"""

import jax
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.state import AttentionCache

# query heads of a program
_HEADS = 4
# blocks that a program pools, at most: more of them cost all programs registers
_BLOCKS = 4


def prepare_and_store(cache, query_gate, key, value, index_qk, gains, span, *, ratio, eps):
    """See `qwen4jax.pallas.compress_and_store.prepare_and_store`."""
    rows, places, heads, _, channels = query_gate.shape
    kv_heads, (index_heads, index_channels) = key.shape[2], index_qk.shape[2:]
    index_queries = index_heads - 1
    shape = jax.ShapeDtypeStruct
    prepared = shape((rows, places, heads, channels), query_gate.dtype)
    # an array without elements has no memory to point at
    index_prepared = shape((rows, places, max(index_queries, 1), index_channels), index_qk.dtype)
    caches = (cache.key, cache.value, cache.index_key, cache.ring)
    given = (
        *(query_gate, key, value, index_qk, *gains),
        *(span.cos, span.sin, span.slot, span.ring, span.start, span.count),
        *(span.block, span.block_slot, span.block_cos, span.block_sin),
    )
    pairs, blocks = span.cos.shape[-1], span.block.shape[1]
    query_programs = -(-heads // _HEADS)
    out = triton_call(
        *given,
        *caches,
        kernel=_prepare_and_store,
        name=f"prepare_and_store_{rows}x{places}x{heads}",
        out=(*(shape(c.shape, c.dtype) for c in caches), prepared, prepared, index_prepared),
        aliases={len(given) + i: i for i in range(4)},
        grid=(query_programs + 3, places, rows),
        num_warps=4,
        num_stages=1,
        QUERY_PROGRAMS=query_programs,
        TOGETHER=_HEADS,
        HEADS=heads,
        KV_HEADS=kv_heads,
        KV_UP=triton.next_power_of_2(kv_heads),
        CHANNELS=channels,
        DEPTH=triton.next_power_of_2(channels),
        INDEX_QUERIES=index_queries,
        INDEX_UP=triton.next_power_of_2(max(index_queries, 1)),
        INDEX_CHANNELS=index_channels,
        INDEX_DEPTH=triton.next_power_of_2(index_channels),
        PLACES=places,
        PAIRS=pairs,
        BLOCKS=blocks,
        BLOCKS_UP=min(_BLOCKS, triton.next_power_of_2(blocks)),
        RATIO=ratio,
        RING=cache.ring.shape[1],
        RING_UP=triton.next_power_of_2(cache.ring.shape[1]),
        SLOTS=cache.key.shape[0] * cache.key.shape[1],
        BLOCK_SLOTS=cache.index_key.shape[0] * cache.index_key.shape[1],
        EPS=eps,
    )
    return AttentionCache(*out[:4]), out[4], out[5], out[6][:, :, :index_queries]


@triton.jit
def _prepare_and_store(
    query_gate_ptr,
    key_ptr,
    value_ptr,
    index_ptr,
    query_gain_ptr,
    key_gain_ptr,
    index_query_gain_ptr,
    index_key_gain_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    ring_place_ptr,
    start_ptr,
    count_ptr,
    block_ptr,
    block_slot_ptr,
    block_cos_ptr,
    block_sin_ptr,
    pool_key_ptr,
    pool_value_ptr,
    pool_index_key_ptr,
    ring_ptr,
    query_out_ptr,
    gate_out_ptr,
    index_out_ptr,
    QUERY_PROGRAMS: tl.constexpr,
    TOGETHER: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_UP: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    INDEX_QUERIES: tl.constexpr,
    INDEX_UP: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    INDEX_DEPTH: tl.constexpr,
    PLACES: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    RING_UP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    EPS: tl.constexpr,
):
    unit, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token = row * PLACES + tl.program_id(1)
    cos, sin = cos_ptr + token * PAIRS, sin_ptr + token * PAIRS
    if unit < QUERY_PROGRAMS:
        head = unit * TOGETHER + tl.arange(0, TOGETHER)
        there = head < HEADS
        out_at = (token * HEADS + head) * CHANNELS
        query = _prepare(
            query_gate_ptr, 2 * out_at, there, query_gain_ptr, cos, sin, CHANNELS, DEPTH, PAIRS, EPS
        )
        _put(query_out_ptr, out_at, there, query, CHANNELS, DEPTH)
        gate = _take(query_gate_ptr, 2 * out_at + CHANNELS, there, 0, CHANNELS, DEPTH, PAIRS)
        _put(gate_out_ptr, out_at, there, gate, CHANNELS, DEPTH)
    elif unit == QUERY_PROGRAMS:
        head = tl.arange(0, KV_UP)
        at = (token * KV_HEADS + head) * CHANNELS
        slot = tl.load(slot_ptr + token)
        # a token without a place is dropped
        there = (head < KV_HEADS) & (slot >= 0) & (slot < SLOTS)
        pool_at = (slot.to(tl.int64) * KV_HEADS + head) * CHANNELS
        key = _prepare(key_ptr, at, there, key_gain_ptr, cos, sin, CHANNELS, DEPTH, PAIRS, EPS)
        _put(pool_key_ptr, pool_at, there, key, CHANNELS, DEPTH)
        value = _take(value_ptr, at, there, 0, CHANNELS, DEPTH, PAIRS)
        _put(pool_value_ptr, pool_at, there, value, CHANNELS, DEPTH)
    elif unit == QUERY_PROGRAMS + 1:
        head = tl.arange(0, INDEX_UP)
        there = head < INDEX_QUERIES
        at = (token * (INDEX_QUERIES + 1) + head) * INDEX_CHANNELS
        query = _prepare(
            index_ptr,
            at,
            there,
            index_query_gain_ptr,
            cos,
            sin,
            INDEX_CHANNELS,
            INDEX_DEPTH,
            PAIRS,
            EPS,
        )
        out_at = (token * INDEX_QUERIES + head) * INDEX_CHANNELS
        _put(index_out_ptr, out_at, there, query, INDEX_CHANNELS, INDEX_DEPTH)
    elif tl.program_id(1) * BLOCKS_UP < BLOCKS:
        raw = index_ptr + (row * PLACES * (INDEX_QUERIES + 1) + INDEX_QUERIES) * INDEX_CHANNELS
        ring = ring_ptr + row * (RING * INDEX_CHANNELS)
        count = tl.load(count_ptr + row)
        n = tl.program_id(1) * BLOCKS_UP + tl.arange(0, BLOCKS_UP)
        block = tl.load(block_ptr + row * BLOCKS + n, mask=n < BLOCKS, other=0)
        slot = tl.load(block_slot_ptr + row * BLOCKS + n, mask=n < BLOCKS, other=-1)
        there = (slot >= 0) & (slot < BLOCK_SLOTS)
        local = block * RATIO - tl.load(start_ptr + row)
        own = _pool(
            raw,
            ring,
            local,
            block,
            there,
            0,
            INDEX_QUERIES + 1,
            INDEX_CHANNELS,
            INDEX_DEPTH,
            PAIRS,
            PLACES,
            RATIO,
            RING,
        )
        partner = _pool(
            raw,
            ring,
            local,
            block,
            there,
            1,
            INDEX_QUERIES + 1,
            INDEX_CHANNELS,
            INDEX_DEPTH,
            PAIRS,
            PLACES,
            RATIO,
            RING,
        )
        table = (row * BLOCKS + tl.minimum(n, BLOCKS - 1))[:, None] * PAIRS
        key = _turn(
            own,
            partner,
            index_key_gain_ptr,
            block_cos_ptr + table,
            block_sin_ptr + table,
            INDEX_CHANNELS,
            INDEX_DEPTH,
            PAIRS,
            EPS,
            index_ptr.dtype.element_ty,
        )
        _put(
            pool_index_key_ptr,
            slot.to(tl.int64) * INDEX_CHANNELS,
            there,
            key,
            INDEX_CHANNELS,
            INDEX_DEPTH,
        )
        if tl.program_id(1) == 0:
            # the ring has been read by all before it is written by any
            tl.debug_barrier()
            # of the tokens that there are it keeps the last ones
            place = count - RING + tl.arange(0, RING_UP)
            last = (place >= 0) & (place < tl.minimum(count, PLACES))
            kept = tl.load(ring_place_ptr + row * PLACES + place, mask=last, other=RING)
            last = (kept >= 0) & (kept < RING)
            new = _take(
                raw,
                place * ((INDEX_QUERIES + 1) * INDEX_CHANNELS),
                last,
                0,
                INDEX_CHANNELS,
                INDEX_DEPTH,
                PAIRS,
            )
            _put(ring, kept * INDEX_CHANNELS, last, new, INDEX_CHANNELS, INDEX_DEPTH)


@triton.jit
def _partner(channel, PAIRS: tl.constexpr):
    """The channel that is turned together with each, itself where none is."""
    other = tl.where(channel < PAIRS, channel + PAIRS, channel - PAIRS)
    return tl.where(channel < 2 * PAIRS, other, channel)


@triton.jit
def _take(
    ptr,
    at,
    there,
    PARTNER: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rows of channels from `at`, or of their partners, as float32."""
    channel = tl.arange(0, DEPTH)
    mask = there[:, None] & (channel < CHANNELS)[None, :]
    if PARTNER:
        channel = _partner(channel, PAIRS)
    return tl.load(ptr + at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _prepare(
    ptr,
    at,
    there,
    gain_ptr,
    cos,
    sin,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    PAIRS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Heads of one token from `at`, normed and turned."""
    own = _take(ptr, at, there, 0, CHANNELS, DEPTH, PAIRS)
    partner = _take(ptr, at, there, 1, CHANNELS, DEPTH, PAIRS)
    return _turn(
        own, partner, gain_ptr, cos, sin, CHANNELS, DEPTH, PAIRS, EPS, ptr.dtype.element_ty
    )


@triton.jit
def _turn(
    own,
    partner,
    gain_ptr,
    cos,
    sin,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    PAIRS: tl.constexpr,
    EPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """RMS norm and rotation of rows, each rounded to `DTYPE` once; `cos` and `sin` are pointers."""
    channel = tl.arange(0, DEPTH)
    inside = channel < CHANNELS
    scale = tl.rsqrt(tl.sum(own * own, 1) / CHANNELS + EPS)[:, None]
    gain = 1 + tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    other_gain = 1 + tl.load(gain_ptr + _partner(channel, PAIRS), mask=inside, other=0.0).to(
        tl.float32
    )
    own = (own * scale * gain[None, :]).to(DTYPE).to(tl.float32)
    partner = (partner * scale * other_gain[None, :]).to(DTYPE).to(tl.float32)
    turned = (channel < 2 * PAIRS)[None, :]
    pair = (channel % PAIRS)[None, :]
    cos = tl.load(cos + pair, mask=turned, other=1.0)
    sin = tl.load(sin + pair, mask=turned, other=0.0)
    sin = tl.where((channel < PAIRS)[None, :], -sin, sin)
    return (own * cos + partner * sin).to(DTYPE).to(tl.float32)


@triton.jit
def _pool(
    raw,
    ring,
    local,
    block,
    there,
    PARTNER: tl.constexpr,
    PITCH: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
):
    """Mean of each block's raw keys, rounded to their dtype.

    The members from `local` on: before the span from the ring, then from the span.
    """
    total = tl.zeros((local.shape[0], DEPTH), tl.float32)
    for i in tl.static_range(0, RATIO):
        here = local + i
        kept = _take(
            ring,
            (block * RATIO + i) % RING * CHANNELS,
            there & (here < 0),
            PARTNER,
            CHANNELS,
            DEPTH,
            PAIRS,
        )
        new = _take(
            raw,
            here * (PITCH * CHANNELS),
            there & (here >= 0) & (here < PLACES),
            PARTNER,
            CHANNELS,
            DEPTH,
            PAIRS,
        )
        total += tl.where((here < 0)[:, None], kept, new)
    return (total / RATIO).to(raw.dtype.element_ty).to(tl.float32)


@triton.jit
def _put(ptr, at, there, value, CHANNELS: tl.constexpr, DEPTH: tl.constexpr):
    channel = tl.arange(0, DEPTH)
    mask = there[:, None] & (channel < CHANNELS)[None, :]
    if ptr.dtype.element_ty == tl.float8e4nv:
        # a cast beyond its range may give NaN
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    tl.store(ptr + at[:, None] + channel[None, :], value.to(ptr.dtype.element_ty), mask=mask)
