"""Selection of blocks on a GPU: one program per row, exact for any scores.

Bytes: the row's valid scores once and 2,051 indices out, 66 kB for 14k blocks, 0.02 us of
bandwidth; what takes time is that every step of a selection waits for the one before. So:

1. Groups of consecutive blocks send their best score, which `index_score` gives. What is among the
   `blocks` best lies in one of the `blocks` best groups (ties to the lower group, as ties go to the
   lower block), so that many groups, or a few more where that takes fewer steps, hold all that can
   be chosen.
2. The groups' numbers go through memory to close the gaps (Triton has no other scatter), and only
   their members take part in the selection proper.

A threshold is found by counting how many keys, which order as the scores do, reach each of eight
bins' lower ends: a key adds 1 to a nibble for each of them (5 instructions), a thread adds up to 15
keys in one register, and two counts share a 32-bit word in the sums over warps, which the GPU adds
in one instruction. A pass takes 3 bits off the span of the keys that there are, whatever their
distribution, and the search ends as soon as a count fits. Ties beyond the count are cut in the
order of the blocks.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.index_topk.limits import LONG, SHORT, group_of
from qwen4jax.pallas.triton_call import triton_call

# of programs with groups of 4 or 8, and of those with groups of 16: up to 16 keys a thread
_WARPS, _LONG_WARPS = 8, 16

# keys that a warp loads at once, 16 bytes a lane
_LANES = 128

# below the key of any score
_NONE = tl.constexpr(-(2**31))


def index_topk(scores, index, best=None, *, blocks, ratio):
    """See `qwen4jax.pallas.index_topk`."""
    rows, places, width = scores.shape
    room = max(16, triton.next_power_of_2(blocks))
    size = group_of(width)
    warps = _LONG_WARPS if size == LONG else _WARPS
    groups = max(16, triton.next_power_of_2(-(-width // size)))
    out, _ = triton_call(
        scores,
        index,
        # a pointer parameter that is not used needs some array
        scores if best is None else best,
        kernel=_index_topk,
        name=f"index_topk_{rows}x{places}x{width}",
        out=(
            jax.ShapeDtypeStruct((rows, places, blocks * ratio + ratio - 1), jnp.int32),
            jax.ShapeDtypeStruct((rows * places, 2 * room), jnp.int32),
        ),
        grid=(rows * places,),
        num_warps=warps,
        num_stages=1,
        WIDTH=width,
        BLOCKS=blocks,
        RATIO=ratio,
        MEMBERS=triton.next_power_of_2(ratio),
        GROUPS=groups,
        ROOM=room,
        SHORT=SHORT,
        SIZE=size,
        MOST=_most(room, size),
        LANES=_LANES * warps,
        GIVEN=0 if best is None else best.shape[-1],
    )
    return out


def _most(room, size):
    """Groups kept: more than the blocks where their members are few, for it saves steps."""
    return 2 * room if size == SHORT else room


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
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    GIVEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores = scores_ptr + row * WIDTH
    out = out_ptr + row * (BLOCKS * RATIO + RATIO - 1)
    scratch = scratch_ptr + row * (2 * ROOM)
    group = tl.arange(0, GROUPS)
    # does not wait for the index: what is beyond is -inf. Without `best` nothing is read
    given = group < GIVEN
    best = tl.load(best_ptr + row * GIVEN + group, mask=given, other=0.0)
    index = tl.load(index_ptr + row)
    complete = (index + 1) // RATIO
    member = tl.arange(0, MEMBERS)
    tail = complete * RATIO + member
    tail = tl.where(tail <= index, tail, -1)
    tl.store(out + BLOCKS * RATIO + member, tail, mask=member < RATIO - 1)
    if complete <= BLOCKS:
        block = tl.arange(0, ROOM)
        _put(out, block, block, block < BLOCKS, complete, RATIO)
    elif GIVEN > 0:
        leader = _key(best, group * SIZE < complete)
        _select(scores, leader, complete, out, scratch, WIDTH, BLOCKS, RATIO, SIZE, MOST, LANES)
    elif (SIZE > SHORT) & (complete <= GROUPS * SHORT):
        leader = _best_of(scores, group, complete, SHORT, SHORT)
        _select(
            scores, leader, complete, out, scratch, WIDTH, BLOCKS, RATIO, SHORT, 2 * ROOM, LANES
        )
    else:
        leader = _best_of(scores, group, complete, SIZE, SHORT)
        _select(scores, leader, complete, out, scratch, WIDTH, BLOCKS, RATIO, SIZE, MOST, LANES)


@triton.jit
def _best_of(scores, group, complete, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Highest key of each group of `SIZE` blocks; a load has `COUNT` of a group."""
    best = tl.full((group.shape[0],), _NONE, tl.int32)
    # 16 bytes a thread and load
    for first in tl.static_range(0, SIZE, COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        block = group[:, None] * SIZE + first + tl.arange(0, COUNT)[None, :]
        valid = block < complete
        key = _key(tl.load(scores + block, mask=valid, other=0.0), valid)
        best = tl.maximum(best, tl.max(key, 1))
    return best


@triton.jit
def _select(
    scores,
    leader,
    complete,
    out,
    scratch,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
):
    """Writes the `BLOCKS` best of more blocks, given each group's best key."""
    count = (complete + SIZE - 1) // SIZE
    least, last = _span(leader, LANES)  # pyright: ignore[reportGeneralTypeIssues]
    # fewer groups than blocks hold them all
    bound = least
    if count > MOST:
        bound = _threshold(leader, least, last, BLOCKS, MOST, LANES)
    group = tl.arange(0, leader.shape[0])
    take, place, taken = _places(leader, bound, MOST)
    tl.store(scratch + place, group, mask=take)
    # the groups' numbers are read by other threads than wrote them
    tl.debug_barrier()

    chosen = tl.arange(0, MOST)
    group = tl.load(scratch + chosen, mask=chosen < taken, other=0)
    block = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    # masked by groups and not by what is complete: 16 bytes a load
    score = tl.load(scores + block, mask=(chosen < taken)[:, None] & (block < WIDTH), other=0.0)
    there = (chosen < taken)[:, None] & (block < complete)
    key = tl.reshape(_key(score, there), (MOST * SIZE,))
    block = tl.reshape(block, (MOST * SIZE,))
    low = bound
    # otherwise that many groups' best reach the bound
    if count < BLOCKS:
        low = tl.min(tl.where(key == _NONE, 0x7FFFFFFF, key), 0)
    bound = _threshold(key, low, last, BLOCKS, BLOCKS, LANES)
    take, place, taken = _places(key, bound, BLOCKS)
    _put(out, block, place, take, complete, RATIO)


@triton.jit
def _key(score, valid):
    """Integers that order as the scores do, -0 as +0; below them all where not valid."""
    score = tl.where(score == 0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE)


@triton.jit
def _span(key, LANES: tl.constexpr):
    """Lowest and highest of the valid keys, in one reduction: each is a wait for all warps."""
    WIDE: tl.constexpr = min(LANES, key.shape[0])
    key = tl.reshape(key, (key.shape[0] // WIDE, WIDE))
    low, high = tl.max(tl.where(key == _NONE, _NONE, ~key), 0), tl.max(key, 0)
    side = tl.arange(0, 2)
    ends = tl.max(tl.where(side[:, None] == 0, low[None, :], high[None, :]), 1)
    low = tl.max(tl.where(side == 0, ends, _NONE), 0)
    return ~low, tl.max(tl.where(side == 1, ends, _NONE), 0)


@triton.jit
def _threshold(key, low, last, LEAST: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr):
    """The key that the best are at or above.

    `LEAST` to `MOST` keys reach it, or, where ties allow no such count, `LEAST` reach it and fewer
    lie above.

    There are up to 2**14 keys, of which at least `LEAST` reach `low`, and none is above `last`.
    """
    # rows are registers of a thread, as loads of 16 bytes leave them, and up to 15
    WIDE: tl.constexpr = min(LANES, key.shape[0])
    key = tl.reshape(key, (key.shape[0] // WIDE, WIDE))
    field = tl.arange(0, 4)[:, None] * 4
    span = (last - low).to(tl.uint32, bitcast=True)
    # how many reach `low` is for the first pass to find
    count = MOST + 1
    while (count > MOST) & (span > 0):
        # eight bins of a power of two that cover the span
        shift = tl.maximum(_bits(span) - 3, 0)
        filled = tl.sum(_fills(key, low, shift), 0)
        # eight counts in nibbles become two in each of four words
        counts = tl.sum((filled[None, :] >> field) & 0x000F000F, 1)
        first, second = counts & 0xFFFF, counts >> 16
        # counts fall from bin to bin: so many of them are still reached by enough
        good = (first >= LEAST).to(tl.int32) + (second >= LEAST).to(tl.int32)
        skipped = (tl.sum(good, 0) - 1) << shift
        first = tl.where(first >= LEAST, first, 0x7FFFFFFF)
        second = tl.where(second >= LEAST, second, 0x7FFFFFFF)
        count = tl.min(tl.minimum(first, second), 0)
        low += skipped
        left = span - skipped.to(tl.uint32, bitcast=True)
        span = tl.minimum(left, ((1 << shift) - 1).to(tl.uint32, bitcast=True))
    return low


@triton.jit
def _fills(key, low, shift):
    """A 1 in the nibble of each bin from the first to the key's, none for a key below them."""
    place = (key - low).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    place = tl.minimum(place, 7).to(tl.int32)
    return tl.where(key >= low, 0x11111111 >> (28 - 4 * place), 0)


@triton.jit
def _bits(number):
    """Bits of an unsigned number, or one more: the exponent of the float that it rounds to."""
    exponent = number.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.maximum(exponent - 126, 0)


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
def _put(out, block, place, take, complete, RATIO: tl.constexpr):
    """Writes the tokens of the blocks taken; -1 for blocks that are not complete."""
    token = tl.where(block < complete, block * RATIO, -1)
    for member in tl.static_range(RATIO):  # pyright: ignore[reportGeneralTypeIssues]
        here = out + place * RATIO + member
        tl.store(here, tl.where(token >= 0, token + member, -1), mask=take)
