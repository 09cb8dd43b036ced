# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Which pairs (token, choice) one program of the experts works for: up to 8 of one expert.

A pair's number is token * K + choice. The 8 are the columns of one tensor-core tile, so that an
expert's matrices are read once for all of them.

Up to 8 tokens need no list: a program has a pair, and looks for the others among all, while its
first weights are under way. More tokens are listed by a kernel of their own, without gaps: at 128
tokens about 470 of 1,280 pairs lead a tile, and a program that must look through all pairs to learn
that it has nothing to do takes as long as one that reads weights. Above `limits.MOST_FEW` tokens
tiles are larger, and others list them (`triton_many_lists.py`).
"""

import triton
import triton.language as tl


@triton.jit
def members(ids, expert, pair, T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Whether `pair` is the first of its expert, and the pair of each of 8 tokens, -1 where none.

    Args:
        ids: experts [T, K], distinct within a token.
        expert: of the pair.
        pair: token * K + choice.
        T: tokens, up to 8.
        K: choices of a token.
        KP: K rounded up to a power of two.
    """
    t = tl.arange(0, 8)
    j = tl.arange(0, KP)
    there = (t[:, None] < T) & (j[None, :] < K)
    chosen = tl.load(ids + t[:, None] * K + j[None, :], there, -1)
    # a token's choice of the expert, from 1; 0 if it has not chosen it
    choice = tl.sum(tl.where(chosen == expert, j[None, :] + 1, 0), 1)
    mine = (choice > 0).to(tl.int32)
    pairs = tl.where(choice > 0, t * K + choice - 1, -1)
    return tl.sum(tl.where(t < pair // K, mine, 0), 0) == 0, pairs


@triton.jit
def group_kernel(
    ids,
    experts,
    pairs,
    T: tl.constexpr,
    K: tl.constexpr,
    TP: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TILES: tl.constexpr,
    EACH: tl.constexpr,
    EACHP: tl.constexpr,
):
    """Tiles in the order of experts, of an expert's pairs in the order of tokens: grid (E,).

    A program writes the tiles of its expert; the tiles that are left over get the expert -1.

    Args:
        ids: experts [T, K], distinct within a token.
        experts: of each tile [TILES].
        pairs: of each tile [TILES, 8], -1 where none.
        T: tokens.
        K: choices of a token.
        TP: T rounded up to a power of two.
        KP: K rounded up to a power of two.
        E: experts.
        EP: E + 1 rounded up to a power of two.
        TILES: the most that there can be.
        EACH: tiles over programs, rounded up.
        EACHP: EACH rounded up to a power of two.
    """
    e = tl.program_id(0)
    t = tl.arange(0, TP)
    j = tl.arange(0, KP)
    there = (t[:, None] < T) & (j[None, :] < K)
    chosen = tl.load(ids + t[:, None] * K + j[None, :], there, E)
    counts = tl.histogram(tl.reshape(chosen, (TP * KP,)), EP)
    bins = tl.arange(0, EP)
    tiles = tl.where(bins < E, (counts + 7) // 8, 0)
    first = tl.sum(tl.where(bins < e, tiles, 0), 0)
    own = tl.sum(tl.where(bins == e, tiles, 0), 0)
    count = tl.sum(tl.where(bins == e, counts, 0), 0)
    choice = tl.sum(tl.where(chosen == e, j[None, :] + 1, 0), 1)
    mine = (choice > 0).to(tl.int32)
    rank = tl.cumsum(mine, 0) - mine
    tl.store(pairs + first * 8 + rank, t * K + choice - 1, choice > 0)
    rest = count + tl.arange(0, 8)
    tl.store(pairs + first * 8 + rest, tl.full((8,), -1, tl.int32), rest < own * 8)
    tl.store(experts + first + t, tl.zeros((TP,), tl.int32) + e, t < own)
    i = tl.arange(0, EACHP)
    spare = e * EACH + i
    unused = (spare >= tl.sum(tiles, 0)) & (spare < TILES) & (i < EACH)
    tl.store(experts + spare, tl.full((EACHP,), -1, tl.int32), unused)
