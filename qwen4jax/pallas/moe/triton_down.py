# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The second product of the experts (`triton_gate_up.py` says how they are cut), and the sum.

A few tokens share a launch for both: who is last to finish a tile of columns adds it up, in the
order of the choices. It counts in memory that gate/up has cleared. The sum of more tokens would
be a long tail of few programs: it has a launch of its own (`triton_sum.py`).
"""

import triton
import triton.language as tl

from qwen4jax.pallas.moe.triton_ask import ask
from qwen4jax.pallas.moe.triton_groups import members
from qwen4jax.pallas.moe.triton_stored import (
    BF16,
    NVFP4,
    PRODUCT_UP,
    SHARED_AHEAD,
    SHARED_CHUNK,
    lane_columns,
    lines,
    load_chunk,
    load_tokens,
    product,
    scale_pointers,
    weight_pointers,
)
from qwen4jax.pallas.moe.triton_sum import total


@triton.jit
def _down(
    hidden,
    pairs,
    w,
    s,
    early,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Products [W, 16, N] of 16 rows a warp with the hidden values of N pairs."""
    loaded = early
    for i in tl.static_range(EARLY, AHEAD):
        loaded = loaded + load_chunk(w, s, i, F, C, L, FORM, False, W)
    hs = hidden + lines(tl.maximum(pairs, 0), F, 0, W) + lane_columns(C)[None, :]
    acc = tl.zeros((W, 16, pairs.shape[0]), tl.float32)
    STEPS: tl.constexpr = F // C
    for i in tl.static_range(STEPS):
        if i + AHEAD < STEPS:
            loaded = loaded + load_chunk(w, s, i + AHEAD, F, C, L, FORM, False, W)
        chunk = load_tokens(hs + i * C, C, W)
        acc = product(loaded[2 * i], loaded[2 * i + 1], chunk, acc, FORM, W)
    return acc


@triton.jit
def _store_parts(parts, acc, pairs, row, D: tl.constexpr, W: tl.constexpr):
    """parts[pair] of 16 W columns."""
    r = row + tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
    place = pairs[None, None, :] * D + r[:, :, None]
    tl.store(parts + place, acc, (pairs >= 0)[None, None, :])


@triton.jit
def _shared_down(
    hidden,
    down,
    parts,
    row,
    first,
    T: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
):
    """16 W columns of the shared expert's part of N tokens."""
    token = first + tl.arange(0, N)
    pairs = tl.where(token < T, T * K + token, -1)
    C: tl.constexpr = SHARED_CHUNK
    w = weight_pointers(down, row, F, C, C, False, W)
    AHEAD: tl.constexpr = min(SHARED_AHEAD, F // C)
    acc = _down(hidden, pairs, w, w, (), F, C, C, BF16, W, 0, AHEAD)
    _store_parts(parts, acc, pairs, row, D, W)


@triton.jit
def _routed_down(
    hidden,
    ids,
    tiles,
    stored,
    parts,
    row,
    place,
    T: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
    AHEAD: tl.constexpr,
    ASK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """16 W columns of the parts of a tile of pairs, if there is one."""
    weight, scale, scale_2 = stored
    chosen = tl.load(ids + place)
    expert = chosen.to(tl.int64)
    w = weight_pointers(weight, expert * D + row, F, C, L, False, W)
    s = scale_pointers(scale, expert, row, D, F, FORM, False, W)
    EARLY: tl.constexpr = 0 if LISTED else AHEAD
    early = ()
    for i in tl.static_range(EARLY):
        early = early + load_chunk(w, s, i, F, C, L, FORM, False, W)
    if LISTED:
        pairs = tl.load(tiles + place * 8 + tl.arange(0, 8))
        lead = chosen >= 0
    else:
        lead, pairs = members(ids, expert, place, T, K, KP)
    if lead:
        if ASK:
            ask(weight, expert * D + row, AHEAD, F // C, F, C, False, W)
        if FORM == NVFP4:
            # before the products, which need not wait for it
            factor = tl.load(scale_2 + expert) * PRODUCT_UP
        acc = _down(hidden, pairs, w, s, early, F, C, L, FORM, W, EARLY, AHEAD)
        if FORM == NVFP4:
            acc *= factor
        _store_parts(parts, acc, pairs, row, D, W)


@triton.jit
def down_kernel(
    hidden,
    ids,
    tiles,
    weight,
    scale,
    scale_2,
    shared_down,
    weights,
    logit,
    counter,
    parts,
    out,
    T: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    TP: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
    AHEAD: tl.constexpr,
    ASK: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    LISTED: tl.constexpr,
    SUM: tl.constexpr,
    PLACES: tl.constexpr,
):
    """parts[p] = down hidden[p], 16 W rows a program, 16 a warp: grid (D/(16 W), PLACES).

    If SUM also `out`: the sum of each token's parts, by the last program of each 16 W
    columns. All of them count, those that have nothing to do too.

    Args:
        hidden: of `gate_up_kernel`, as are the arguments named like its.
        ids: experts.
        tiles: pairs of each tile.
        weight: stored array of down.
        scale: stored scales.
        scale_2: stored scales of whole matrices.
        shared_down: [D, F].
        weights: of each choice [T, K].
        logit: of the shared expert's share [T].
        counter: a zero for each 16 W columns.
        parts: [T K + T, D], the shared expert's last.
        out: [T, D].
        T: tokens.
        K: choices of a token.
        KP: K rounded up to a power of two.
        TP: T rounded up to a power of two.
        D: hidden size.
        F: width of the experts.
        C: columns of a chunk.
        L: its elements in the stored array.
        FORM: stored form.
        W: warps.
        AHEAD: steps asked for ahead.
        ASK: whether the cache is asked for the other steps; of bfloat16 alone.
        SHARED: groups of N tokens for the shared expert, or 0.
        N: tokens of a program of the shared expert, in multiples of 8.
        LISTED: whether `group_kernel` made `ids` and `tiles`.
        SUM: whether to add up; otherwise `out` is left as it is.
        PLACES: SHARED and tiles.
    """
    block, place = tl.program_id(0), tl.program_id(1) - SHARED
    row = block * (16 * W)
    if place < 0:
        first = (place + SHARED) * N
        _shared_down(hidden, shared_down, parts, row, first, T, K, D, F, W, N)
    else:
        stored = (weight, scale, scale_2)
        _routed_down(
            hidden,
            ids,
            tiles,
            stored,
            parts,
            row,
            place,
            T,
            K,
            KP,
            D,
            F,
            C,
            L,
            FORM,
            W,
            AHEAD,
            ASK,
            LISTED,
        )
    if SUM:
        # every thread's parts before the count
        tl.debug_barrier()
        if tl.atomic_add(counter + block, 1, sem="acq_rel") == PLACES - 1:
            at = row + tl.arange(0, 16 * W)
            t = tl.arange(0, TP)
            own = parts + T * K * D
            y = total(parts, own, weights, logit, t, at, t < T, at < D, K, D, SHARED)
            to = out + t[:, None] * D + at[None, :]
            tl.store(to, y.to(out.dtype.element_ty), (t < T)[:, None])
