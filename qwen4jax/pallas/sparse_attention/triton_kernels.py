# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
"""Attention to selected tokens on a GPU: split along the selection, merged in a fixed order.

Bytes: 1 kB of keys and values for each token and kv head of 256 channels in bfloat16. The 2,051
tokens of a query with 2 kv heads are 4.2 MB, 1 us at 4.3 TB/s, those of 4 queries 16.8 MB, 3.9 us;
half of it in e4m3. A selection is split until the GPU is full and all that is read is under way at
once: slot numbers, then keys and values together, by loads into registers where a split has one
tile. The entries beyond the last full tile (an open block has 3) are a split of their own, for
which no other waits. With many queries there is one split each, which needs no second kernel.

A token's key of one head is one run of memory and blocks of 4 tokens are contiguous; the heads of a
token are read by neighbouring programs, close in time. Products take bfloat16, with the weights of
the sum over values in two bfloat16 parts, so that it is a float32 sum to 2**-17.

Words of four e4m3 channels go to the product's registers as they are: a register there holds two
tokens or two words, whose channels `j` become two bfloat16 numbers by five instructions. So there
are four products, of every fourth channel, and the results are put side by side at the end.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.sparse_attention.triton_merge import merge
from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.span import physical

# (query, kv head) pairs up to which a selection is split so often, in tiles of so many tokens
SPLITS = ((2, 64, 32), (8, 32, 64), (16, 16, 32), (32, 8, 32), (64, 4, 32), (128, 2, 32))
# one split, in tiles of so many tokens
_TILE, _WARPS = 32, 4
# of the loop over tiles: slot numbers are two ahead, keys and values one, or two of half the bytes
_STAGES, _E4M3_STAGES = 5, 7
# pairs above which a program looks where its selection ends: the first tokens of a prompt have few
_MANY = 512


# The bits of e4m3, put where those of bfloat16 of the same sign and mantissa are, are a bfloat16
# 2**-120 times the number, subnormals too. The other factors of a product make up for half of it.
_LIFT = 2.0**60


def _byte_of(j, use):
    """PTX: channels `j` of two words of e4m3 as bfloat16 times 2**-120, but NaN becomes a number.

    The uses differ in their text: of a result that two products take, the compiler moves one to the
    products' registers and sends the other through shared memory.
    """
    return (
        f"{{ .reg .b32 t, u; prmt.b32 t, $1, $2, {(4 + j) << 12 | j << 4}; {' ' * use}"
        "shr.u32 u, t, 4; and.b32 u, u, 0x07f007f0; and.b32 t, t, 0x80008000; or.b32 $0, u, t; }"
    )


# for keys and the first product of values, and for the second
_BYTE = tl.constexpr(tuple(_byte_of(j, use) for use in range(2) for j in range(4)))


def sparse_attention(query, gate, key, value, slots, page_table=None):
    """See `qwen4jax.pallas.sparse_attention`."""
    rows, places, heads, channels = query.shape
    kv_heads, width = key.shape[2], slots.shape[-1]
    pairs = rows * places * kv_heads
    splits, tile = next((s[1:] for s in SPLITS if pairs <= s[0]), (1, _TILE))
    full, rest = divmod(width, tile)
    each = max(1, -(-full // splits))
    parts = -(-full // each)
    # alone, the entries beyond are its last tile
    whole = parts <= 1
    if each > 1 and page_table is not None:
        # a page number between slot and key is one load too many for the loop's pipeline
        slots, page_table = physical(page_table, slots, key.shape[1]), None
    total = 1 if whole else parts + (rest > 0)
    stages = _E4M3_STAGES if key.dtype == jnp.float8_e4m3fn else _STAGES
    lifted = key.dtype == jnp.float8_e4m3fn and query.dtype == jnp.bfloat16
    shape = jax.ShapeDtypeStruct
    out = shape((rows, places, heads * channels), query.dtype)
    summed = shape((rows * places, heads, total, channels), jnp.float32)
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
        grid=(pairs, total),
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
        LIFT=_LIFT if lifted else 1.0,
        TILE=tile,
        FULL=full,
        EACH=each,
        REST=max(16, triton.next_power_of_2(rest)) if rest else 0,
        REST_PART=0 if whole else parts,
        WHOLE=whole,
        ONCE=each == 1 and not whole,
        ENDS=whole and each > 1 and pairs > _MANY,
        STAGES=stages if each > 1 else 1,
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
    LIFT: tl.constexpr,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    EACH: tl.constexpr,
    REST: tl.constexpr,
    REST_PART: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
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
    column = tl.arange(0, DEPTH // APART)
    at = head[:, None] * CHANNELS + (APART * column)[None, :]
    there = (member < SHARED)[:, None] & (APART * column < CHANNELS)[None, :]
    outs = ()
    for _ in tl.static_range(APART):
        outs = outs + (tl.zeros((HEADS, DEPTH // APART), tl.float32),)  # noqa: RUF005
    top = tl.full((HEADS,), float("-inf"), tl.float32)

    if ONCE:
        # all that is read is asked for before anything is waited for but slots and pages
        entry = part * TILE + tl.arange(0, TILE)
        slot = _slots(slots, table, entry, entry < WIDTH, PAGE, PAGES)
        found, spoiled = _load(key_ptr, value_ptr, slot, kv_head, column, KV_HEADS, CHANNELS)
        query = _query(query_ptr + at, there, APART)
        tl.debug_barrier()
        query = _lifted(query, LIFT, True)
        found = _from_here(found[0]), _from_here(found[1])
        top, kept, weight, outs = _attend(query, found, spoiled, slot, top, outs, SCALE, LIFT)
        total = tl.sum(weight, 1)
    else:
        query = _lifted(_query(query_ptr + at, there, APART), LIFT, False)
        # added up over tokens at the end only: it is a wait for all warps
        totals = tl.zeros((HEADS, TILE), tl.float32)
        first = part * EACH
        end = tl.minimum(first + EACH, FULL)
        if ENDS:
            end = tl.minimum(end, _tiles(slots, FULL, TILE))
        for i in tl.range(first, end, num_stages=STAGES):
            entry = i * TILE + tl.arange(0, TILE)
            slot = _slots(slots, table, entry, entry < FULL * TILE, PAGE, PAGES)
            found, spoiled = _load(key_ptr, value_ptr, slot, kv_head, column, KV_HEADS, CHANNELS)
            top, kept, weight, outs = _attend(query, found, spoiled, slot, top, outs, SCALE, LIFT)
            totals = totals * kept[:, None] + weight
        total = tl.sum(totals, 1)
        if REST > 0:
            if part == REST_PART:
                beyond = FULL * TILE + tl.arange(0, REST)
                open_slot = _slots(slots, table, beyond, beyond < WIDTH, PAGE, PAGES)
                found, spoiled = _load(
                    key_ptr, value_ptr, open_slot, kv_head, column, KV_HEADS, CHANNELS
                )
                top, kept, weight, outs = _attend(
                    query, found, spoiled, open_slot, top, outs, SCALE, LIFT
                )
                total = total * kept + tl.sum(weight, 1)

    # of nothing selected: zeros, with the weight 2**-inf
    total = tl.where(total == 0, 1.0, total)
    place = head * tl.num_programs(1) + part
    if APART == 1:
        out = outs[0] / total[:, None]
    else:
        even, odd = tl.interleave(outs[0], outs[2]), tl.interleave(outs[1], outs[3])
        out = tl.interleave(even, odd) * LIFT / total[:, None]
    channel = tl.arange(0, DEPTH)
    at = head[:, None] * CHANNELS + channel[None, :]
    there = (member < SHARED)[:, None] & (channel < CHANNELS)[None, :]
    if WHOLE:
        gate = tl.load(gate_ptr + at, mask=there, other=0.0).to(tl.float32)
        out = out * tl.sigmoid(gate)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)
    else:
        tl.store(out_ptr + place[:, None] * CHANNELS + channel[None, :], out, mask=there)
        tl.store(weight_ptr + place, top + tl.log2(total), mask=member < SHARED)


@triton.jit
def _query(ptr, there, APART: tl.constexpr):
    """Queries of each of a word's channels."""
    query = ()
    for j in tl.static_range(APART):
        query = query + (tl.load(ptr + j, mask=there, other=0.0),)  # noqa: RUF005
    return query


@triton.jit
def _lifted(query, LIFT: tl.constexpr, LATER: tl.constexpr):
    """Queries times `LIFT`."""
    out = ()
    for j in tl.static_range(len(query)):
        one = _from_here(query[j]) if LATER else query[j]
        out = out + ((one.to(tl.float32) * LIFT).to(one.dtype),)  # noqa: RUF005
    return out


@triton.jit
def _from_here(loaded):
    """What was loaded, but not used before this place in the program.

    The compiler puts a tile into shared memory, for which it waits, where it is loaded, before the
    next tile is asked for.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [loaded],
        dtype=loaded.dtype,
        is_pure=False,
        pack=32 // loaded.dtype.primitive_bitwidth,
    )


@triton.jit
def _tiles(slots, FULL: tl.constexpr, TILE: tl.constexpr):
    """Tiles up to the last one, of those that are full, in which anything is selected."""
    entry = tl.arange(0, triton.next_power_of_2(FULL * TILE))
    slot = tl.load(slots + entry, mask=entry < FULL * TILE, other=-1)
    return tl.max(tl.where(slot >= 0, entry // TILE + 1, 0), 0)


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
    """Keys and values [tokens, columns] of one head, and what says that a token is NaN.

    Zeros where there is no token. Of e4m3 a column is a word of 4 channels, see `_byte`, in which
    NaN gets lost. A NaN comes from the token's hidden state, which makes all its channels NaN: the
    first word tells, before the sign a byte of ones.
    """
    if key_ptr.dtype.element_ty == tl.float8e4nv:
        key_ptr = key_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        value_ptr = value_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        found = _rows(key_ptr, value_ptr, slot, kv_head, column, KV_HEADS, CHANNELS // 4)
        at = (tl.maximum(slot, 0).to(tl.int64) * KV_HEADS + kv_head) * (CHANNELS // 4)
        first = tl.load(key_ptr + at, mask=slot >= 0, other=0)
        spoiled = ((first & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80
    else:
        found = _rows(key_ptr, value_ptr, slot, kv_head, column, KV_HEADS, CHANNELS)
        spoiled = tl.zeros_like(slot)
    return found, spoiled


@triton.jit
def _rows(key_ptr, value_ptr, slot, kv_head, column, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The same of rows of `WIDTH` columns."""
    # one instruction an address
    at = (slot.to(tl.int64) * (KV_HEADS * WIDTH))[:, None]
    column = (kv_head * WIDTH + column)[None, :]
    # places without a token may hold NaN
    there = (slot >= 0)[:, None] & (column < (kv_head + 1) * WIDTH)
    key = tl.load(key_ptr + column + at, mask=there, other=0)
    return key, tl.load(value_ptr + column + at, mask=there, other=0)


@triton.jit
def _byte(words, j: tl.constexpr, use: tl.constexpr, dtype: tl.constexpr):
    """Channel `j` of each word of four e4m3 channels, exactly; of bfloat16 see `_byte_of`."""
    if dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(
            _BYTE[4 * use + j], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        out = (words >> (8 * j)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return out


@triton.jit
def _attend(query, found, spoiled, slot, top, outs, SCALE: tl.constexpr, LIFT: tl.constexpr):
    """Adds some tokens to a softmax under way: its maximum and the weighted values.

    Also gives what is kept of sums under the former maximum, and the tokens' weights.

    Queries and values are as many as a loaded word has channels: each has its own.
    """
    EACH: tl.constexpr = len(query)
    key, value = found
    score = tl.zeros((query[0].shape[0], slot.shape[0]), tl.float32)
    # two sums: each product waits for the one before
    other = tl.zeros_like(score)
    for j in tl.static_range(0, EACH, 2):
        channels = _channels(key, j, 0, EACH, query[0].dtype)
        score = tl.dot(query[j], tl.trans(channels), score, input_precision="ieee")
        if EACH > 1:
            channels = _channels(key, j + 1, 0, EACH, query[0].dtype)
            other = tl.dot(query[j + 1], tl.trans(channels), other, input_precision="ieee")
    if EACH > 1:
        score += other
    score = tl.where((slot >= 0)[None, :], score * (SCALE * LIFT), float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    score = tl.where((spoiled != 0)[None, :], float("nan"), score)
    # before the first token there is no maximum to subtract
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    kept = tl.exp2(top - base)
    lifted = weight * LIFT
    coarse = lifted.to(query[0].dtype)
    fine = (lifted - coarse.to(tl.float32)).to(query[0].dtype)
    new = ()
    for j in tl.static_range(EACH):
        channels = _channels(value, j, 0, EACH, query[0].dtype)
        out = tl.dot(coarse, channels, outs[j] * kept[:, None], input_precision="ieee")
        if query[0].dtype != tl.float32:
            channels = _channels(value, j, 1, EACH, query[0].dtype)
            out = tl.dot(fine, channels, out)
        new = new + (out,)  # noqa: RUF005
    return higher, kept, weight, new


@triton.jit
def _channels(loaded, j: tl.constexpr, use: tl.constexpr, EACH: tl.constexpr, dtype: tl.constexpr):
    """Channels [tokens, channels / EACH] from `j` on, every `EACH`-th."""
    return loaded.to(dtype) if EACH == 1 else _byte(loaded, j, use, dtype)
