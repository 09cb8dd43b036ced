# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""What the Mosaic kernel of the experts is given, and the sum of what it makes.

A tile is an expert with 8 columns. Of up to 8 tokens these are the tokens, whether they chose it or
not, so that nothing is gathered: absent columns cost nothing beside 64 rows of weights. Of more
tokens they are up to 8 that chose it.
"""

import triton
import triton.language as tl

TOKENS = tl.constexpr(8)


@triton.jit
def _list(
    ids,
    experts,
    places,
    count,
    T: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Distinct experts in the order of their first pairs, and each pair's place in a column."""
    p = tl.arange(0, P)
    own = tl.load(ids + p, p < T * K, EMPTY)
    there = (own[:, None] == own[None, :]) & (own[:, None] < EMPTY)
    first = tl.min(tl.where(there, p[None, :], P), 1)
    leads = (tl.min(tl.where(there, p[:, None], P), 0) == p).to(tl.int32)
    rank = tl.sum(tl.where(p[None, :] <= first[:, None], leads[None, :], 0), 1) - 1
    tl.store(places + p, rank * TOKENS + p // K, p < T * K)
    tl.store(experts + rank, own, first == p)
    tl.store(count, tl.sum(leads, 0))


@triton.jit
def scale_of(largest):
    """The power of two by which numbers up to `largest` are multiplied to go into float16."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    power = tl.minimum(tl.maximum(14 - exponent, -114), 126)
    up = ((power + 127) << 23).to(tl.float32, bitcast=True)
    down = ((127 - power) << 23).to(tl.float32, bitcast=True)
    return up, down


@triton.jit
def _column(c, FORM: tl.constexpr):
    """Place of column `c` in the order in which lanes hold weights."""
    if FORM == "fp8":
        t, i, h, pair = c % 64 // 16, c % 16 // 4, c % 4 // 2, c % 2
        c = c // 64 * 64 + i * 16 + h * 8 + t * 2 + pair
    return c


@triton.jit
def put(value, to, scale, c, D: tl.constexpr, FORM: tl.constexpr):
    """Stores a token's columns as the products read them."""
    if FORM == "fp8":
        value = value.to(tl.float32)
        up, down = scale_of(tl.max(tl.abs(value), 0))
        value = (value * up).to(tl.float16)
        tl.store(scale, down)
    tl.store(to + _column(c, FORM), value, c < D)


@triton.jit
def tiles_kernel(
    ids,
    x,
    experts,
    places,
    count,
    columns,
    scales,
    T: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FORM: tl.constexpr,
):
    """Tiles by program 0; of FP8 program 1 + t makes token t's column: grid (9,) or (1,).

    Args:
        ids: experts [T, K].
        x: tokens [T, D].
        experts: of each tile [T K]; only the first `count` are written.
        places: tile * 8 + column of each pair [T, K].
        count: of tiles [1].
        columns: float16 [8, D]: x times a power of two, in the order of `_column`.
        scales: float32 [8], by which they are multiplied to be x.
        T: tokens, up to 8.
        K: choices of a token.
        P: T K rounded up to a power of two.
        E: experts.
        D: hidden size.
        DP: D rounded up to a power of two.
        FORM: stored form, `fp8` or another for bfloat16.
    """
    program = tl.program_id(0)
    if program == 0:
        _list(ids, experts, places, count, T, K, P, E)
    else:
        t = program - 1
        c = tl.arange(0, DP)
        value = tl.load(x + t * D + c, (c < D) & (t < T), 0.0)
        put(value, columns + t * D, scales + t, c, D, FORM)


@triton.jit
def gathered_kernel(
    ids,
    x,
    experts,
    places,
    count,
    columns,
    scales,
    T: tl.constexpr,
    K: tl.constexpr,
    TP: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FORM: tl.constexpr,
):
    """Tiles of 8 pairs, in the order of experts and tokens, with their columns: grid (E,).

    Args:
        ids: experts [T, K], distinct within a token.
        x: tokens [T, D].
        experts: of each tile; only the first `count` are written.
        places: tile * 8 + column of each pair [T, K].
        count: of tiles [1].
        columns: [tiles, 8, D], of pairs alone: x, or of FP8 as of `tiles_kernel`.
        scales: of FP8, float32 [tiles, 8].
        T: tokens.
        K: choices of a token.
        TP: T rounded up to a power of two.
        KP: K rounded up to a power of two.
        E: experts.
        EP: E + 1 rounded up to a power of two.
        D: hidden size.
        DP: D rounded up to a power of two.
        FORM: stored form, `fp8` or another for bfloat16.
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
    number = tl.sum(tl.where(bins == e, counts, 0), 0)
    if e == 0:
        tl.store(count, tl.sum(tiles, 0))
    choice = tl.sum(tl.where(chosen == e, j[None, :] + 1, 0), 1)
    mine = (choice > 0).to(tl.int32)
    rank = tl.cumsum(mine, 0) - mine
    tl.store(places + t * K + choice - 1, first * 8 + rank, choice > 0)
    tl.store(experts + first + t, tl.zeros((TP,), tl.int32) + e, t < own)
    c = tl.arange(0, DP)
    for i in range(number):
        token = tl.sum(tl.where((rank == i) & (choice > 0), t, 0), 0)
        value = tl.load(x + token * D + c, c < D, 0.0)
        place = first * 8 + i
        put(value, columns + place * D, scales + place, c, D, FORM)


@triton.jit
def sum_kernel(
    parts,
    places,
    weights,
    own,
    logit,
    out,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """out[t], the weighted sum of token t's parts in the order of choices: grid (D/BLOCK, T).

    Args:
        parts: float32 [tiles, 8, D].
        places: of `tiles_kernel`.
        weights: of each choice [T, K].
        own: the shared expert's part [T, D].
        logit: of its share [T].
        out: [T, D].
        K: choices of a token.
        D: hidden size.
        BLOCK: columns of a program.
        SHARED: whether there is a shared expert.
    """
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j)
        share = tl.load(weights + token * K + j)
        y += share * tl.load(parts + place * D + at, at < D, 0.0)
    if SHARED:
        share = tl.sigmoid(tl.load(logit + token))
        y += share * tl.load(own + token * D + at, at < D, 0.0)
    tl.store(out + token * D + at, y.to(out.dtype.element_ty), at < D)
