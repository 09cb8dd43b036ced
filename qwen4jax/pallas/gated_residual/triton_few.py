# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""The boundary for up to 8 rows in two Triton launches, each one memory latency deep.

Floor at the released size: 13.2 MB of weights, 3.1 us at 4.3 TB/s, and for each launch about 1.2 us
of start and one latency. So every load of a program is under way before the first is waited for:
no loop carries loads, and weights go straight from memory to the tensor cores' registers
(`moe/triton_stored.py` says how), without shared memory. And `down` has the cache get the weights
of `up`, so that memory does not rest between the launches: in a round of 4 rows that is 0.5 us of
`down` against 1.1 us of `up` (together 13.2 us; the three launches of `triton_launches.py` are
12.9, but the round is longer by 0.08 ms: `bench/results/nvidia-h200/choices.jsonl`).

`down` multiplies 16 outputs by a stream. It adds the pending output to the streams, rounds them,
and multiplies without the norm's factor, which is one number for each row and stream, and so
applies to sums. The last tile of outputs has the fewest weights (the injection weights' few): it
stores the streams and the sums of their squares. `up` owns some channels of all streams, in such an
order that the mean over the streams stays within a warp. It adds up the sums of all streams itself:
a program that did that for all would cost another latency.

Order of sums: chunks of a warp, warps, streams. No atomics.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.moe.triton_stored import BF16, arranged, product
from qwen4jax.pallas.triton_call import triton_call

# columns of the sums beside the low-rank ones: room for the injection weights' logits
EXTRA = 16
# of an `up` program, of every stream
CHANNELS = 16
# by one thread: whoever else reads the bytes soon finds them in the cache
_ASK = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
mov.b32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, $2;
}""")


def boundary(streams, pending, norm, down, up, inject, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    flat = streams.reshape(rows, count * hidden)
    # what a kernel has no use for is another array's pointer
    weights, y = (norm, flat) if pending is None else pending
    sizes = dict(T=rows, R=count, D=hidden, L=rank)
    # chunks of 32 columns go round the warps of a `down` program
    warps = 16
    while hidden % (32 * warps):
        warps //= 2
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
    # warps of an `up` program that share a tile of 16 rows, and split its columns
    split = 2 if rank % 64 == 0 else 1
    x, wanted = triton_call(
        new,
        norm,
        up,
        parts,
        squares,
        kernel=up_kernel,
        name=f"gated_residual_up_{rows}x{count}x{hidden}",
        out=(shape((rows, hidden), flat.dtype), shape((rows, count), jnp.float32)),
        grid=(hidden // CHANNELS,),
        num_warps=CHANNELS * count // 16 * split,
        INJECT=inject is not None,
        EPS=eps,
        TILES=CHANNELS * count // 16,
        SPLIT=split,
        **sizes,
    )
    return (
        streams if pending is None else new.reshape(streams.shape),
        x.reshape(batch, time, hidden),
        None if inject is None else wanted.reshape(batch, time, count),
    )


@triton.jit
def _ask(matrix, program, PROGRAMS: tl.constexpr, SIZE: tl.constexpr):
    """Has memory send a program's share of a matrix of SIZE bfloat16 to the cache; waits not."""
    SHARE: tl.constexpr = min((SIZE + PROGRAMS * 8 - 1) // (PROGRAMS * 8) * 8, SIZE)
    first = matrix + tl.minimum(program * SHARE, SIZE - SHARE)
    tl.inline_asm_elementwise(
        _ASK, "=r,l,r", [first.to(tl.int64), SHARE * 2], dtype=tl.int32, is_pure=False, pack=1
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
    added = y + (token * D + channel)[:, None] + chunk[None, :]
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
            extra = extra + (tl.load(added + i * (32 * W), live, 0.0),)  # noqa: RUF005
    acc = tl.zeros((W, 16, 8), tl.float32)
    square = tl.zeros((8 * W, 32), tl.float32)
    for i in tl.static_range(STEPS):
        value = values[i].to(tl.float32)
        if PENDING:
            rounded = (value + scale * extra[i].to(tl.float32)).to(tl.bfloat16)
            value = rounded.to(tl.float32)
            if tile == TILES - 1:
                place = (token * (R * D) + channel)[:, None] + chunk[None, :]
                tl.store(new + columns + i * (32 * W) + place, rounded, live)
        square += value * value
        normed = (value * (1.0 + gain[i].to(tl.float32))).to(tl.bfloat16)
        acc = product(tiles[i], 1.0, (arranged(normed, W),), acc, BF16, W)
    _ask(up, tile * R + stream, R * TILES, L * R * D)
    total = tl.sum(acc, axis=0)
    outputs = tile * 16 + tl.arange(0, 16)
    rows = tl.arange(0, 8)
    tl.store(
        parts + (stream * T + rows)[None, :] * (L + 16) + outputs[:, None],
        total,
        (rows < T)[None, :] & (outputs < L + R)[:, None],
    )
    if tile == TILES - 1:
        each = tl.sum(tl.reshape(tl.sum(square, axis=1), (W, 8)), axis=0)
        tl.store(squares + stream * T + rows, each, rows < T)


@triton.jit
def _factor(squares, stream, row, T: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr):
    """The norm's factors, in the shape of `stream` and `row` together; some number past T."""
    square = tl.load(squares + stream * T + row, row < T, 0.0)
    return tl.rsqrt(square / D + EPS)


@triton.jit
def _normed(loaded, factors, FIRST: tl.constexpr, R: tl.constexpr):
    """Products with the normed streams over their number, even streams before odd ones."""
    even, odd = tl.zeros_like(loaded[FIRST]), tl.zeros_like(loaded[FIRST])
    for stream in tl.static_range(R):
        own = loaded[FIRST + stream] * factors[stream]
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
    INJECT: tl.constexpr,
    EPS: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The mean over streams of 16 / R channels a tile: grid (D R / (16 TILES)).

    Args:
        streams: with everything in them [T, R D].
        norm: gain minus one [R D].
        up: gates' projection [R D, L].
        parts: of `down_kernel`.
        squares: of `down_kernel`.
        x: [T, D].
        wanted: injection weights [T, R].
        T: rows, up to 8.
        R: streams.
        D: channels of a stream.
        L: rank.
        INJECT: whether to make them.
        EPS: of the norm.
        TILES: of 16 rows of `up`, R streams of 16 / R channels.
        SPLIT: warps of a tile.
    """
    W: tl.constexpr = TILES * SPLIT
    EACH: tl.constexpr = 16 // R
    STEPS: tl.constexpr = L // (32 * SPLIT)
    first = tl.program_id(0) * (TILES * EACH)
    warp, inner = _lines(W)
    chunk = tl.arange(0, 32)
    row = inner // EACH * D + first + warp // SPLIT * EACH + inner % EACH
    w = up + (row * L + warp % SPLIT * (STEPS * 32))[:, None] + chunk[None, :]
    tiles = ()
    for i in tl.static_range(STEPS):
        tiles = tiles + (tl.load(w + i * 32),)  # noqa: RUF005
    # [TILES, 16, 8]: what the gates are for
    index = tl.arange(0, 16)[None, :, None]
    channel = first + tl.arange(0, TILES)[:, None, None] * EACH + index % EACH
    token = tl.arange(0, 8)[None, None, :]
    value = tl.load(streams + token * (R * D) + index // EACH * D + channel, token < T, 0.0)
    gain = 1.0 + tl.load(norm + index // EACH * D + channel).to(tl.float32)
    line = tl.arange(0, 8 * SPLIT)
    loaded = ()
    for i in tl.static_range(STEPS):
        for part in tl.static_range(R):
            place = line % 8 * (L + 16) + line // 8 * (STEPS * 32) + i * 32
            sums = parts + part * (T * (L + 16)) + place[:, None] + chunk[None, :]
            loaded = loaded + (tl.load(sums, (line % 8 < T)[:, None], 0.0),)  # noqa: RUF005
    # the assembler would put the weights' loads off until the factors are there
    tl.debug_barrier()
    factors = ()
    for stream in tl.static_range(R):
        factors = factors + (_factor(squares, stream, line % 8, T, D, EPS)[:, None],)  # noqa: RUF005
    factor = _factor(squares, index // EACH, token, T, D, EPS)
    acc = tl.zeros((W, 16, 8), tl.float32)
    for i in tl.static_range(STEPS):
        low = _normed(loaded, factors, i * R, R)
        low = (low * tl.sigmoid(low)).to(tl.bfloat16)
        low = tl.broadcast_to(tl.reshape(low, (1, 8 * SPLIT, 32)), (TILES, 8 * SPLIT, 32))
        low = arranged(tl.reshape(low, (8 * W, 32)), W)
        acc = product(tiles[i], 1.0, (low,), acc, BF16, W)
    gates = tl.sigmoid(tl.sum(tl.reshape(acc, (TILES, SPLIT, 16, 8)), axis=1))
    normed = (value.to(tl.float32) * factor * gain).to(tl.bfloat16).to(tl.float32)
    mean = tl.sum(tl.reshape(gates * normed, (TILES, R, EACH, 8)), axis=1) / R
    own = first + tl.arange(0, TILES)[:, None, None] * EACH + tl.arange(0, EACH)[None, :, None]
    tl.store(x + token * D + own, mean.to(x.dtype.element_ty), token < T)
    if INJECT:  # noqa: SIM102
        if tl.program_id(0) == 0:
            _store_wanted(parts, squares, wanted, T, R, D, L, EPS)


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
    row, own = tl.arange(0, 8), tl.arange(0, R)
    loaded, factors = (), ()
    for stream in tl.static_range(R):
        place = parts + (stream * T + row)[:, None] * (L + 16) + (L + own)[None, :]
        loaded = loaded + (tl.load(place, (row < T)[:, None], 0.0),)  # noqa: RUF005
    for stream in tl.static_range(R):
        factors = factors + (_factor(squares, stream, row, T, D, EPS)[:, None],)  # noqa: RUF005
    logits = _normed(loaded, factors, 0, R)
    place = row[:, None] * R + own[None, :]
    tl.store(wanted + place, 2.0 * tl.sigmoid(logits), (row < T)[:, None])
