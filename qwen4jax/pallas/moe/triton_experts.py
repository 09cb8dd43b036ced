# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Routed experts for few tokens: three kernels, each distinct expert's matrices read once.

Bytes decide: at the released sizes an expert in NVFP4 is 2.76 MB, so 4 tokens (39 distinct experts)
read 108 MB, 25 us at 4.3 TB/s, of which two thirds are gate and up. A program of either product has
one expert, up to 8 of its tokens (the columns of one tensor-core tile) and some rows. It finds its
tokens itself, from the ids of all pairs (token, choice): the first pair of each 8 of an expert's
pairs does the work of the 8, the others stop. The weights' addresses hang on the expert alone: with
few tokens, when nearly every pair leads, the first loads are under way while it looks.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.moe.triton_stored import (
    NVFP4,
    PRODUCT_UP,
    lane_columns,
    load_chunk,
    load_tokens,
    next_matrix,
    product,
    scale_pointers,
    weight_pointers,
)


@triton.jit
def members(
    ids, expert, pair, T: tl.constexpr, K: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr
):
    """Whether `pair` leads a tile of its expert's pairs, and the tile: 8 pairs, -1 where none.

    Up to 8 tokens stand in the column of their number. More are ranked: an expert's pairs
    n, n + 1, ..., n + 7 in the order of tokens make a tile, for n in 0, 8, ...

    Args:
        ids: experts [T, K], distinct within a token.
        expert: of the pair.
        pair: token * K + choice.
        T: tokens.
        K: choices of a token.
        TP: T rounded up to a power of two, at least 8.
        KP: K rounded up to a power of two.
    """
    t = tl.arange(0, TP)
    j = tl.arange(0, KP)
    there = (t[:, None] < T) & (j[None, :] < K)
    chosen = tl.load(ids + t[:, None] * K + j[None, :], there, -1)
    # a token's choice of the expert, from 1; 0 if it has not chosen it
    choice = tl.sum(tl.where(chosen == expert, j[None, :] + 1, 0), 1)
    mine = (choice > 0).to(tl.int32)
    if TP > 8:
        rank = tl.cumsum(mine, 0) - mine
        first = tl.sum(tl.where(t == pair // K, rank, 0), 0)
        n = first + tl.arange(0, 8)
        here = (choice > 0)[:, None] & (rank[:, None] == n[None, :])
        pairs = tl.sum(tl.where(here, (t * K + choice)[:, None], 0), 0) - 1
        lead = first % 8 == 0
    else:
        pairs = tl.where(choice > 0, t * K + choice - 1, -1)
        lead = tl.sum(tl.where(t < pair // K, mine, 0), 0) == 0
    return lead, pairs


@triton.jit
def _load_gate_up(
    w,
    s,
    step: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
):
    """A step of the rows of gate and of up: (weights, scales, weights, scales)."""
    apart, scales_apart = next_matrix(F, D, C, L, FORM)
    gate = load_chunk(w, s, step, D, C, L, FORM, True, W)
    return gate + load_chunk(w + apart, s + scales_apart, step, D, C, L, FORM, True, W)


@triton.jit
def gate_up_kernel(
    x,
    ids,
    weight,
    scale,
    scale_2,
    hidden,
    T: tl.constexpr,
    K: tl.constexpr,
    TP: tl.constexpr,
    KP: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """hidden[p] = silu(gate x) * (up x) of pair p, 16 rows of each a program: grid (F/16, T K).

    The warps of a program split the columns, one chunk of every W each, so that it asks for whole
    rows together; their sums are added in the order of the warps.
    """
    tile, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    w = weight_pointers(weight, expert * (2 * F) + tile * 16, D, C, L, True, W)
    s = scale_pointers(scale, expert * 2, tile * 16, F, D, FORM, True, W)
    EARLY: tl.constexpr = AHEAD if TP <= 8 else 0
    early = ()
    for i in tl.static_range(EARLY):
        early = early + _load_gate_up(w, s, i, D, F, C, L, FORM, W)
    lead, pairs = members(ids, expert, pair, T, K, TP, KP)
    if lead:
        loaded = early
        for i in tl.static_range(EARLY, AHEAD):
            loaded = loaded + _load_gate_up(w, s, i, D, F, C, L, FORM, W)
        column = tl.arange(0, W)[:, None] * C
        tokens = tl.reshape(pairs[None, :] // K * D + column, (8 * W, 1))
        xs = x + tokens + lane_columns(C)[None, :]
        there = tl.reshape(tl.broadcast_to((pairs >= 0)[None, :], (W, 8)), (8 * W, 1))
        gate = tl.zeros((W, 16, 8), tl.float32)
        up = tl.zeros((W, 16, 8), tl.float32)
        STEPS: tl.constexpr = D // (C * W)
        for i in tl.static_range(STEPS):
            if i + AHEAD < STEPS:
                loaded = loaded + _load_gate_up(w, s, i + AHEAD, D, F, C, L, FORM, W)
            chunk = load_tokens(xs + i * (C * W), there, C, W)
            gate = product(loaded[4 * i], loaded[4 * i + 1], chunk, gate, FORM, W)
            up = product(loaded[4 * i + 2], loaded[4 * i + 3], chunk, up, FORM, W)
        g, u = tl.sum(gate, 0), tl.sum(up, 0)
        if FORM == NVFP4:
            g *= tl.load(scale_2 + expert * 2) * PRODUCT_UP
            u *= tl.load(scale_2 + expert * 2 + 1) * PRODUCT_UP
        h = g / (1.0 + tl.exp(-g)) * u
        place = pairs[None, :] * F + (tile * 16 + tl.arange(0, 16))[:, None]
        tl.store(hidden + place, h.to(hidden.dtype.element_ty), (pairs >= 0)[None, :])


@triton.jit
def down_kernel(
    hidden,
    ids,
    weight,
    scale,
    scale_2,
    out,
    T: tl.constexpr,
    K: tl.constexpr,
    TP: tl.constexpr,
    KP: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """out[p] = down hidden[p] of pair p, 16 W rows a program, 16 a warp: grid (D/(16 W), T K)."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    row = tile * (16 * W)
    w = weight_pointers(weight, expert * D + row, F, C, L, False, W)
    s = scale_pointers(scale, expert, row, D, F, FORM, False, W)
    EARLY: tl.constexpr = AHEAD if TP <= 8 else 0
    early = ()
    for i in tl.static_range(EARLY):
        early = early + load_chunk(w, s, i, F, C, L, FORM, False, W)
    lead, pairs = members(ids, expert, pair, T, K, TP, KP)
    if lead:
        loaded = early
        for i in tl.static_range(EARLY, AHEAD):
            loaded = loaded + load_chunk(w, s, i, F, C, L, FORM, False, W)
        all_pairs = tl.reshape(tl.broadcast_to(pairs[None, :], (W, 8)), (8 * W, 1))
        hs = hidden + all_pairs * F + lane_columns(C)[None, :]
        acc = tl.zeros((W, 16, 8), tl.float32)
        STEPS: tl.constexpr = F // C
        for i in tl.static_range(STEPS):
            if i + AHEAD < STEPS:
                loaded = loaded + load_chunk(w, s, i + AHEAD, F, C, L, FORM, False, W)
            chunk = load_tokens(hs + i * C, all_pairs >= 0, C, W)
            acc = product(loaded[2 * i], loaded[2 * i + 1], chunk, acc, FORM, W)
        if FORM == NVFP4:
            acc *= tl.load(scale_2 + expert) * PRODUCT_UP
        r = row + tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
        place = pairs[None, None, :] * D + r[:, :, None]
        tl.store(out + place, acc, (pairs >= 0)[None, None, :])


@triton.jit
def combine_kernel(parts, weights, out, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum of weights[t, j] * parts[t, j] in the order of j: grid (D/BLOCK, T)."""
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        part = tl.load(parts + (token * K + j) * D + at, at < D, 0.0)
        total += tl.load(weights + token * K + j) * part
    tl.store(out + token * D + at, total, at < D)
