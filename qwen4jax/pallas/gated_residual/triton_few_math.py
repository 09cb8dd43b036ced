# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""What the boundary's kernels for up to 8 rows are made of.

In what order memory is asked is a kernel's: `triton_few` and `triton_one` differ in that.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.gated_residual.triton_kernels import added, gained
from qwen4jax.pallas.moe.triton_stored import BF16, arranged, product
from qwen4jax.pallas.triton_math import sigmoid


@triton.jit
def down_weights(
    down,
    inject,
    stream,
    tile,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    OUTS: tl.constexpr,
    W: tl.constexpr,
):
    """Weights of OUTS outputs (those past them are 0) for a stream, by step [16 W, 32].

    The lines of a step are those of `product`: W warps in turn have 32 columns of 16 rows.
    """
    line = tl.arange(0, 16 * W)
    warp, row = line // 8 % W, line // (8 * W) * 8 + line % 8
    inside = (row < OUTS)[:, None]
    if tile < L // OUTS:
        matrix = down + tile * (OUTS * R * D)
    else:
        # rows past the last are the last: what comes of them is not stored
        matrix = inject
        row = tl.minimum(row, R - 1)
    w = matrix + stream * D + (row * (R * D) + warp * 32)[:, None] + tl.arange(0, 32)[None, :]
    tiles = ()
    for i in tl.static_range(D // (32 * W)):
        if OUTS < 16:
            tiles = tiles + (tl.load(w + i * (32 * W), inside, 0.0),)  # noqa: RUF005
        else:
            tiles = tiles + (tl.load(w + i * (32 * W)),)  # noqa: RUF005
    return tiles


@triton.jit
def stream_of(
    streams,
    weights,
    y,
    norm,
    stream,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PENDING: tl.constexpr,
    W: tl.constexpr,
):
    """A stream, `y` and the gains by step [8 W, 32], and with what `y` is injected [8 W, 1]."""
    line = tl.arange(0, 8 * W)
    token = line % 8
    live = (token < T)[:, None]
    place = (line // 8 * 32)[:, None] + tl.arange(0, 32)[None, :]
    s = streams + stream * D + (token * (R * D))[:, None] + place
    more = y + (token * D)[:, None] + place
    gains = norm + stream * D + place
    scale = tl.zeros((8 * W, 1), tl.float32)
    if PENDING:
        scale = tl.load(weights + token * R + stream, token < T, 0.0)[:, None]
    values, extra, gain = (), (), ()
    for i in tl.static_range(D // (32 * W)):
        values = values + (tl.load(s + i * (32 * W), live, 0.0),)  # noqa: RUF005
        gain = gain + (tl.load(gains + i * (32 * W)),)  # noqa: RUF005
        if PENDING:
            extra = extra + (tl.load(more + i * (32 * W), live, 0.0),)  # noqa: RUF005
    return values, extra, gain, scale


@triton.jit
def updated_stream(values, extra, scale, STEPS: tl.constexpr, PENDING: tl.constexpr):
    """The stream with `y` in it."""
    updated = ()
    for i in tl.static_range(STEPS):
        value = values[i]
        if PENDING:
            value = added(value, extra[i], scale)
        updated = updated + (value,)  # noqa: RUF005
    return updated


@triton.jit
def store_stream(
    updated,
    new,
    squares,
    stream,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PENDING: tl.constexpr,
    W: tl.constexpr,
):
    """Stores a stream, unless it is as it was, and the sums of its squares."""
    line = tl.arange(0, 8 * W)
    token = line % 8
    live = (token < T)[:, None]
    place = (token * (R * D) + line // 8 * 32)[:, None] + tl.arange(0, 32)[None, :]
    square = tl.zeros((8 * W, 32), tl.float32)
    for i in tl.static_range(D // (32 * W)):
        if PENDING:
            tl.store(new + stream * D + i * (32 * W) + place, updated[i], live)
        exact = updated[i].to(tl.float32)
        square += exact * exact
    each = tl.sum(tl.reshape(tl.sum(square, axis=1), (W, 8)), axis=0)
    tl.store(squares + stream * T + tl.arange(0, 8), each, tl.arange(0, 8) < T)


@triton.jit
def products(tiles, updated, gain, STEPS: tl.constexpr, W: tl.constexpr):
    """Each warp's sums without the norm's factor, in two parts [W, 16, 8]."""
    even, odd = tl.zeros((W, 16, 8), tl.float32), tl.zeros((W, 16, 8), tl.float32)
    for i in tl.static_range(STEPS):
        operand = (arranged(gained(updated[i], gain[i]), W),)
        # a chain of products waits for itself: two of half the length
        if i % 2:
            odd = product(tiles[i], 1.0, operand, odd, BF16, W)
        else:
            even = product(tiles[i], 1.0, operand, even, BF16, W)
    return even, odd


@triton.jit
def store_sums(
    even,
    odd,
    parts,
    stream,
    tile,
    T: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    OUTS: tl.constexpr,
):
    """The sums over a stream's columns, of a tile's outputs."""
    first = parts + stream * T * (L + 16) + tile * OUTS
    total = tl.sum(tl.sum(tl.join(even, odd), axis=3), axis=0)
    output = tl.arange(0, 16)[:, None]
    token = tl.arange(0, 8)[None, :]
    there = (token < T) & (tile * OUTS + output < L + R) & (output < OUTS)
    tl.store(first + token * (L + 16) + output, total, there)


@triton.jit
def up_weights(
    up,
    first,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    TALL: tl.constexpr,
    W: tl.constexpr,
):
    """Weights of TALL times 16 / R channels from `first` on, by step [16 W W, 32].

    A step is W chunks of 32 columns, one a warp, of W times 16 rows: R streams of 16 / R channels.
    Those past TALL are 0.
    """
    EACH: tl.constexpr = 16 // R
    line = tl.arange(0, 16 * W * W)
    inner = line // (8 * W) % 2 * 8 + line % 8
    ahead = line // (16 * W)
    group = line // 8 % W
    row = inner // EACH * D + first + group * EACH + inner % EACH
    w = up + (row * L + ahead * 32)[:, None] + tl.arange(0, 32)[None, :]
    tiles = ()
    for i in tl.static_range((L // 32 + W - 1) // W):
        there = ((ahead + i * W) * 32 < L)[:, None]
        if TALL < W:
            there = there & (group < TALL)[:, None]
        tiles = tiles + (tl.load(w + i * 32 * W, there, 0.0),)  # noqa: RUF005
    return tiles


@triton.jit
def _squares(squares, token, T: tl.constexpr, R: tl.constexpr):
    """Sums of squares of each stream, for the tokens given; 0 past T."""
    loaded = ()
    for stream in tl.static_range(R):
        square = tl.load(squares + stream * T + token, token < T, 0.0)
        loaded = loaded + (square,)  # noqa: RUF005
    return loaded


@triton.jit
def _mean(loaded, squares, FIRST: tl.constexpr, R: tl.constexpr, D, EPS):
    """Products with the normed streams over their number, of streams' sums from FIRST on."""
    even, odd = tl.zeros_like(loaded[FIRST]), tl.zeros_like(loaded[FIRST])
    for stream in tl.static_range(R):
        own = loaded[FIRST + stream] * tl.rsqrt(squares[stream] / D + EPS)
        if stream % 2:
            odd += own
        else:
            even += own
    # a reduction: the compiler would move later changes of layout up to each of the loads
    return tl.sum(tl.join(even, odd), axis=2) / R


@triton.jit
def gated_mean(
    streams,
    norm,
    tiles,
    parts,
    squares,
    x,
    first,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    EPS: tl.constexpr,
    TALL: tl.constexpr,
    W: tl.constexpr,
):
    """The mean over streams of the channels that `tiles` (of `up_weights`) are for."""
    EACH: tl.constexpr = 16 // R
    STEPS: tl.constexpr = (L // 32 + W - 1) // W
    # columns 8 t + 4 h + j of a chunk stand at 4 t + j of half h: 16 bytes a lane
    line = tl.arange(0, 8 * W)
    token = line % 8
    half = tl.arange(0, 16) // 4 * 8 + tl.arange(0, 16) % 4
    place = parts + (token * (L + 16) + line // 8 * 32)[:, None] + half[None, :]
    low, high = (), ()
    for i in tl.static_range(STEPS):
        there = ((token < T) & ((line // 8 + i * W) * 32 < L))[:, None]
        for stream in tl.static_range(R):
            at = place + (stream * T * (L + 16) + i * 32 * W)
            low = low + (tl.load(at, there, 0.0),)  # noqa: RUF005
            high = high + (tl.load(at + 4, there, 0.0),)  # noqa: RUF005
    square = _squares(squares, token[:, None], T, R)
    # [W, 16, 8]: what the gates are for
    inner = tl.arange(0, 16)[None, :, None]
    channel = first + tl.arange(0, W)[:, None, None] * EACH + inner % EACH
    row = tl.arange(0, 8)[None, None, :]
    live = row < T
    if TALL < W:
        there = tl.arange(0, W)[:, None, None] < TALL
        live = live & there
        gain = tl.load(norm + inner // EACH * D + channel, there, 0.0)
    else:
        gain = tl.load(norm + inner // EACH * D + channel)
    value = tl.load(streams + row * (R * D) + inner // EACH * D + channel, live, 0.0)
    of_value = tl.load(squares + inner // EACH * T + row, row < T, 0.0)
    # Loads stay above the barrier and products below the branch, which is always taken. Otherwise
    # the assembler saves registers, and waits for memory more than once.
    tl.debug_barrier()
    if tl.program_id(1) < 1:
        factor = tl.rsqrt(of_value / D + EPS)
        normed = (value.to(tl.float32) * factor * (1.0 + gain.to(tl.float32))).to(tl.bfloat16)
        total = tl.zeros((W, 16, 8), tl.float32)
        for i in tl.static_range(STEPS):
            z = tl.join(
                _mean(low, square, i * R, R, D, EPS),
                _mean(high, square, i * R, R, D, EPS),
            )
            # columns 8 t + 4 i + 2 h + p stand at 16 i + 8 h + 2 t + p
            z = tl.reshape((z * sigmoid(z)).to(tl.bfloat16), (W, 8, 4, 2, 2, 2))
            z = tl.reshape(tl.permute(z, (0, 5, 3, 2, 4, 1)), (1, W * 32, 8))
            a = tl.reshape(tiles[i], (W, 2, W, 8, 4, 2, 2, 2))
            a = tl.permute(a, (2, 1, 3, 0, 5, 6, 4, 7))
            a = tl.reshape(a, (W, 16, W * 32))
            own = tl.dot(a, tl.broadcast_to(z, (W, W * 32, 8)))
            # a sum would become one chain of products, each waiting for the one before
            total = tl.sum(tl.join(total, own), axis=3)
        gated = tl.reshape(sigmoid(total) * normed.to(tl.float32), (W, R, EACH, 8))
        mean = tl.sum(gated, axis=1) / R
        own = first + tl.arange(0, W)[:, None, None] * EACH + tl.arange(0, EACH)[None, :, None]
        tl.store(x + row * D + own, mean.to(x.dtype.element_ty), live)


@triton.jit
def store_wanted(
    parts,
    squares,
    wanted,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    EPS: tl.constexpr,
):
    """The injection weights of all rows."""
    row, own = tl.arange(0, 8)[:, None], tl.arange(0, R)[None, :]
    loaded = ()
    for stream in tl.static_range(R):
        place = parts + (stream * T + row) * (L + 16) + L + own
        loaded = loaded + (tl.load(place, row < T, 0.0),)  # noqa: RUF005
    logits = _mean(loaded, _squares(squares, row, T, R), 0, R, D, EPS)
    tl.store(wanted + row * R + own, 2.0 * sigmoid(logits), row < T)
