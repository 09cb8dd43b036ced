# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Selection of blocks on a GPU: one program per row, counting in shared memory; exact.

Bytes are nothing (66 kB a row of 14k blocks); what takes time is that every step of a selection
waits for the one before and for all warps, and that one processor issues all instructions. So there
are few steps, and few instructions a score:

1. Groups of consecutive blocks send their best score, which `index_score` gives. What is among the
   `blocks` best lies in one of the `blocks` best groups (ties to the lower group, as ties go to the
   lower block), so that many groups, or some more, hold all that can be chosen.
2. Only their members take part in the selection proper.

A threshold is found by a count in 2,048 bins of equal width. They begin not at the lowest score but
at a bound that costs one step: cut the row into as many parts as blocks are chosen; each part's
best is no less than the least of them. A sixth of random scores lie above it, within two octaves,
so that the bin of the threshold holds a few. If they are too many to be taken together, its span is
divided next, down to single scores. Ties beyond the count are cut in the order of the blocks.

Keys order as the scores do. A thread holds keys of blocks that follow one another, in fours of 16
bytes, so that places of what is taken are a sum over threads and otherwise its own affair. Numbers
of groups and blocks taken go through shared memory to close the gaps, and out as whole lines.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.index_topk.limits import LONG, SHORT, group_of
from qwen4jax.pallas.index_topk.triton_shared import (
    BINS,
    COUNTS,
    LISTED,
    WORDS,
    clear,
    count,
)
from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.pallas.triton_shared import allocate, get, get_4, put, put_if

# of programs with groups of 4 or 8, and of those with groups of 16: up to 16 keys a thread
_WARPS, _LONG_WARPS = 8, 16

_LOG = tl.constexpr(BINS.value.bit_length() - 1)
# magnitude of infinity, more than any count and bin together
_INFINITY = tl.constexpr(0x7F800000)
_BEYOND = tl.constexpr(0x7FFFFFFF)


def index_topk(scores, index, best=None, *, blocks, ratio):
    """See `qwen4jax.pallas.index_topk`."""
    rows, places, width = scores.shape
    size = group_of(width)
    threads = 32 * (_LONG_WARPS if size == LONG else _WARPS)
    room = max(threads, triton.next_power_of_2(blocks))
    return triton_call(
        scores,
        index,
        # a pointer parameter that is not used needs some array
        scores if best is None else best,
        kernel=_index_topk,
        name=f"index_topk_{rows}x{places}x{width}",
        out=jax.ShapeDtypeStruct((rows, places, blocks * ratio + ratio - 1), jnp.int32),
        grid=(rows * places,),
        num_warps=threads // 32,
        num_stages=1,
        WIDTH=width,
        BLOCKS=blocks,
        RATIO=ratio,
        MEMBERS=triton.next_power_of_2(ratio),
        TOKENS=triton.next_power_of_2(blocks * ratio),
        FOURS=max(1, triton.next_power_of_2(-(-width // size)) // (4 * threads)),
        ROOM=room,
        SIZE=size,
        # more groups than blocks where their members are few: it saves steps
        MOST=2 * room if size == SHORT else room,
        THREADS=threads,
        GIVEN=0 if best is None else best.shape[-1],
    )


@triton.jit
def _index_topk(
    scores_ptr,
    index_ptr,
    best_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    FOURS: tl.constexpr,
    ROOM: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    THREADS: tl.constexpr,
    GIVEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores = scores_ptr + row * WIDTH
    out = out_ptr + row * (BLOCKS * RATIO + RATIO - 1)
    groups, best = (), ()
    for i in tl.static_range(FOURS):
        group = (tl.arange(0, THREADS) * (4 * FOURS) + 4 * i)[:, None] + tl.arange(0, 4)[None, :]
        # does not wait for the index: what is beyond is -inf
        if GIVEN > 0:
            ptr = best_ptr + row * GIVEN + group
            one = tl.load(ptr, mask=group < GIVEN, other=float("-inf"))
        else:
            one = _best_of(scores, group, WIDTH, SIZE)
        groups, best = groups + (group,), best + (one,)  # noqa: RUF005
    index = tl.load(index_ptr + row)
    memory = allocate(WORDS)
    clear(memory, THREADS)
    clear(memory + 4 * COUNTS, THREADS)
    complete = (index + 1) // RATIO
    member = tl.arange(0, MEMBERS)
    tail = complete * RATIO + member
    tail = tl.where(tail <= index, tail, -1)
    tl.store(out + BLOCKS * RATIO + member, tail, mask=member < RATIO - 1)
    token = tl.arange(0, TOKENS)
    if complete <= BLOCKS:
        every = tl.where(token < complete * RATIO, token, -1)
        tl.store(out + token, every, mask=token < BLOCKS * RATIO)
    else:
        leaders = ()
        for i in tl.static_range(FOURS):
            leaders = leaders + (_key(best[i]),)  # noqa: RUF005
        chosen = memory + 4 * (2 * COUNTS + LISTED // 2)
        _select(
            scores,
            groups,
            leaders,
            (complete + SIZE - 1) // SIZE,
            memory,
            chosen,
            WIDTH,
            BLOCKS,
            ROOM,
            SIZE,
            MOST,
            THREADS,
        )
        block = get(chosen, token // RATIO)
        tl.store(out + token, block * RATIO + token % RATIO, mask=token < BLOCKS * RATIO)


@triton.jit
def _best_of(scores, group, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Best score of each group of `SIZE` blocks."""
    best = tl.full(group.shape, float("-inf"), tl.float32)
    for i in tl.static_range(SIZE):
        block = group * SIZE + i
        score = tl.load(scores + block, mask=block < WIDTH, other=float("-inf"))
        best = tl.maximum(best, score)
    return best


@triton.jit
def _select(
    scores,
    groups,
    leaders,
    total,
    memory,
    chosen,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROOM: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Lists in `chosen` the `BLOCKS` best of more blocks, given the best key of `total` groups."""
    listed = memory + 4 * (2 * COUNTS)
    low, last = _ends(leaders, ROOM, THREADS)
    if total > MOST:
        low, taken, over = _threshold(leaders, low, last, memory, BLOCKS, MOST, THREADS)
        _list(leaders, groups, low, taken, over, listed, MOST)
    else:
        every = tl.arange(0, MOST)
        put(listed, every, every)
        taken = total
    tl.debug_barrier()

    EACH: tl.constexpr = MOST // THREADS
    keys, blocks = (), ()
    for i in tl.static_range(EACH):
        at = tl.arange(0, THREADS) * EACH + i
        group = tl.where(at < taken, get(listed, at), 0)
        for j in tl.static_range(SIZE // 4):
            block = (group * SIZE + 4 * j)[:, None] + tl.arange(0, 4)[None, :]
            there = (at < taken)[:, None] & (block < WIDTH)
            score = tl.load(scores + block, mask=there, other=float("-inf"))
            keys, blocks = keys + (score,), blocks + (block,)  # noqa: RUF005
    scored, keys = keys, ()
    for i in tl.static_range(EACH * SIZE // 4):
        # NaN need not be its group's best
        keys = keys + (tl.minimum(_key(scored[i]), last),)  # noqa: RUF005
    if total <= MOST:
        low, last = _ends(keys, ROOM, THREADS)
    counts = memory + 4 * COUNTS
    low, taken, over = _threshold(keys, low, last, counts, BLOCKS, BLOCKS, THREADS)
    _list(keys, blocks, low, taken, over, chosen, BLOCKS)
    tl.debug_barrier()


@triton.jit
def _key(score):
    """Integers that order as the scores do, -0 as +0, and NaN as infinity."""
    bits = score.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, _INFINITY)
    return tl.where(bits < 0, -size, size)


@triton.jit
def _ends(keys, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """A bound that `PARTS` keys or more reach, and the highest key."""
    FOURS: tl.constexpr = len(keys)
    # parts of a thread, and of four keys
    OWN: tl.constexpr = PARTS // THREADS
    CUT: tl.constexpr = max(1, OWN // FOURS)
    low, high = tl.full((THREADS,), _INFINITY, tl.int32), tl.full((THREADS,), -_INFINITY, tl.int32)
    part = high
    for i in tl.static_range(FOURS):
        if CUT > 1:
            best = tl.max(tl.reshape(keys[i], (THREADS, CUT, 4 // CUT)), 2)
            low = tl.minimum(low, tl.min(best, 1))
            high = tl.maximum(high, tl.max(best, 1))
        else:
            part = tl.maximum(part, tl.max(keys[i], 1))
            if (i + 1) % (FOURS // OWN) == 0:
                low, high = tl.minimum(low, part), tl.maximum(high, part)
                part = tl.full((THREADS,), -_INFINITY, tl.int32)
    # both in one reduction: each is a wait for all warps
    side = tl.arange(0, 2)
    ends = tl.max(tl.where(side[:, None] == 0, -low[None, :], high[None, :]), 1)
    low = -tl.max(tl.where(side == 0, ends, -_INFINITY), 0)
    return low, tl.max(tl.where(side == 1, ends, -_INFINITY), 0)


@triton.jit
def _threshold(
    keys,
    low,
    high,
    memory,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    THREADS: tl.constexpr,
):
    """The key that the best are at or above, how many they are, and how many lie above its span.

    `LEAST` to `MOST` keys reach it, or, where ties allow no such count, more, and fewer than
    `LEAST` lie above it.

    There are up to 2**14 keys, of which at least `LEAST` reach `low`, and none is above `high`.
    The bins in `memory` are zero.
    """
    EACH: tl.constexpr = BINS // THREADS
    thread = tl.arange(0, THREADS)
    taken, over = 0, 0
    more = low <= high
    while more:
        # what lies in the lowest bin below `low` takes part
        shift = tl.maximum(_bits((high - low).to(tl.uint32, bitcast=True)) - _LOG, 0)
        for i in tl.static_range(len(keys)):
            number = (high - keys[i]).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
            count(memory, tl.minimum(number, BINS).to(tl.int32))
        tl.debug_barrier()
        found = ()
        for i in tl.static_range(EACH // 4):
            a, b, c, d = get_4(memory, thread * EACH + 4 * i)
            found = found + (a, b, c, d)  # noqa: RUF005
        own = found[0]
        for i in tl.static_range(1, EACH):
            own += found[i]
        so_far = over + tl.cumsum(own, 0) - own
        # the first bin with which there are enough, and how many there are then
        first = tl.full((THREADS,), _BEYOND, tl.int32)
        for i in tl.static_range(EACH):
            so_far += found[i]
            both = (so_far << _LOG) | (thread * EACH + i)
            first = tl.minimum(first, tl.where(so_far >= LEAST, both, _BEYOND))
        first = tl.min(first, 0)
        number, taken = first & (BINS - 1), first >> _LOG
        over = taken - get(memory, number)
        high -= number << shift
        low = high - ((1 << shift) - 1)
        more = (taken > MOST) & (low < high)
        if more:
            tl.debug_barrier()
            clear(memory, THREADS)
            tl.debug_barrier()
    return low, taken, over


@triton.jit
def _bits(number):
    """Bits of an unsigned number, or one more: the exponent of the float that it rounds to."""
    exponent = number.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.maximum(exponent - 126, 0)


@triton.jit
def _list(keys, values, bound, taken, over, memory, MOST: tl.constexpr):
    """Lists the values of the keys at or above a bound in their order.

    If they are more than `MOST`, those above, which are `over`, and the first of those at it.
    """
    if taken > MOST:
        own = tl.zeros((keys[0].shape[0],), tl.int32)
        for i in tl.static_range(len(keys)):
            own += tl.sum(_above_and_at(keys[i], bound), 1)
        before = tl.cumsum(own, 0) - own
        for i in tl.static_range(len(keys)):
            both = _above_and_at(keys[i], bound)
            so_far = before[:, None] + tl.cumsum(both, 1)
            ties = so_far & 0xFFFF
            take = (keys[i] > bound) | ((keys[i] == bound) & (ties <= MOST - over))
            place = (so_far >> 16) + tl.minimum(ties, MOST - over) - 1
            put_if(memory, place, values[i], take)
            before += tl.sum(both, 1)
    else:
        own = tl.zeros((keys[0].shape[0],), tl.int32)
        for i in tl.static_range(len(keys)):
            own += tl.sum((keys[i] >= bound).to(tl.int32), 1)
        before = tl.cumsum(own, 0) - own
        for i in tl.static_range(len(keys)):
            take = keys[i] >= bound
            place = before[:, None] + tl.cumsum(take.to(tl.int32), 1) - 1
            put_if(memory, place, values[i], take)
            before += tl.sum(take.to(tl.int32), 1)


@triton.jit
def _above_and_at(key, bound):
    """1 << 16 for keys above a bound, 1 for those at it."""
    return tl.where(key > bound, 1 << 16, (key == bound).to(tl.int32))
