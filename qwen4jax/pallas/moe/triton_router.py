# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The router's products and its choice, in one launch: whoever is last chooses.

Bytes are few: at the released size 2.6 MB of weights, 0.6 us at 4.3 TB/s. Latency decides. Two
launches are 8 us: 33 programs of one warp read the weights in 5.2 us, and a launch of its own for
the choice takes 2.9.

The products are split so that all bytes are under way at once: a program has 16 rows (one
tensor-core tile) and a quarter of the columns, its 4 warps take chunks of 32 columns in turn, and a
warp asks for its five chunks before it uses the first. That is 128 programs, and 4 more for the
shared expert's gate. Splitting columns rather than rows keeps a tile full and has each program read
a quarter of the tokens. The price are partial sums, 8 KB a token, which stay in L2.

The last program of a group of 8 tokens adds the partial sums in their order and chooses, a warp for
each token or two. Logits are rounded to bfloat16, so a logit and the expert's number fit one
integer: each of the choices is *one* warp-wide maximum, the lower expert first among equals.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.moe import limits
from qwen4jax.pallas.moe.triton_stored import BF16, arranged, product

# of a tensor-core tile, and of a step of a warp
ROWS = tl.constexpr(limits.ROUTER_ROWS)
CHUNK = tl.constexpr(limits.ROUTER_CHUNK)
# less than the key of every logit
_NOTHING = tl.constexpr(-(2**31))
# bits of a key
_LOGIT = tl.constexpr(-(2**16))
_EXPERT = tl.constexpr(2**16 - 1)
_MAGNITUDE = tl.constexpr(2**31 - 1)


@triton.jit
def _loads(
    x,
    weight,
    last,
    first,
    T: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    W: tl.constexpr,
):
    """Chunks of 16 rows, and of 8 tokens from `first` on; x and weight start at the first column.

    Rows after `last` are that one: what comes of them is not looked at. Warps take chunks in turn.
    """
    line = tl.arange(0, 16 * W)
    row = tl.minimum(line // (8 * W) * 8 + line % 8, last)
    chunk = tl.arange(0, CHUNK)[None, :]
    ws = weight + (row * D + line // 8 % W * CHUNK)[:, None] + chunk
    # no reshape: the compiler forgets what pointers are multiples of
    line = tl.arange(0, 8 * W)
    token = first + line % 8
    live = (token < T)[:, None]
    xs = x + (token * D + line // 8 * CHUNK)[:, None] + chunk
    weights, tokens = (), ()
    for i in tl.static_range(STEPS):
        weights = weights + (tl.load(ws + i * (CHUNK * W)),)  # noqa: RUF005
    for i in tl.static_range(STEPS):
        tokens = tokens + (tl.load(xs + i * (CHUNK * W), live, 0.0),)  # noqa: RUF005
    return weights, tokens


@triton.jit
def _products(weights, tokens, STEPS: tl.constexpr, W: tl.constexpr):
    """Sums [16, 8] over the columns, added in the order of the warps."""
    acc = tl.zeros((W, 16, 8), tl.float32)
    for i in tl.static_range(STEPS):
        acc = product(weights[i], 1.0, (arranged(tokens[i], W),), acc, BF16, W)
    return tl.sum(acc, 0)


@triton.jit
def _keys(logit, e):
    """Integers in the order of bfloat16 logits, the lower expert's larger among equals."""
    logit = logit.to(tl.bfloat16).to(tl.float32)
    # one zero
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & _MAGNITUDE)) & _LOGIT) | (e ^ _EXPERT)


@triton.jit
def _logits(keys):
    bits = keys & _LOGIT
    return (bits ^ ((bits >> 31) & (_MAGNITUDE & _LOGIT))).to(tl.float32, bitcast=True)


@triton.jit
def _parts(
    parts, token, e, T: tl.constexpr, N: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr
):
    """Partial sums of some rows e < N and tokens, 0 elsewhere."""
    there = (token < T) & (e < N)
    loaded = ()
    for i in tl.static_range(SPLITS):
        at = (i * T + token) * E + e
        # past the first cache: other multiprocessors wrote them
        loaded = loaded + (tl.load(parts + at, there, 0.0, cache_modifier=".cg"),)  # noqa: RUF005
    return loaded


@triton.jit
def _sum(loaded, SPLITS: tl.constexpr):
    """Partial sums added in their order."""
    total = loaded[0]
    for i in tl.static_range(1, SPLITS):
        total += loaded[i]
    return total


@triton.jit
def load_parts(
    parts,
    first,
    T: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    SPLITS: tl.constexpr,
    W: tl.constexpr,
):
    """Partial sums of W G tokens from `first` on, and of their shared expert's logit.

    Loaded in rows of 128 experts, a row for a warp, in such an order that a warp has all of its
    token's: the reshapes of `choose` only rename registers, and no warp waits for another.
    """
    line = tl.arange(0, G * R * W)
    token = first + line // (R * W) * W + line % W
    e = (line // W % R * 128)[:, None] + tl.arange(0, 128)[None, :]
    loaded = _parts(parts, token[:, None], e, T, E, E + ROWS, SPLITS)
    own = first + tl.arange(0, W * G)
    return loaded, _parts(parts, own, E, T, E + 1, E + ROWS, SPLITS)


@triton.jit
def choose(
    loaded,
    gate,
    ids,
    shares,
    shared,
    first,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    KP: tl.constexpr,
    SPLITS: tl.constexpr,
    W: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Of `load_parts`' tokens the K largest logits and their shares, and the shared expert's."""
    line = tl.arange(0, G * R * W)
    e = (line // W % R * 128)[:, None] + tl.arange(0, 128)[None, :]
    keys = tl.where(e < E, _keys(_sum(loaded, SPLITS), e), _NOTHING)
    keys = tl.reshape(tl.permute(tl.reshape(keys, (G, R, W, 128)), (2, 0, 1, 3)), (W * G, R * 128))
    left = keys
    j = tl.arange(0, KP)[None, :]
    chosen = tl.zeros((W * G, KP), tl.int32)
    for i in tl.static_range(K):
        most = tl.max(left, 1)[:, None]
        left = tl.where(left == most, _NOTHING, left)
        chosen = tl.where(j == i, most, chosen)
    value = _logits(chosen)
    largest = tl.sum(tl.where(j == 0, value, 0.0), 1)[:, None]
    share = tl.where(j < K, tl.exp(value - largest), 0.0)
    if RENORMALIZE:
        whole = tl.sum(share, 1)
    else:
        every = tl.exp(_logits(keys) - largest)
        whole = tl.sum(tl.where(keys == _NOTHING, 0.0, every), 1)
    share = share / whole[:, None]
    line = tl.arange(0, W * G)
    token = first + (line % G * W + line // G)[:, None]
    at, there = token * K + j, (token < T) & (j < K)
    tl.store(ids + at, (chosen & _EXPERT) ^ _EXPERT, there)
    tl.store(shares + at, share, there)
    own = first + tl.arange(0, W * G)
    tl.store(shared + own, _sum(gate, SPLITS), own < T)


@triton.jit
def router_kernel(
    x,
    weight,
    shared_weight,
    counter,
    parts,
    ids,
    shares,
    shared,
    T: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    KP: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    W: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Logits of 8 tokens a group, and its last program chooses: grid (SPLITS, E/16 + 1, groups).

    Args:
        x: tokens [T, D].
        weight: [E, D].
        shared_weight: [1, D], of the shared expert's gate.
        counter: a zero for each group, and zeros again in the end.
        parts: float32 [SPLITS, T, E + 16], partial sums, the shared expert's in column E.
        ids: experts [T, K].
        shares: float32 [T, K].
        shared: float32 [T, 1], the shared expert's logit.
        T: tokens.
        E: experts, in multiples of 16.
        D: hidden size.
        K: choices of a token.
        R: E over 128, rounded up to a power of two.
        G: tokens of a warp.
        KP: K rounded up to a power of two.
        SPLITS: programs among which columns are split.
        STEPS: chunks of a warp.
        W: warps.
        RENORMALIZE: whether the shares of the chosen sum to one.
    """
    split, tile, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TILES: tl.constexpr = E // ROWS
    first = group * 8
    start = split * (CHUNK * W * STEPS)
    if tile < TILES:
        matrix, last = weight + tile * (ROWS * D), ROWS - 1
    else:
        matrix, last = shared_weight, 0
    weights, tokens = _loads(x + start, matrix + start, last, first, T, D, STEPS, W)
    # Loads stay above the barrier and products below the branch, which is always taken. Otherwise
    # the assembler saves registers, and waits for memory three times instead of once.
    tl.debug_barrier()
    if split < SPLITS:
        acc = _products(weights, tokens, STEPS, W)
        row = tile * ROWS + tl.arange(0, ROWS)
        token = first + tl.arange(0, 8)
        place = parts + ((split * T + token) * (E + ROWS))[None, :] + row[:, None]
        tl.store(place, acc, (token < T)[None, :])
    # every thread's sums before the count
    tl.debug_barrier()
    if tl.atomic_add(counter + group, 1, sem="acq_rel") == SPLITS * (TILES + 1) - 1:
        loaded, gate = load_parts(parts, first, T, E, R, G, SPLITS, W)
        # loads stay above, as before
        tl.debug_barrier()
        choose(loaded, gate, ids, shares, shared, first, T, E, K, R, G, KP, SPLITS, W, RENORMALIZE)
        tl.store(counter + group, 0)
