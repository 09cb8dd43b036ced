# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""The boundary for up to 8 rows in two Triton launches, each one memory latency deep.

Floor at the released size: 13.2 MB of weights, 3.1 us at 4.3 TB/s, and for each launch about 1.2 us
of start and one latency. So every load of a program is under way before the first is waited for:
no loop carries loads, and weights go straight from memory to the tensor cores' registers
(`moe/triton_stored.py` says how), without shared memory. And `down` has the cache get the weights
of `up`, so that memory does not rest between the launches.

`down` multiplies 16 outputs by a stream. It adds the pending output to the streams,
rounds them, and multiplies without the norm's factor, which is one number for each row and stream,
and so applies to sums. All programs of a stream do so alike: what an element costs
there is what the launch costs, hence the packed arithmetic. The last tile of outputs has the fewest
weights (the injection weights' few): it stores the streams and the sums of their squares.

`up` owns some channels of all streams. Its warps split the rank, so that a lane makes just those
low-rank values that it multiplies, and nothing is handed around before the sums. Every program adds
up the sums of all streams itself: one that did that for all would cost another latency.

Order of sums: chunks of a warp, warps, streams. No atomics.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.gated_residual.triton_kernels import added, ask, gained
from qwen4jax.pallas.moe.triton_stored import BF16, arranged, product
from qwen4jax.pallas.triton_call import triton_call

# columns of the sums beside the low-rank ones: room for the injection weights' logits
EXTRA = 16
# of a `down` program (16 were 0.85 us slower at 4 rows)
WARPS = 8
# of an `up` program, which has 16 rows of `up` for each
UP_WARPS = 4


def boundary(streams, pending, norm, down, up, inject, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    flat = streams.reshape(rows, count * hidden)
    # what a kernel has no use for is another array's pointer
    weights, y = (norm, flat) if pending is None else pending
    sizes = dict(T=rows, R=count, D=hidden, L=rank)
    # chunks of 32 columns go round the warps of a `down` program
    chunks = hidden // 32
    warps = min(WARPS, chunks & -chunks)
    tiles = rank // 16 + (inject is not None)
    shape = jax.ShapeDtypeStruct
    new, parts, squares = triton_call(
        flat,
        weights.reshape(rows, count) if pending is not None else weights,
        y.reshape(rows, -1),
        norm,
        down,
        down if inject is None else inject,
        up,
        kernel=down_kernel,
        name=f"gated_residual_down_{rows}x{count}x{hidden}",
        out=(
            shape(flat.shape if pending is not None else (1, 1), flat.dtype),
            shape((count, rows, rank + EXTRA), jnp.float32),
            shape((count, rows), jnp.float32),
        ),
        grid=(count, tiles),
        num_warps=warps,
        PENDING=pending is not None,
        TILES=tiles,
        W=warps,
        **sizes,
    )
    new = flat if pending is None else new
    x, wanted = triton_call(
        new,
        norm,
        up,
        parts,
        squares,
        kernel=up_kernel,
        name=f"gated_residual_up_{rows}x{count}x{hidden}",
        out=(shape((rows, hidden), flat.dtype), shape((rows, count), jnp.float32)),
        grid=(hidden * count // (16 * UP_WARPS) + (inject is not None),),
        num_warps=UP_WARPS,
        EPS=eps,
        W=UP_WARPS,
        **sizes,
    )
    return (
        streams if pending is None else new.reshape(streams.shape),
        x.reshape(batch, time, hidden),
        None if inject is None else wanted.reshape(batch, time, count),
    )


@triton.jit
def _lines(W: tl.constexpr):
    """(warp, row of its tile) of the 16 W rows of a chunk, in the order of `product`."""
    line = tl.arange(0, 16 * W)
    return line // 8 % W, line // (8 * W) * 8 + line % 8


@triton.jit
def down_kernel(
    streams,
    weights,
    y,
    norm,
    down,
    inject,
    up,
    new,
    parts,
    squares,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    PENDING: tl.constexpr,
    TILES: tl.constexpr,
    W: tl.constexpr,
):
    """Sums of 16 outputs over a stream: grid (R, TILES).

    Args:
        streams: [T, R D].
        weights: with which `y` is injected [T, R].
        y: output of the sublayer before [T, D].
        norm: gain minus one [R D].
        down: low-rank projection [L, R D].
        inject: projection to the injection weights [R, R D].
        up: what the next launch reads [R D, L].
        new: streams with `y` in them [T, R D].
        parts: sums without the norm's factors [R, T, L + 16].
        squares: sums of the streams' squares [R, T].
        T: rows, up to 8.
        R: streams.
        D: channels of a stream.
        L: rank.
        PENDING: whether there is `y`.
        TILES: L / 16, and one for the injection weights.
        W: warps.
    """
    stream, tile = tl.program_id(0), tl.program_id(1)
    STEPS: tl.constexpr = D // (32 * W)
    columns = stream * D
    warp, row = _lines(W)
    if tile < L // 16:
        matrix = down + tile * (16 * R * D)
    else:
        # rows past the last are the last: what comes of them is not stored
        matrix = inject
        row = tl.minimum(row, R - 1)
    chunk = tl.arange(0, 32)
    w = matrix + columns + (row * (R * D) + warp * 32)[:, None] + chunk[None, :]
    line = tl.arange(0, 8 * W)
    token = line % 8
    channel = line // 8 * 32
    live = (token < T)[:, None]
    s = streams + columns + (token * (R * D) + channel)[:, None] + chunk[None, :]
    more = y + (token * D + channel)[:, None] + chunk[None, :]
    gains = norm + columns + channel[:, None] + chunk[None, :]
    scale = 0.0
    if PENDING:
        scale = tl.load(weights + token * R + stream, token < T, 0.0)[:, None]
    tiles, values, extra, gain = (), (), (), ()
    for i in tl.static_range(STEPS):
        tiles = tiles + (tl.load(w + i * (32 * W)),)  # noqa: RUF005
    for i in tl.static_range(STEPS):
        values = values + (tl.load(s + i * (32 * W), live, 0.0),)  # noqa: RUF005
        gain = gain + (tl.load(gains + i * (32 * W)),)  # noqa: RUF005
        if PENDING:
            extra = extra + (tl.load(more + i * (32 * W), live, 0.0),)  # noqa: RUF005
    # the assembler would put loads off to save registers
    tl.debug_barrier()
    updated = ()
    for i in tl.static_range(STEPS):
        value = values[i]
        if PENDING:
            value = added(value, extra[i], scale)
        updated = updated + (value,)  # noqa: RUF005
    if tile == TILES - 1:
        square = tl.zeros((8 * W, 32), tl.float32)
        for i in tl.static_range(STEPS):
            if PENDING:
                place = (token * (R * D) + channel)[:, None] + chunk[None, :]
                tl.store(new + columns + i * (32 * W) + place, updated[i], live)
            exact = updated[i].to(tl.float32)
            square += exact * exact
        each = tl.sum(tl.reshape(tl.sum(square, axis=1), (W, 8)), axis=0)
        tl.store(squares + stream * T + tl.arange(0, 8), each, tl.arange(0, 8) < T)
    even, odd = tl.zeros((W, 16, 8), tl.float32), tl.zeros((W, 16, 8), tl.float32)
    for i in tl.static_range(STEPS):
        operand = (arranged(gained(updated[i], gain[i]), W),)
        # a chain of products waits for itself: two of half the length
        if i % 2:
            odd = product(tiles[i], 1.0, operand, odd, BF16, W)
        else:
            even = product(tiles[i], 1.0, operand, even, BF16, W)
    ask(up, tile * R + stream, R * TILES, L * R * D)
    first = parts + stream * T * (L + 16) + tile * 16
    total = tl.sum(tl.sum(tl.join(even, odd), axis=3), axis=0)
    output = tl.arange(0, 16)[:, None]
    token = tl.arange(0, 8)[None, :]
    there = (token < T) & (tile * 16 + output < L + R)
    tl.store(first + token * (L + 16) + output, total, there)


@triton.jit
def _sigmoid(x):
    """By the hardware's approximations, which are exact to 2**-22."""
    e = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, True, 1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], tl.float32, True, 1
    )


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
    EPS: tl.constexpr,
    W: tl.constexpr,
):
    """The mean over streams of 16 channels: grid (D / 16), and one for the injection weights.

    Args:
        streams: with everything in them [T, R D].
        norm: gain minus one [R D].
        up: gates' projection [R D, L].
        parts: of `down_kernel`.
        squares: of `down_kernel`.
        x: [T, D].
        wanted: injection weights [T, R].
        T: rows, up to 8.
        R: streams, 4.
        D: channels of a stream.
        L: rank.
        EPS: of the norm.
        W: warps, which take chunks of 32 columns in turn.
    """
    if tl.program_id(0) < D // (W * 16 // R):
        _gated_mean(streams, norm, up, parts, squares, x, T, R, D, L, EPS, W)
    else:
        _store_wanted(parts, squares, wanted, T, R, D, L, EPS)


@triton.jit
def _gated_mean(
    streams,
    norm,
    up,
    parts,
    squares,
    x,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    EPS: tl.constexpr,
    W: tl.constexpr,
):
    """`up_kernel` but for the injection weights."""
    EACH: tl.constexpr = 16 // R
    STEPS: tl.constexpr = (L // 32 + W - 1) // W
    first = tl.program_id(0) * (W * EACH)
    # W chunks of 32 columns in a step, of each warp's 16 rows: R streams of EACH channels
    line = tl.arange(0, 16 * W * W)
    inner = line // (8 * W) % 2 * 8 + line % 8
    ahead = line // (16 * W)
    row = inner // EACH * D + first + line // 8 % W * EACH + inner % EACH
    w = up + (row * L + ahead * 32)[:, None] + tl.arange(0, 32)[None, :]
    tiles = ()
    for i in tl.static_range(STEPS):
        there = ((ahead + i * W) * 32 < L)[:, None]
        tiles = tiles + (tl.load(w + i * 32 * W, there, 0.0),)  # noqa: RUF005
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
    value = tl.load(streams + row * (R * D) + inner // EACH * D + channel, row < T, 0.0)
    gain = tl.load(norm + inner // EACH * D + channel)
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
            z = tl.reshape((z * _sigmoid(z)).to(tl.bfloat16), (W, 8, 4, 2, 2, 2))
            z = tl.reshape(tl.permute(z, (0, 5, 3, 2, 4, 1)), (1, W * 32, 8))
            a = tl.reshape(tiles[i], (W, 2, W, 8, 4, 2, 2, 2))
            a = tl.permute(a, (2, 1, 3, 0, 5, 6, 4, 7))
            a = tl.reshape(a, (W, 16, W * 32))
            own = tl.dot(a, tl.broadcast_to(z, (W, W * 32, 8)))
            # a sum would become one chain of products, each waiting for the one before
            total = tl.sum(tl.join(total, own), axis=3)
        gated = tl.reshape(_sigmoid(total) * normed.to(tl.float32), (W, R, EACH, 8))
        mean = tl.sum(gated, axis=1) / R
        own = first + tl.arange(0, W)[:, None, None] * EACH + tl.arange(0, EACH)[None, :, None]
        tl.store(x + row * D + own, mean.to(x.dtype.element_ty), row < T)


@triton.jit
def _store_wanted(
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
    tl.store(wanted + row * R + own, 2.0 * _sigmoid(logits), row < T)
