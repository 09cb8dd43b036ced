# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
"""Attention to selected tokens on a GPU: split along the selection, merged in a fixed order.

Bytes: 1 kB of keys and values for each token and kv head of 256 channels in bfloat16. The 2,051
tokens of a query with 2 kv heads are 4.2 MB, 1 us at 4.3 TB/s, those of 4 queries 16.8 MB, 3.9 us;
half of it in e4m3. A selection is split into equal parts until the GPU is full, so that all its
programs run at once and end at once. With many queries there is one part each, which needs no
second kernel.

A program first lists the places of its tokens in shared memory: slot numbers, then pages, two
latencies for all of them. So the addresses of its loop come from there, and the loop's copies run
as many tiles ahead as shared memory has room for. A program of a single tile has no list: it asks
for keys and values together, by loads into registers.

A token's key of one head is one run of memory and blocks of 4 tokens are contiguous; the heads of a
token are read by neighbouring programs, close in time. Products take bfloat16, with the weights of
the sum over values in two bfloat16 parts, so that it is a float32 sum to 2**-17.

Words of four e4m3 channels go to the product's registers as they are: a register there holds two
tokens or two words, whose channels `j` become two float16 numbers by two instructions, exactly (of
sm_89 and later). So there are four products, of every fourth channel, and the results are put side
by side at the end.
Queries become float16 too, each head's by a power of two that makes the largest about 1: what lies
below the normal numbers then is 2**-25 of it or less. Weights, in two float16 parts, are 2**8 times
as large for the same reason.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas import triton_shared
from qwen4jax.pallas.sparse_attention.triton_merge import merge
from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.pallas.triton_order import from_here
from qwen4jax.pallas.triton_shared import allocate, get_settled, put_if

# (query, kv head) pairs up to which a selection is split into so many parts; above, into one
PARTS = ((2, 65), (8, 33), (16, 16), (32, 8), (64, 4), (128, 2))
# the same of e4m3, where two programs of a multiprocessor have too few warps to keep up with memory
E4M3_PARTS = (*PARTS[:4], (64, 8), (128, 4), (256, 2))
# tokens of a part, at most: its list is 16 kB
_LONGEST = 4096
# tokens of a tile, and warps
_TILE, _WARPS = 32, 4
# bytes of a channel -> tiles used and under way, and one, for two programs a multiprocessor (of
# float32 one, and of bfloat16 where a list of a whole selection is beside them); for four
_STAGES, _FEW_STAGES = {1: 7, 2: 4, 4: 3}, 3
# pairs of e4m3 above which there are four
_FOUR = 32
# pairs above which a program looks where its selection ends: the first tokens of a prompt have few
_MANY = 512


def _byte_of(j, use):
    """PTX: channels `j` of two words of e4m3 as float16.

    The uses differ in their text: of a result that two products take, the compiler moves one to the
    products' registers and sends the other through shared memory.
    """
    return (
        f"{{ .reg .b32 t; .reg .b16 h; prmt.b32 t, $1, $2, {(4 + j) << 4 | j}; {' ' * use}"
        "cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h; }"
    )


# for keys and the first product of values, and for the second
_BYTE = tl.constexpr(tuple(_byte_of(j, use) for use in range(2) for j in range(4)))
# weights in float16 are so many powers of two too large
_LIFT = tl.constexpr(8.0)


def sparse_attention(query, gate, key, value, slots, page_table=None):
    """See `qwen4jax.pallas.sparse_attention`."""
    rows, places, heads, channels = query.shape
    kv_heads, width = key.shape[2], slots.shape[-1]
    pairs = rows * places * kv_heads
    itemsize = key.dtype.itemsize
    table = E4M3_PARTS if itemsize == 1 else PARTS
    parts = next((parts for most, parts in table if pairs <= most), 1)
    parts = min(max(parts, -(-width // _LONGEST)), -(-width // _TILE))
    # equal parts, and a part's equal tiles
    count = -(-width // parts)
    parts = -(-width // count)
    each = -(-count // _TILE)
    step = -(-count // each)
    stages = _FEW_STAGES if itemsize == 1 and pairs > _FOUR else _STAGES[itemsize]
    stages = min(stages, each + 1)
    whole = parts == 1
    shape = jax.ShapeDtypeStruct
    out = shape((rows, places, heads * channels), query.dtype)
    summed = shape((rows * places, heads, parts, channels), jnp.float32)
    name = f"{rows}x{places}x{heads}x{width}"
    results = triton_call(
        query,
        gate,
        key,
        value,
        slots,
        # never read without one: a pointer parameter needs some array
        slots if page_table is None else page_table,
        kernel=_sparse_attention,
        name=f"sparse_attention_{name}",
        out=(out, shape((1,), jnp.float32))
        if whole
        else (summed, shape(summed.shape[:-1], jnp.float32)),
        grid=(pairs, parts),
        num_warps=_WARPS,
        num_stages=stages,
        PLACES=places,
        KV_HEADS=kv_heads,
        SHARED=heads // kv_heads,
        HEADS=max(16, triton.next_power_of_2(heads // kv_heads)),
        CHANNELS=channels,
        DEPTH=max(16, triton.next_power_of_2(channels)),
        WIDTH=width,
        PAGE=key.shape[1],
        PAGES=0 if page_table is None else page_table.shape[1],
        SCALE=channels**-0.5 * math.log2(math.e),
        TILE=_TILE,
        COUNT=count,
        STEP=step,
        EACH=each,
        WORDS=triton_shared.words((each - 1) * step + _TILE),
        WHOLE=whole,
        ENDS=whole and pairs > _MANY,
        STAGES=stages,
    )
    if whole:
        return results[0]
    return merge(results[0], results[1], gate, name=name)


@triton.jit
def _sparse_attention(
    query_ptr,
    gate_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    table_ptr,
    out_ptr,
    weight_ptr,
    PLACES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
    EACH: tl.constexpr,
    WORDS: tl.constexpr,
    WHOLE: tl.constexpr,
    ENDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    slots = slots_ptr + row * WIDTH
    table = table_ptr + row // PLACES * PAGES
    member = tl.arange(0, HEADS)
    head = row * (KV_HEADS * SHARED) + kv_head * SHARED + member
    # channels of a loaded word are kept apart: they need not be put side by side for the products
    APART: tl.constexpr = 4 if key_ptr.dtype.element_ty == tl.float8e4nv else 1
    HALVES: tl.constexpr = APART == 4 and query_ptr.dtype.element_ty == tl.bfloat16
    column = tl.arange(0, DEPTH // APART)
    at = head[:, None] * CHANNELS + (APART * column)[None, :]
    there = (member < SHARED)[:, None] & (APART * column < CHANNELS)[None, :]
    scale = tl.full((HEADS,), SCALE, tl.float32)
    outs = ()
    for _ in tl.static_range(APART):
        outs = outs + (tl.zeros((HEADS, DEPTH // APART), tl.float32),)  # noqa: RUF005
    top = tl.full((HEADS,), float("-inf"), tl.float32)

    if EACH == 1:
        # all that is read is asked for before anything is waited for but slots and pages
        entry = part * COUNT + tl.arange(0, TILE)
        inside = (tl.arange(0, TILE) < COUNT) & (entry < WIDTH)
        slot = _slots(slots, table, entry, inside, PAGE, PAGES)
        found = _load(key_ptr, value_ptr, slot, kv_head, column, KV_HEADS, CHANNELS)
        query = _query(query_ptr + at, there, APART)
        tl.debug_barrier()
        loaded, query = query, ()
        for j in tl.static_range(APART):
            query = query + (from_here(loaded[j]),)  # noqa: RUF005
        if HALVES:
            query, scale = _halves(query, scale)
        found = from_here(found[0]), from_here(found[1])
        top, kept, weight, outs = _attend(query, found, slot, top, outs, scale, HALVES)
        total = tl.sum(weight, 1)
    else:
        memory = allocate(WORDS)
        filled = _list(slots, table, part, memory, WIDTH, PAGE, PAGES, COUNT, EACH * STEP)
        query = _query(query_ptr + at, there, APART)
        if HALVES:
            query, scale = _halves(query, scale)
        tl.debug_barrier()
        # what is read at this address is read after the barrier
        memory = from_here(memory)
        end = EACH
        if ENDS:
            end = (filled + STEP - 1) // STEP
        # added up over tokens at the end only: it is a wait for all warps
        totals = tl.zeros((HEADS, TILE), tl.float32)
        lane = tl.arange(0, TILE)
        for i in tl.range(0, end, num_stages=STAGES):
            slot = get_settled(memory, i * STEP + lane)
            if STEP < TILE:
                slot = tl.where(lane < STEP, slot, -1)
            found = _load(key_ptr, value_ptr, slot, kv_head, column, KV_HEADS, CHANNELS)
            top, kept, weight, outs = _attend(query, found, slot, top, outs, scale, HALVES)
            totals = totals * kept[:, None] + weight
        total = tl.sum(totals, 1)

    # of nothing selected: zeros, with the weight 2**-inf
    total = tl.where(total == 0, 1.0, total)
    place = head * tl.num_programs(1) + part
    if APART == 1:
        out = outs[0]
    else:
        even, odd = tl.interleave(outs[0], outs[2]), tl.interleave(outs[1], outs[3])
        out = tl.interleave(even, odd)
    out = out / total[:, None]
    channel = tl.arange(0, DEPTH)
    at = head[:, None] * CHANNELS + channel[None, :]
    there = (member < SHARED)[:, None] & (channel < CHANNELS)[None, :]
    if WHOLE:
        gate = tl.load(gate_ptr + at, mask=there, other=0.0).to(tl.float32)
        out = out * tl.sigmoid(gate)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)
    else:
        tl.store(out_ptr + place[:, None] * CHANNELS + channel[None, :], out, mask=there)
        # of all parts by the same factor too large, where weights are
        tl.store(weight_ptr + place, top + tl.log2(total), mask=member < SHARED)


@triton.jit
def _list(
    slots,
    table,
    part,
    memory,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    COUNT: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Lists the places of a part's tokens in shared memory; entries up to the last there is."""
    CHUNK: tl.constexpr = min(1024, triton.next_power_of_2(ROOM))
    last = tl.zeros((CHUNK,), tl.int32)
    for start in tl.static_range(0, ROOM, CHUNK):
        number = start + tl.arange(0, CHUNK)
        entry = part * COUNT + number
        slot = _slots(slots, table, entry, (number < COUNT) & (entry < WIDTH), PAGE, PAGES)
        put_if(memory, number, slot, number < ROOM)
        last = tl.where(slot >= 0, number + 1, last)
    return tl.max(last, 0)


@triton.jit
def _query(ptr, there, APART: tl.constexpr):
    """Queries of each of a word's channels."""
    query = ()
    for j in tl.static_range(APART):
        query = query + (tl.load(ptr + j, mask=there, other=0.0),)  # noqa: RUF005
    return query


@triton.jit
def _halves(query, scale):
    """Queries as float16, the largest of each head between 1 and 2, and the scale of their scores.

    Where all are 0 or below the normal numbers, scores become 0.
    """
    most = tl.abs(query[0].to(tl.float32))
    for j in tl.static_range(1, len(query)):
        most = tl.maximum(most, tl.abs(query[j].to(tl.float32)))
    # bits of the power of two in it, and of its inverse
    power = tl.minimum(tl.max(most, 1).to(tl.int32, bitcast=True) & 0x7F800000, 0x7F000000)
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    out = ()
    for j in tl.static_range(len(query)):
        out = out + ((query[j].to(tl.float32) * inverse[:, None]).to(tl.float16),)  # noqa: RUF005
    return out, scale * power.to(tl.float32, bitcast=True)


@triton.jit
def _slots(slots, table, entry, there, PAGE: tl.constexpr, PAGES: tl.constexpr):
    """Places of the tokens selected, negative where there is none."""
    slot = tl.load(slots + entry, mask=there, other=-1)
    if PAGES > 0:
        # unsigned, in which none is the highest number, it takes few instructions
        token = slot.to(tl.uint32, bitcast=True)
        page = tl.load(table + token // PAGE, mask=token < PAGES * PAGE, other=-1)
        slot = tl.where(page >= 0, page * PAGE + (token % PAGE).to(tl.int32), -1)
    return slot


@triton.jit
def _load(
    key_ptr, value_ptr, slot, kv_head, column, KV_HEADS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Keys and values [tokens, columns] of one head, of e4m3 words of 4 channels, see `_byte`.

    Zeros where there is no token: those places may hold NaN.
    """
    WIDTH: tl.constexpr = CHANNELS // 4 if key_ptr.dtype.element_ty == tl.float8e4nv else CHANNELS
    if key_ptr.dtype.element_ty == tl.float8e4nv:
        key_ptr = key_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        value_ptr = value_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # one instruction an address
    at = (slot.to(tl.int64) * (KV_HEADS * WIDTH))[:, None]
    column = (kv_head * WIDTH + column)[None, :]
    there = (slot >= 0)[:, None] & (column < (kv_head + 1) * WIDTH)
    key = tl.load(key_ptr + column + at, mask=there, other=0)
    return key, tl.load(value_ptr + column + at, mask=there, other=0)


@triton.jit
def _byte(words, j: tl.constexpr, use: tl.constexpr, dtype: tl.constexpr):
    """Channel `j` of each word of four e4m3 channels."""
    out = tl.inline_asm_elementwise(
        _BYTE[4 * use + j], "=r,r,r", [words], dtype=tl.float16, is_pure=True, pack=2
    )
    return out.to(dtype)


@triton.jit
def _exp2(x):
    """`2**x`, below the normal numbers 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _attend(query, found, slot, top, outs, scale, HALVES: tl.constexpr):
    """Adds some tokens to a softmax under way: its maximum and the weighted values.

    Also gives what is kept of sums under the former maximum, and the tokens' weights.

    Queries and values are as many as a loaded word has channels: each has its own.
    """
    APART: tl.constexpr = len(query)
    key, value = found
    score = tl.zeros((query[0].shape[0], slot.shape[0]), tl.float32)
    # two sums: each product waits for the one before
    other = tl.zeros_like(score)
    for j in tl.static_range(0, APART, 2):
        channels = _channels(key, j, 0, APART, query[0].dtype)
        score = tl.dot(query[j], tl.trans(channels), score, input_precision="ieee")
        if APART > 1:
            channels = _channels(key, j + 1, 0, APART, query[0].dtype)
            other = tl.dot(query[j + 1], tl.trans(channels), other, input_precision="ieee")
    if APART > 1:
        score += other
    score = tl.where((slot >= 0)[None, :], score * scale[:, None], float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    # before the first token there is no maximum to subtract
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = _exp2(top - base)
    weight = _exp2(score - (base - _LIFT if HALVES else base)[:, None])
    coarse = weight.to(query[0].dtype)
    fine = (weight - coarse.to(tl.float32)).to(query[0].dtype)
    new = ()
    for j in tl.static_range(APART):
        channels = _channels(value, j, 0, APART, query[0].dtype)
        out = tl.dot(coarse, channels, outs[j] * kept[:, None], input_precision="ieee")
        if query[0].dtype != tl.float32:
            channels = _channels(value, j, 1, APART, query[0].dtype)
            out = tl.dot(fine, channels, out)
        new = new + (out,)  # noqa: RUF005
    return higher, kept, weight, new


@triton.jit
def _channels(loaded, j: tl.constexpr, use: tl.constexpr, APART: tl.constexpr, dtype: tl.constexpr):
    """Channels [tokens, channels / APART] from `j` on, every `APART`-th."""
    return loaded.to(dtype) if APART == 1 else _byte(loaded, j, use, dtype)
