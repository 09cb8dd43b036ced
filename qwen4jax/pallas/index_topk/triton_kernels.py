"""Selection of blocks on a GPU: one program per row, exact for any scores.

Bytes: the row's valid scores once and 2,051 indices out, 66 kB for 14k blocks, 0.02 us of
bandwidth; what takes time is that every step of a selection waits for the one before. So:

1. Groups of consecutive blocks send their best score. What is among the `blocks` best lies in one
   of the `blocks` best groups (ties to the lower group, as ties go to the lower block), so that
   many groups, or a few more where that takes fewer steps, hold all that can be chosen.
2. The groups' numbers go through memory to close the gaps (Triton has no other scatter), and only
   their members take part in the selection proper.

A threshold is found by counting: four guesses a pass, their counts in one 64-bit sum, over keys
that order as the scores do. The search spans the keys that there are rather than 32 bits and ends
as soon as a count fits, after 1 or 2 passes for groups and about 6 for blocks where scores are
spread, 15 at the most. Ties beyond the count are cut in the order of the blocks.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.index_topk.limits import GROUPS, LONG, SHORT
from qwen4jax.pallas.triton_call import triton_call

# measured at 4 rows of 16,384 blocks: 17.0 us, with 4, 16 and 32 warps 23.4, 18.3 and 23.5 us
_WARPS = 8

# below the key of any score
_NONE = tl.constexpr(-(2**31))


def index_topk(scores, index, best=None, *, blocks, ratio):
    """See `qwen4jax.pallas.index_topk`."""
    rows, places, width = scores.shape
    room = max(16, triton.next_power_of_2(blocks))
    groups = min(GROUPS, max(16, triton.next_power_of_2(-(-width // SHORT))))
    long = width > groups * SHORT
    # a pointer parameter that is not used needs some array
    given = best if best is not None and long else scores
    out, _ = triton_call(
        scores,
        index,
        given,
        kernel=_index_topk,
        name=f"index_topk_{rows}x{places}x{width}",
        out=(
            jax.ShapeDtypeStruct((rows, places, blocks * ratio + ratio - 1), jnp.int32),
            jax.ShapeDtypeStruct((rows * places, 2 * room), jnp.int32),
        ),
        grid=(rows * places,),
        num_warps=_WARPS,
        num_stages=1,
        WIDTH=width,
        BLOCKS=blocks,
        RATIO=ratio,
        MEMBERS=triton.next_power_of_2(ratio),
        GROUPS=groups,
        ROOM=room,
        SHORT=SHORT,
        LONG=LONG if long else 0,
        GIVEN=given is best,
    )
    return out


@triton.jit
def _index_topk(
    scores_ptr,
    index_ptr,
    best_ptr,
    out_ptr,
    scratch_ptr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    GIVEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row)
    complete = (index + 1) // RATIO
    scores = scores_ptr + row * WIDTH
    out = out_ptr + row * (BLOCKS * RATIO + RATIO - 1)
    scratch = scratch_ptr + row * (2 * ROOM)

    member = tl.arange(0, MEMBERS)
    tail = complete * RATIO + member
    tail = tl.where(tail <= index, tail, -1)
    tl.store(out + BLOCKS * RATIO + member, tail, mask=member < RATIO - 1)
    if complete <= BLOCKS:
        block = tl.arange(0, ROOM)
        _put(out, block, block, block < BLOCKS, complete, RATIO, MEMBERS)
    elif complete <= GROUPS * SHORT:
        leader = _best_of(scores, tl.arange(0, GROUPS), complete, SHORT, 0, SHORT)
        _select(scores, leader, complete, out, scratch, BLOCKS, RATIO, MEMBERS, SHORT, 2 * ROOM)
    elif LONG > 0:
        group = tl.arange(0, GROUPS)
        if GIVEN:
            best = best_ptr + row * ((WIDTH + LONG - 1) // LONG)
            there = group * LONG < complete
            leader = _key(tl.load(best + group, mask=there, other=0.0), there)
        else:
            leader = _best_of(scores, group, complete, LONG, 0, SHORT)
            # 16 bytes a thread and load
            for first in tl.static_range(SHORT, LONG, SHORT):
                more = _best_of(scores, group, complete, LONG, first, SHORT)
                leader = tl.maximum(leader, more)
        _select(scores, leader, complete, out, scratch, BLOCKS, RATIO, MEMBERS, LONG, ROOM)


@triton.jit
def _best_of(scores, group, complete, SIZE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Highest key of each group of `SIZE` blocks, among its members from `FIRST` on."""
    block = group[:, None] * SIZE + FIRST + tl.arange(0, COUNT)[None, :]
    valid = block < complete
    return tl.max(_key(tl.load(scores + block, mask=valid, other=0.0), valid), 1)


@triton.jit
def _select(
    scores,
    leader,
    complete,
    out,
    scratch,
    BLOCKS: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Writes the `BLOCKS` best of more blocks, given each group's best key."""
    count = (complete + SIZE - 1) // SIZE
    least = tl.min(tl.where(leader == _NONE, 0x7FFFFFFF, leader), 0).to(tl.int64)
    high = tl.max(leader, 0).to(tl.int64) + 1
    # fewer groups than blocks hold them all
    if count > MOST:
        bound = _threshold(leader, least, high, count, BLOCKS, MOST)
    else:
        bound = least.to(tl.int32)
    group = tl.arange(0, leader.shape[0])
    take, place, taken = _places(leader, bound, MOST)
    tl.store(scratch + place, group, mask=take)
    # the groups' numbers are read by other threads than wrote them
    tl.debug_barrier()

    candidate = tl.arange(0, MOST * SIZE)
    there = candidate // SIZE < taken
    block = tl.load(scratch + candidate // SIZE, mask=there, other=0) * SIZE + candidate % SIZE
    there = there & (block < complete)
    key = _key(tl.load(scores + block, mask=there, other=0.0), there)
    if count >= BLOCKS:
        # that many groups' best reach the bound
        low = bound.to(tl.int64)
    else:
        low = tl.min(tl.where(there, key, 0x7FFFFFFF), 0).to(tl.int64)
    count = tl.sum((key >= low.to(tl.int32)).to(tl.int32), 0)
    bound = _threshold(key, low, high, count, BLOCKS, BLOCKS)
    take, place, taken = _places(key, bound, BLOCKS)
    _put(out, block, place, take, complete, RATIO, MEMBERS)


@triton.jit
def _key(score, valid):
    """Integers that order as the scores do, -0 as +0; below them all where not valid."""
    score = tl.where(score == 0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE)


@triton.jit
def _threshold(key, low, high, count, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The key that the best are at or above.

    `LEAST` to `MOST` keys reach it, or, where ties allow no such count, `LEAST` reach it and fewer
    lie above.

    There are up to 2**14 keys, of which `count`, at least `LEAST`, reach `low`, and none `high`.
    """
    while (count > MOST) & (high - low > 1):
        span = high - low
        first = (_reaches(key, _guess(low, span, 2)) << 16) + _reaches(key, _guess(low, span, 1))
        last = (_reaches(key, _guess(low, span, 4)) << 16) + _reaches(key, _guess(low, span, 3))
        counts = tl.sum((last.to(tl.int64) << 32) + first.to(tl.int64), 0)
        # counts fall from guess to guess: so many of them are still reached by enough
        good = ((counts & 0xFFFF) >= LEAST).to(tl.int32)
        good += (((counts >> 16) & 0xFFFF) >= LEAST).to(tl.int32)
        good += (((counts >> 32) & 0xFFFF) >= LEAST).to(tl.int32)
        good += (((counts >> 48) & 0xFFFF) >= LEAST).to(tl.int32)
        at_good = (counts >> (16 * tl.maximum(good - 1, 0)).to(tl.int64)) & 0xFFFF
        count = tl.where(good > 0, at_good.to(tl.int32), count)
        high = tl.minimum(_guess(low, span, good + 1), high)
        low = _guess(low, span, good)
    return low.to(tl.int32)


@triton.jit
def _guess(low, span, i):
    """The `i`-th of four keys inside of a span, `low` for 0: i / 5 of it, rounded up."""
    return low + ((i * span * 13108 + 65535) >> 16)


@triton.jit
def _reaches(key, guess):
    return (key >= guess.to(tl.int32)).to(tl.int32)


@triton.jit
def _places(key, bound, MOST: tl.constexpr):
    """Which keys are taken, the place of each among those, and how many there are.

    All above `bound`, and of those at it the first ones, up to `MOST` together.
    """
    above, at = key > bound, (key == bound) & (key != _NONE)
    both = (above.to(tl.int32) << 16) + at.to(tl.int32)
    total = tl.sum(both, 0)
    room = MOST - (total >> 16)
    so_far = tl.cumsum(both, 0)
    ties = tl.minimum(so_far & 0xFFFF, room)
    take = above | (at & ((so_far & 0xFFFF) <= room))
    return take, (so_far >> 16) + ties - 1, (total >> 16) + tl.minimum(total & 0xFFFF, room)


@triton.jit
def _put(out, block, place, take, complete, RATIO: tl.constexpr, MEMBERS: tl.constexpr):
    """Writes the tokens of the blocks taken; -1 for blocks that are not complete."""
    member = tl.arange(0, MEMBERS)[None, :]
    token = tl.where(block < complete, block * RATIO, -1)[:, None]
    token = tl.where(token >= 0, token + member, -1)
    here = out + place[:, None] * RATIO + member
    tl.store(here, token, mask=take[:, None] & (member < RATIO))
