# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Gate and up of the experts for few tokens, and the activation: every matrix is read once.

Bytes decide: at the released sizes an expert in NVFP4 is 2.76 MB, so 4 tokens (39 distinct experts)
read 108 MB, 25 us at 4.3 TB/s, of which two thirds are gate and up; the shared expert in bfloat16
adds 9.8 MB.

A program of either product has one expert, up to 8 of its pairs (`triton_groups.py`)
and some rows. The weights' addresses hang on the expert alone: with few tokens, when nearly every
pair leads, the first loads are under way while a program looks for the other pairs.

With 4 tokens both products take 48.8 us on an H200, and gate/up is two to three waves of programs.
Slower were two warps a program, which makes it one wave (64.2 us), loads held above the products of
their step by a barrier (51.8), and having the cache get what the second product reads (52.1 against
49.0).

Latency and instructions bound it more than memory does. Of 42.0 us for 4 tokens and 198.6 for 32,
34.8 and 158.5 are left if all programs read the same two experts, from the cache. Slower were
bounds on registers, which let more programs run at once (72 of them: 43.1 against 42.4, 64: 48.4),
and one launch of programs that stay, whose warps copy weights to shared memory two pieces ahead
(67.9 against 42.0). One launch of both products, where the programs of down wait for their expert,
took 42.7 us in a round against 43.2, no more than the counters that it needs are worth.

Of listed tiles of NVFP4 the weights come by way of shared memory (`triton_ring.py`). Slower were
two or more tiles of rows a program, one after the other (427 us instead of 417 for 128 tokens,
before the rings), gate and up in warps of their own (437 instead of 415), and scales multiplied
with sums instead of weights, in columns of a tile that have a quarter of a pair's columns each
(208 us instead of 200 for 32 tokens).

The shared expert has programs in the same launches, the first ones, because theirs are the longest.
They have up to 16 tokens, where the others have 8 pairs: with 8 a launch of 128 tokens reads the
shared weights 16 times from the cache and takes 440 us instead of 415 (32 tokens: 207 instead of
197). With 32 it is 415 again.
Its hidden values stand behind those of the pairs, as if it were one more choice of every token.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.moe.triton_ask import ask
from qwen4jax.pallas.moe.triton_groups import members
from qwen4jax.pallas.moe.triton_ring import ring_gate_up
from qwen4jax.pallas.moe.triton_stored import (
    BF16,
    NVFP4,
    PRODUCT_UP,
    SHARED_AHEAD,
    SHARED_CHUNK,
    activated,
    lane_columns,
    lines,
    load_chunk,
    load_tokens,
    next_matrix,
    product,
    scale_pointers,
    weight_pointers,
)


@triton.jit
def _load_pair(
    gate,
    gate_scale,
    up,
    up_scale,
    step: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
):
    """A step of the rows of gate and of up: (weights, scales, weights, scales)."""
    first = load_chunk(gate, gate_scale, step, D, C, L, FORM, True, W)
    return first + load_chunk(up, up_scale, step, D, C, L, FORM, True, W)


@triton.jit
def _gate_up(
    x,
    tokens,
    gate,
    gate_scale,
    up,
    up_scale,
    early,
    at,
    D: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    ASKED: tl.constexpr,
):
    """Sums [16, N] of 16 rows of gate and of up with N tokens; `early` are the first EARLY steps.

    Columns of pairs that are none are some token's, and are stored nowhere: no column reaches
    another, and no load waits to be known as needed.
    The cache is asked for ASKED steps further than AHEAD, four at a time: `at` says where they are.
    The warps split the columns, one chunk of every W each, so that a program asks for whole rows
    together; their sums are added in the order of the warps.
    """
    loaded = early
    for i in tl.static_range(EARLY, AHEAD):
        loaded = loaded + _load_pair(gate, gate_scale, up, up_scale, i, D, C, L, FORM, W)
    N: tl.constexpr = tokens.shape[0]
    xs = x + lines(tokens, D, C, W) + lane_columns(C)[None, :]
    g = tl.zeros((W, 16, N), tl.float32)
    u = tl.zeros((W, 16, N), tl.float32)
    STEPS: tl.constexpr = D // (C * W)
    for i in tl.static_range(STEPS):
        if i + AHEAD < STEPS:
            more = _load_pair(gate, gate_scale, up, up_scale, i + AHEAD, D, C, L, FORM, W)
            loaded = loaded + more
        if ASKED > 0 and i > 0 and i % 4 == 0:
            _ask_pair(at, i + AHEAD + ASKED - 4, i + AHEAD + ASKED, D, C, W)
        chunk = load_tokens(xs + i * (C * W), C, W)
        g = product(loaded[4 * i], loaded[4 * i + 1], chunk, g, FORM, W)
        u = product(loaded[4 * i + 2], loaded[4 * i + 3], chunk, u, FORM, W)
    return tl.split(tl.sum(tl.join(g, u), 0))


@triton.jit
def _ask_pair(
    at,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
):
    """Asks for steps of 16 rows of gate and of up: `at` has both, and their first rows."""
    gate, gate_row, up, up_row = at
    ask(gate, gate_row, FIRST, LAST, D, C, True, W)
    ask(up, up_row, FIRST, LAST, D, C, True, W)


@triton.jit
def _store_hidden(hidden, g, u, pairs, tile, F: tl.constexpr):
    """hidden[pair] = silu(g) * u, 16 columns of each pair."""
    h = activated(g, u)
    place = pairs[None, :] * F + (tile * 16 + tl.arange(0, 16))[:, None]
    tl.store(hidden + place, h.to(hidden.dtype.element_ty), (pairs >= 0)[None, :])


@triton.jit
def _shared_gate_up(
    x,
    gate,
    up,
    hidden,
    row,
    first,
    T: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
):
    """16 columns of the shared expert's hidden values of N tokens."""
    token = first + tl.arange(0, N)
    C: tl.constexpr = SHARED_CHUNK
    w1 = weight_pointers(gate, row * 16, D, C, C, True, W)
    w2 = weight_pointers(up, row * 16, D, C, C, True, W)
    AHEAD: tl.constexpr = min(SHARED_AHEAD, D // (C * W))
    there = tl.minimum(token, T - 1)
    g, u = _gate_up(x, there, w1, w1, w2, w2, (), (), D, C, C, BF16, W, 0, AHEAD, 0)
    _store_hidden(hidden, g, u, tl.where(token < T, T * K + token, -1), row, F)


@triton.jit
def _routed_gate_up(
    x,
    ids,
    tiles,
    stored,
    hidden,
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
    ASKED: tl.constexpr,
    LISTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """16 columns of the hidden values of a tile of pairs, if there is one."""
    weight, scale, scale_2 = stored
    chosen = tl.load(ids + place)
    expert = chosen.to(tl.int64)
    w = weight_pointers(weight, expert * (2 * F) + row * 16, D, C, L, True, W)
    s = scale_pointers(scale, expert * 2, row * 16, F, D, FORM, True, W)
    apart, scales_apart = next_matrix(F, D, C, L, FORM)
    up, up_scale = w + apart, s + scales_apart
    EARLY: tl.constexpr = 0 if LISTED else AHEAD
    early = ()
    for i in tl.static_range(EARLY):
        early = early + _load_pair(w, s, up, up_scale, i, D, C, L, FORM, W)
    if LISTED:
        pairs = tl.load(tiles + place * 8 + tl.arange(0, 8))
        lead = chosen >= 0
    else:
        lead, pairs = members(ids, expert, place, T, K, KP)
    here = expert * (2 * F) + row * 16
    at = weight, here, weight, here + F
    if lead:
        if ASKED > 0:
            _ask_pair(at, AHEAD, AHEAD + ASKED, D, C, W)
        token = tl.maximum(pairs, 0) // K
        if FORM == NVFP4:
            # before the products, which need not wait for them
            gate_total = tl.load(scale_2 + expert * 2) * PRODUCT_UP
            up_total = tl.load(scale_2 + expert * 2 + 1) * PRODUCT_UP
        if LISTED and FORM == NVFP4:
            listed = tiles + place * 8
            g, u = ring_gate_up(x, weight, scale, listed, expert, row, K, D, F, W, STAGES)
        else:
            g, u = _gate_up(
                x, token, w, s, up, up_scale, early, at, D, C, L, FORM, W, EARLY, AHEAD, ASKED
            )
        if FORM == NVFP4:
            g *= gate_total
            u *= up_total
        _store_hidden(hidden, g, u, pairs, row, F)


@triton.jit
def gate_up_kernel(
    x,
    ids,
    tiles,
    weight,
    scale,
    scale_2,
    shared_gate,
    shared_up,
    hidden,
    counter,
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
    ASKED: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    LISTED: tl.constexpr,
    COUNTERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """hidden[p] = silu(gate x) * (up x), 16 rows of each a program: grid (F/16, SHARED + tiles).

    Args:
        x: tokens [T, D].
        ids: experts [T, K]; LISTED: of each tile.
        tiles: pairs of each tile [tiles, 8], read if LISTED. Otherwise a tile is a pair.
        weight: stored array of gate and up.
        scale: stored scales.
        scale_2: stored scales of whole matrices.
        shared_gate: [F, D].
        shared_up: [F, D].
        hidden: [T K + T, F], the shared expert's last.
        counter: int32 [COUNTERS], cleared.
        T: tokens.
        K: choices of a token.
        KP: K rounded up to a power of two.
        D: hidden size.
        F: width of the experts, the shared one too.
        C: columns of a chunk.
        L: its elements in the stored array.
        FORM: stored form.
        W: warps.
        AHEAD: steps asked for ahead.
        ASKED: steps that the cache is asked for further ahead; of bfloat16 alone.
        SHARED: groups of N tokens for the shared expert, or 0.
        N: tokens of a program of the shared expert, in multiples of 8.
        LISTED: whether `group_kernel` made `ids` and `tiles`.
        COUNTERS: a power of two.
        STAGES: of `triton_ring`.
    """
    row, place = tl.program_id(0), tl.program_id(1) - SHARED
    if (row == 0) & (tl.program_id(1) == 0):
        tl.store(counter + tl.arange(0, COUNTERS), tl.zeros((COUNTERS,), tl.int32))
    if place < 0:
        first = (place + SHARED) * N
        _shared_gate_up(x, shared_gate, shared_up, hidden, row, first, T, K, D, F, W, N)
    else:
        stored = (weight, scale, scale_2)
        _routed_gate_up(
            x,
            ids,
            tiles,
            stored,
            hidden,
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
            ASKED,
            LISTED,
            STAGES,
        )
