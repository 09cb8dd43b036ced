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
    PRODUCT_UP,
    byte_lines,
    lane_columns,
    load_scales,
    load_tokens,
    nvfp4_product,
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
def _load_gate_up(w, s, i, D: tl.constexpr, F: tl.constexpr, W: tl.constexpr):
    """Step i of the rows of gate and of up: (bytes, scales, bytes, scales)."""
    w, s = w + i * (64 * W), s + i * (8 * W)
    gate, up = load_scales(s, D // 2), load_scales(s + F * D // 16, D // 2)
    return tl.load(w), gate, tl.load(w + F * D // 2), up


@triton.jit
def _gate_up_sums(
    w,
    s,
    loaded,
    x,
    there,
    D: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """2**-7 of the products of 16 rows of gate and of up, summed over the warps: [16, 8] each."""
    gate = tl.zeros((W, 16, 8), tl.float32)
    up = tl.zeros((W, 16, 8), tl.float32)
    STEPS: tl.constexpr = D // (128 * W)
    for i in tl.static_range(EARLY, AHEAD):
        loaded = loaded + _load_gate_up(w, s, i, D, F, W)
    for i in tl.static_range(STEPS):
        if i + AHEAD < STEPS:
            loaded = loaded + _load_gate_up(w, s, i + AHEAD, D, F, W)
        even, odd = load_tokens(x + i * (128 * W), there, W)
        gate = nvfp4_product(loaded[4 * i], loaded[4 * i + 1], even, odd, gate, W)
        up = nvfp4_product(loaded[4 * i + 2], loaded[4 * i + 3], even, odd, up, W)
    return tl.sum(gate, 0), tl.sum(up, 0)


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
    W: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """hidden[p] = silu(gate x) * (up x) of pair p, 16 rows of each a program: grid (F/16, T K).

    The warps of a program split the columns, 128 of every 128 W each, so that it asks for whole
    rows together; their sums are added in the order of the warps.
    """
    tile, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    warp, row = byte_lines(W)
    at = (tile * 16 + row) * (D // 2) + warp * 64
    w = weight + expert * (F * D) + at[:, None] + tl.arange(0, 64)[None, :]
    line = tl.arange(0, 8 * W)
    at = (tile * 16 + line % 8) * (D // 16) + line // 8 * 8
    s = scale + expert * (F * D // 8) + at[:, None] + tl.arange(0, 8)[None, :]
    EARLY: tl.constexpr = AHEAD if TP <= 8 else 0
    loaded = ()
    for i in tl.static_range(EARLY):
        loaded = loaded + _load_gate_up(w, s, i, D, F, W)
    lead, pairs = members(ids, expert, pair, T, K, TP, KP)
    if lead:
        column = tl.arange(0, W)[:, None] * 128
        xs = x + tl.reshape(pairs[None, :] // K * D + column, (8 * W, 1)) + lane_columns()[None, :]
        there = tl.reshape(tl.broadcast_to((pairs >= 0)[None, :], (W, 8)), (8 * W, 1))
        gate, up = _gate_up_sums(w, s, loaded, xs, there, D, F, W, EARLY, AHEAD)
        gate *= tl.load(scale_2 + expert * 2) * PRODUCT_UP
        up *= tl.load(scale_2 + expert * 2 + 1) * PRODUCT_UP
        h = gate / (1.0 + tl.exp(-gate)) * up
        place = pairs[None, :] * F + (tile * 16 + tl.arange(0, 16))[:, None]
        tl.store(hidden + place, h.to(hidden.dtype.element_ty), (pairs >= 0)[None, :])


@triton.jit
def _load_down(w, s, i, F: tl.constexpr):
    """Step i of the rows of down: (bytes, scales)."""
    return tl.load(w + i * 64), load_scales(s + i * 8, F // 2)


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
    W: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """out[p] = down hidden[p] of pair p, 16 W rows a program, 16 a warp: grid (D/(16 W), T K)."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    warp, row = byte_lines(W)
    at = (tile * (16 * W) + warp * 16 + row) * (F // 2)
    w = weight + expert * (D * F // 2) + at[:, None] + tl.arange(0, 64)[None, :]
    line = tl.arange(0, 8 * W)
    at = (tile * (16 * W) + line // 8 * 16 + line % 8) * (F // 16)
    s = scale + expert * (D * F // 16) + at[:, None] + tl.arange(0, 8)[None, :]
    STEPS: tl.constexpr = F // 128
    EARLY: tl.constexpr = AHEAD if TP <= 8 else 0
    loaded = ()
    for i in tl.static_range(EARLY):
        loaded = loaded + _load_down(w, s, i, F)
    lead, pairs = members(ids, expert, pair, T, K, TP, KP)
    if lead:
        all_pairs = tl.reshape(tl.broadcast_to(pairs[None, :], (W, 8)), (8 * W, 1))
        hs = hidden + all_pairs * F + lane_columns()[None, :]
        there = all_pairs >= 0
        acc = tl.zeros((W, 16, 8), tl.float32)
        rest = loaded
        for i in tl.static_range(EARLY, AHEAD):
            rest = rest + _load_down(w, s, i, F)
        for i in tl.static_range(STEPS):
            if i + AHEAD < STEPS:
                rest = rest + _load_down(w, s, i + AHEAD, F)
            even, odd = load_tokens(hs + i * 128, there, W)
            acc = nvfp4_product(rest[2 * i], rest[2 * i + 1], even, odd, acc, W)
        acc *= tl.load(scale_2 + expert) * PRODUCT_UP
        r = tile * (16 * W) + tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
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
