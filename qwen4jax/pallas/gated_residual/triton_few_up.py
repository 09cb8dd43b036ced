# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""`up` of `triton_few` as a loop of tensor-core products that adds the slices up as it goes."""

import triton
import triton.language as tl


@triton.jit
def _factor(squares, stream, row, T: tl.constexpr, D: tl.constexpr, SLICES: tl.constexpr, EPS):
    """The norm's factors, in the shape of `stream` and `row` together; some number past T."""
    first = squares + stream * (SLICES * T) + row
    square = tl.load(first, row < T, 0.0)
    for i in tl.static_range(1, SLICES):
        square += tl.load(first + i * T, row < T, 0.0)
    return tl.rsqrt(square / D + EPS)


@triton.jit
def up_kernel(
    streams,
    norm,
    up,
    parts,
    squares,
    x,
    wanted,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    SLICES: tl.constexpr,
    INJECT: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean over streams of EACH channels: grid (D / EACH).

    Args:
        streams: with everything in them [T, R D].
        norm: gain minus one [R D].
        up: gates' projection [R D, L].
        parts: of `triton_few.down_kernel` [R SLICES, T, L + 16].
        squares: of `triton_few.down_kernel` [R SLICES, T].
        x: [T, D].
        wanted: injection weights [T, R].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        SLICES: of a stream.
        INJECT: whether to make the injection weights.
        EPS: of the norm.
        ROWS: of a product.
        EACH: channels of each stream.
        BLOCK: columns of a step.
    """
    first = tl.program_id(0) * EACH
    row = tl.arange(0, ROWS)
    live = (row < T)[:, None]
    # rows of `up`: 16 to a warp, all streams of some channels, so that their sum stays within it
    index = tl.arange(0, R * EACH)
    SOME: tl.constexpr = 16 // R
    stream = index % 16 // SOME
    column = stream * D + first + index // 16 * SOME + index % SOME
    value = tl.load(streams + row[:, None] * (R * D) + column[None, :], live, 0.0)
    gain = tl.load(norm + column)
    factor = _factor(squares, stream[None, :], row[:, None], T, D, SLICES, EPS)
    k = tl.arange(0, BLOCK)
    w = up + column[:, None] * L + k[None, :]
    at = row[:, None] * (L + 16) + k[None, :]
    own = ()
    for s in tl.static_range(R):
        own = own + (_factor(squares, s, row, T, D, SLICES, EPS)[:, None],)  # noqa: RUF005
    logits = tl.zeros((ROWS, R), tl.float32)
    if INJECT:
        place = parts + row[:, None] * (L + 16) + L + tl.arange(0, R)[None, :]
        there = live & (tl.program_id(0) == 0)
        for s in tl.static_range(R):
            asked = tl.load(place + s * (SLICES * T * (L + 16)), there, 0.0)
            for j in tl.static_range(1, SLICES):
                asked += tl.load(place + (s * SLICES + j) * (T * (L + 16)), there, 0.0)
            logits += asked * own[s]
    acc = tl.zeros((R * EACH, ROWS), tl.float32)
    for i in tl.range(0, L, BLOCK):
        left = tl.load(w + i)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for s in tl.static_range(R):
            sums = tl.load(parts + s * (SLICES * T * (L + 16)) + at + i, live, 0.0)
            for j in tl.static_range(1, SLICES):
                sums += tl.load(parts + (s * SLICES + j) * (T * (L + 16)) + at + i, live, 0.0)
            total += sums * own[s]
        total = total / R
        low = (total * tl.sigmoid(total)).to(tl.bfloat16)
        acc = tl.dot(left, low.T, acc)
    gates = tl.sigmoid(acc).T
    normed = value.to(tl.float32) * factor * (1.0 + gain.to(tl.float32))[None, :]
    normed = normed.to(tl.bfloat16).to(tl.float32)
    gated = tl.reshape(gates * normed, (ROWS, R * EACH // 16, R, SOME))
    mean = tl.reshape(tl.sum(gated, axis=2) / R, (ROWS, EACH))
    channel = first + tl.arange(0, EACH)
    tl.store(x + row[:, None] * D + channel[None, :], mean.to(tl.bfloat16), live)
    if INJECT:
        at = row[:, None] * R + tl.arange(0, R)[None, :]
        tl.store(wanted + at, 2.0 * tl.sigmoid(logits / R), live & (tl.program_id(0) == 0))
