"""The boundary of two sublayers in Triton: update, norm and mix in two or three launches.

`down`: a program owns 16 outputs of the low-rank projection and a slice of one stream. It adds the
pending output to its slice, rounds it, and multiplies without the norm's factor, which is one
number for each row and stream and therefore goes to the sum; squares are added up beside it.
`squeeze` (where many rows would make each program of `up` add the same slices again): sums over
slices in their order, SiLU. `up`: a program owns 16 hidden channels of all streams, their gates,
and the mean over streams.

Floor at the released size: 13.2 MB of weights, 3.1 us at 4.3 TB/s; two dependent launches cost
about 1.2 us each. Sums are over slices in a fixed order, so that results repeat bit for bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

_TILE = 16
# from this many rows on, adding the slices once costs less than a launch
_SQUEEZE_FROM = 16


def boundary(streams, pending, norm, down, up, inject, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    flat = streams.reshape(rows, count * hidden)
    slices = _slices(count, hidden)
    block_rows = max(8, min(32, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_rows)
    sizes = dict(ROWS=rows, STREAMS=count, HIDDEN=hidden, RANK=rank, BLOCK_ROWS=block_rows)
    # the injection weights' logits follow the rank's outputs, in a tile of their own
    width = rank + _TILE
    outputs = rank // _TILE + (inject is not None)
    given = () if pending is None else (pending[0].reshape(rows, count), pending[1])
    given = tuple(g.reshape(rows, -1) for g in given)
    kernel = _down_first if pending is None else _down
    new, parts, squares = triton_call(
        flat,
        *given,
        norm,
        down,
        down if inject is None else inject,
        kernel=kernel,
        name=f"gated_residual_down_{rows}",
        out=(
            jax.ShapeDtypeStruct(flat.shape if pending is not None else (1, 1), flat.dtype),
            jax.ShapeDtypeStruct((slices, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((slices, rows), jnp.float32),
        ),
        grid=(row_blocks, slices, outputs),
        num_stages=3,
        SLICES=slices,
        BLOCK_K=_step(count * hidden // slices, block_rows),
        **sizes,
    )
    new = flat if pending is None else new
    squeezed = rows >= _SQUEEZE_FROM
    if squeezed:
        parts, squares = _squeezed(parts, squares, eps, sizes, slices, width)
    x, weights = triton_call(
        new,
        norm,
        up,
        parts,
        squares,
        kernel=_up,
        name=f"gated_residual_up_{rows}",
        out=(
            jax.ShapeDtypeStruct((rows, hidden), flat.dtype),
            jax.ShapeDtypeStruct((rows, count), jnp.float32),
        ),
        grid=(row_blocks, hidden // _TILE),
        num_stages=4,
        SLICES=1 if squeezed else slices,
        INJECT=inject is not None,
        EPS=eps,
        BLOCK_D=_TILE,
        BLOCK_L=next(n for n in (64, 32, 16) if rank % n == 0),
        **sizes,
    )
    return (
        new.reshape(streams.shape),
        x.reshape(batch, time, hidden),
        None if inject is None else weights.reshape(batch, time, count),
    )


def _slices(count: int, hidden: int) -> int:
    """Slices of the flattened streams, each within one stream: two a stream where that divides."""
    return count * (2 if hidden % 512 == 0 else 1)


def _step(width: int, block_rows: int) -> int:
    """Inputs of a step of `down`, all four warps' together: as many as registers hold."""
    most = 4096 // block_rows
    return next(step for step in (256, 128, 64) if width % step == 0 and step <= most)


def _squeezed(parts: Any, squares: Any, eps: float, sizes: Any, slices: int, width: int) -> Any:
    rows, count = sizes["ROWS"], sizes["STREAMS"]
    # little work a program: latency counts, so there are many
    sizes = sizes | {"BLOCK_ROWS": 8}
    return triton_call(
        parts,
        squares,
        kernel=_squeeze,
        name=f"gated_residual_squeeze_{rows}",
        out=(
            jax.ShapeDtypeStruct((1, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((count, rows), jnp.float32),
        ),
        grid=(triton.cdiv(rows, 8), width // _TILE),
        num_warps=1,
        SLICES=slices,
        EPS=eps,
        BLOCK_L=_TILE,
        **sizes,
    )


@triton.jit
def _down_tile(
    streams, weights, y, norm, down, inject, new, parts, squares, PENDING: tl.constexpr,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = STREAMS * HIDDEN
    slice_width: tl.constexpr = width // SLICES
    # four products, one a warp: [4, outputs, inputs / 4] x [4, inputs / 4, rows]
    part: tl.constexpr = BLOCK_K // 4
    number = tl.program_id(1)
    tile = tl.program_id(2)
    stream = number // (SLICES // STREAMS)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = (rows < ROWS)[None, :, None]
    inputs = tl.arange(0, 4)[:, None] * part + tl.arange(0, part)[None, :]
    outputs = tl.arange(0, 16)
    if tile < RANK // 16:
        matrix = down + tile * 16 * width
        there = outputs < 16
    else:
        matrix = inject
        there = outputs < STREAMS
    if PENDING:
        scale = tl.load(weights + rows * STREAMS + stream, mask=rows < ROWS, other=0.0)
    acc = tl.zeros((4, 16, BLOCK_ROWS), tl.float32)
    square = tl.zeros((4, BLOCK_ROWS), tl.float32)
    for k in tl.range(0, slice_width, BLOCK_K):
        columns = number * slice_width + k + inputs
        left = tl.load(
            matrix + outputs[None, :, None] * width + columns[:, None, :],
            mask=there[None, :, None], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        place = rows[None, :, None].to(tl.int64) * width + columns[:, None, :]
        value = tl.load(streams + place, mask=live, other=0.0).to(tl.float32)
        if PENDING:
            channel = columns - stream * HIDDEN
            added = tl.load(
                y + rows[None, :, None] * HIDDEN + channel[:, None, :], mask=live, other=0.0
            )
            value += scale[None, :, None] * added.to(tl.float32)
            # the norm reads the stream as it is stored
            stored = value.to(tl.bfloat16)
            value = stored.to(tl.float32)
            if tile == 0:
                tl.store(new + place, stored, mask=live)
        if tile == 0:
            square += tl.sum(value * value, axis=2)
        gain = 1.0 + tl.load(norm + columns).to(tl.float32)
        right = (value * gain[:, None, :]).to(tl.bfloat16)
        acc = tl.dot(left, tl.permute(right, (0, 2, 1)), acc)
    total = tl.sum(acc, axis=0)
    base = number * ROWS + rows
    tl.store(
        parts + base[None, :] * (RANK + 16) + tile * 16 + outputs[:, None], total,
        mask=(rows < ROWS)[None, :] & (outputs < 16)[:, None],
    )  # fmt: skip
    if tile == 0:
        tl.store(squares + base, tl.sum(square, axis=0), mask=rows < ROWS)


@triton.jit
def _down(
    streams, weights, y, norm, down, inject, new, parts, squares,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _down_tile(
        streams, weights, y, norm, down, inject, new, parts, squares, True,
        ROWS, STREAMS, HIDDEN, RANK, SLICES, BLOCK_ROWS, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _down_first(
    streams, norm, down, inject, new, parts, squares,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _down_tile(
        streams, squares, streams, norm, down, inject, new, parts, squares, False,
        ROWS, STREAMS, HIDDEN, RANK, SLICES, BLOCK_ROWS, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _inverse_rms(
    squares, rows, stream, ROWS: tl.constexpr, EACH: tl.constexpr, HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Of one stream's rows, from the sums of squares of its slices."""
    total = tl.zeros(rows.shape, tl.float32)
    for i in tl.static_range(EACH):
        total += tl.load(squares + (stream * EACH + i) * ROWS + rows, mask=rows < ROWS, other=0.0)
    return tl.rsqrt(total / HIDDEN + EPS)


@triton.jit
def _sum_of_slices(
    parts, squares, rows, columns, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The product with the normed streams, [rows, columns], from those of slices without norm."""
    each: tl.constexpr = SLICES // STREAMS
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for stream in tl.static_range(STREAMS):
        own = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
        for i in tl.static_range(each):
            base = (stream * each + i) * ROWS + rows
            place = parts + base[:, None] * (RANK + 16) + columns[None, :]
            own += tl.load(place, mask=(rows < ROWS)[:, None], other=0.0)
        total += own * _inverse_rms(squares, rows, stream, ROWS, each, HIDDEN, EPS)[:, None]
    return total / STREAMS


@triton.jit
def _squeeze(
    parts, squares, sums, factors, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    total = _sum_of_slices(parts, squares, rows, columns, ROWS, STREAMS, HIDDEN, RANK, SLICES, EPS)
    tl.store(
        sums + rows[:, None] * (RANK + 16) + columns[None, :], total, mask=(rows < ROWS)[:, None]
    )
    if tl.program_id(1) == 0:
        for stream in tl.static_range(STREAMS):
            factor = _inverse_rms(squares, rows, stream, ROWS, SLICES // STREAMS, HIDDEN, EPS)
            tl.store(factors + stream * ROWS + rows, factor, mask=rows < ROWS)


@triton.jit
def _low(
    parts, squares, rows, columns, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Sums of slices, made here or by `squeeze`."""
    if SLICES == 1:
        place = parts + rows[:, None] * (RANK + 16) + columns[None, :]
        return tl.load(place, mask=(rows < ROWS)[:, None], other=0.0)
    return _sum_of_slices(parts, squares, rows, columns, ROWS, STREAMS, HIDDEN, RANK, SLICES, EPS)


@triton.jit
def _up(
    streams, norm, up, parts, squares, x, weights, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, INJECT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(1) * BLOCK_D
    # rows of `up` by (stream, channel)
    index = tl.arange(0, STREAMS * BLOCK_D)
    stream = index // BLOCK_D
    channel = first + index % BLOCK_D
    acc = tl.zeros((STREAMS * BLOCK_D, BLOCK_ROWS), tl.float32)
    for start in tl.range(0, RANK, BLOCK_L):
        columns = start + tl.arange(0, BLOCK_L)
        place = (stream * HIDDEN + channel)[:, None] * RANK + columns[None, :]
        matrix = tl.load(up + place, eviction_policy="evict_first")
        low = _low(parts, squares, rows, columns, ROWS, STREAMS, HIDDEN, RANK, SLICES, EPS)
        low = (low * tl.sigmoid(low)).to(tl.bfloat16)
        acc = tl.dot(matrix, low.T, acc)
    gates = tl.sigmoid(acc)
    factor = tl.zeros((STREAMS * BLOCK_D, BLOCK_ROWS), tl.float32)
    for s in tl.static_range(STREAMS):
        if SLICES == 1:
            own = tl.load(squares + s * ROWS + rows, mask=rows < ROWS, other=0.0)
        else:
            own = _inverse_rms(squares, rows, s, ROWS, SLICES // STREAMS, HIDDEN, EPS)
        factor = tl.where((stream == s)[:, None], own[None, :], factor)
    columns = stream * HIDDEN + channel
    live = (rows < ROWS)[None, :]
    value = tl.load(
        streams + rows[None, :].to(tl.int64) * (STREAMS * HIDDEN) + columns[:, None],
        mask=live, other=0.0,
    )  # fmt: skip
    gain = 1.0 + tl.load(norm + columns).to(tl.float32)
    normed = (value.to(tl.float32) * factor * gain[:, None]).to(tl.bfloat16)
    product = tl.reshape(gates * normed.to(tl.float32), (STREAMS, BLOCK_D, BLOCK_ROWS))
    mean = tl.sum(product, axis=0) / STREAMS
    channels = first + tl.arange(0, BLOCK_D)
    tl.store(
        x + rows[None, :].to(tl.int64) * HIDDEN + channels[:, None],
        mean.to(x.dtype.element_ty),
        mask=live,
    )
    if INJECT:
        if tl.program_id(1) == 0:
            target = tl.arange(0, STREAMS)
            logits = _low(
                parts, squares, rows, RANK + target, ROWS, STREAMS, HIDDEN, RANK, SLICES, EPS
            )
            tl.store(
                weights + rows[:, None] * STREAMS + target[None, :], 2.0 * tl.sigmoid(logits),
                mask=(rows < ROWS)[:, None],
            )  # fmt: skip
