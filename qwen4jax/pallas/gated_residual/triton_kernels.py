# pyright: reportGeneralTypeIssues=false
"""The boundary of two sublayers in Triton: update, norm and mix in two or three launches.

`down` adds the pending output to the streams, rounds them, and multiplies them with the low-rank
projection and the injection weights. It multiplies without the norm's factor, which is one number
for each row and stream, and so applies to a sum over one stream. Up to 8 rows a program owns a few
outputs and a whole stream, and multiplies without tensor cores. Above, it owns 64 outputs and a
slice of a stream; a third launch, `squeeze`, adds the slices. `up` owns 16 hidden channels of all
streams: their gates, and the mean over streams.

Floor at the released size: 13.2 MB of weights, 3.1 us at 4.3 TB/s, and about 1.2 us for each
launch that waits for another. Sums are in a fixed order, so that results repeat bit for bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

FEW = 8
# columns of the sums beside the low-rank ones: room for the injection weights' logits
_EXTRA = 16
_CHANNELS = 16


def boundary(streams, pending, norm, down, up, inject, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    flat = streams.reshape(rows, count * hidden)
    if pending is not None:
        pending = (pending[0].reshape(rows, count), pending[1].reshape(rows, hidden))
    sizes = dict(ROWS=rows, STREAMS=count, HIDDEN=hidden, RANK=rank)
    if rows <= FEW:
        new, sums, factors = _down_few(flat, pending, norm, down, inject, sizes, eps)
    else:
        new, parts, squares = _down_many(flat, pending, norm, down, inject, sizes)
        sums, factors = _squeezed(parts, squares, sizes, eps)
    # 16 is the fewest that wgmma is used for
    block_rows = max(16, min(32, triton.next_power_of_2(rows)))
    x, weights = triton_call(
        new,
        norm,
        up,
        sums,
        factors,
        kernel=_up,
        name=f"gated_residual_up_{rows}",
        out=(
            jax.ShapeDtypeStruct((rows, hidden), flat.dtype),
            jax.ShapeDtypeStruct((rows, count), jnp.float32),
        ),
        grid=(triton.cdiv(rows, block_rows), hidden // _CHANNELS),
        num_warps=8,
        SLICES=sums.shape[0],
        INJECT=inject is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_D=_CHANNELS,
        BLOCK_L=triton.next_power_of_2(rank),
        **sizes,
    )
    return (
        new.reshape(streams.shape),
        x.reshape(batch, time, hidden),
        None if inject is None else weights.reshape(batch, time, count),
    )


def _width(hidden: int, most: int) -> int:
    """The largest power of two up to `most` that divides a stream."""
    return min(most, hidden & -hidden)


def _down_few(flat: Any, pending: Any, norm: Any, down: Any, inject: Any, sizes: Any, eps: float):
    """The streams with the update, sums by stream with the norm in them, the norm's factors."""
    rows, count, rank = sizes["ROWS"], sizes["STREAMS"], sizes["RANK"]
    block_rows = triton.next_power_of_2(rows)
    outputs = 8 if block_rows <= 4 else 4
    new, sums, factors = triton_call(
        *_arguments(flat, pending, norm, down, inject),
        kernel=_down_few_kernel,
        name=f"gated_residual_down_{rows}",
        out=(
            jax.ShapeDtypeStruct(flat.shape if pending is not None else (1, 1), flat.dtype),
            jax.ShapeDtypeStruct((count, rows, rank + _EXTRA), jnp.float32),
            jax.ShapeDtypeStruct((count, rows), jnp.float32),
        ),
        grid=(count, rank // outputs + triton.cdiv(count, outputs) * (inject is not None)),
        num_warps=8,
        PENDING=pending is not None,
        EPS=eps,
        BLOCK_ROWS=block_rows,
        BLOCK_N=outputs,
        BLOCK_K=_width(sizes["HIDDEN"], 512),
        **sizes,
    )
    return (flat if pending is None else new), sums, factors


def _down_many(flat: Any, pending: Any, norm: Any, down: Any, inject: Any, sizes: Any):
    """The streams with the update, sums and squares by slice without the norm."""
    rows, count, rank, hidden = (sizes[n] for n in ("ROWS", "STREAMS", "RANK", "HIDDEN"))
    block_rows = max(16, min(32, triton.next_power_of_2(rows)))
    width = _width(hidden, 512)
    slices = count * hidden // width
    new, parts, squares = triton_call(
        *_arguments(flat, pending, norm, down, inject),
        kernel=_down_many_kernel,
        name=f"gated_residual_down_{rows}",
        out=(
            jax.ShapeDtypeStruct(flat.shape if pending is not None else (1, 1), flat.dtype),
            jax.ShapeDtypeStruct((slices, rows, rank + _EXTRA), jnp.float32),
            jax.ShapeDtypeStruct((slices, rows), jnp.float32),
        ),
        # blocks of rows next to each other: a weight's second reader finds it in L2
        grid=(triton.cdiv(rows, block_rows), triton.cdiv(rank, 64) + (inject is not None), slices),
        num_stages=4,
        PENDING=pending is not None,
        BLOCK_ROWS=block_rows,
        WIDTH=width,
        BLOCK_K=min(width, 128),
        **sizes,
    )
    return (flat if pending is None else new), parts, squares


def _arguments(flat: Any, pending: Any, norm: Any, down: Any, inject: Any) -> tuple[Any, ...]:
    """Arrays of a kernel; what it has no use for is another array's pointer."""
    weights, y = (norm, flat) if pending is None else pending
    return flat, weights, y, norm, down, (down if inject is None else inject)


def _squeezed(parts: Any, squares: Any, sizes: Any, eps: float) -> Any:
    """Sums over all slices with the norm in them, [1, rows, columns], and the norm's factors."""
    rows, width = sizes["ROWS"], parts.shape[2]
    return triton_call(
        parts,
        squares,
        kernel=_squeeze,
        name=f"gated_residual_squeeze_{rows}",
        out=(
            jax.ShapeDtypeStruct((1, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((sizes["STREAMS"], rows), jnp.float32),
        ),
        # little work a program: latency counts, so there are many
        grid=(triton.cdiv(rows, 8), width // 16),
        num_warps=1,
        EACH=parts.shape[0] // sizes["STREAMS"],
        EPS=eps,
        BLOCK_ROWS=8,
        BLOCK_L=16,
        **sizes,
    )


@triton.jit
def _updated(streams, y, scale, place, channel_place, live, PENDING: tl.constexpr):
    """The streams' values as they are stored, with the pending output in them, in float32."""
    value = tl.load(streams + place, mask=live, other=0.0)
    if PENDING:
        added = tl.load(y + channel_place, mask=live, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + scale[:, None] * added).to(tl.bfloat16)
    return value


@triton.jit
def _down_few_kernel(
    streams, weights, y, norm, down, inject, new, sums, factors, PENDING: tl.constexpr,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(0)
    tile = tl.program_id(1)
    rows = tl.arange(0, BLOCK_ROWS)
    live = (rows < ROWS)[:, None]
    outputs = tl.arange(0, BLOCK_N)
    # the last tiles are the injection weights'
    low: tl.constexpr = RANK // BLOCK_N
    if tile < low:
        matrix = down + tile * BLOCK_N * (STREAMS * HIDDEN)
        there = outputs < BLOCK_N
    else:
        matrix = inject + (tile - low) * BLOCK_N * (STREAMS * HIDDEN)
        there = outputs < STREAMS - (tile - low) * BLOCK_N
    scale = tl.zeros((BLOCK_ROWS,), tl.float32)
    if PENDING:
        scale = tl.load(weights + rows * STREAMS + stream, mask=rows < ROWS, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_ROWS, BLOCK_K), tl.float32)
    square = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    for k in tl.range(0, HIDDEN, BLOCK_K, num_stages=5):
        channels = k + tl.arange(0, BLOCK_K)
        columns = stream * HIDDEN + channels
        left = tl.load(
            matrix + outputs[:, None] * (STREAMS * HIDDEN) + columns[None, :],
            mask=there[:, None], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        place = rows[:, None] * (STREAMS * HIDDEN) + columns[None, :]
        beside = rows[:, None] * HIDDEN + channels[None, :]
        value = _updated(streams, y, scale, place, beside, live, PENDING)
        if PENDING:
            if tile == 0:
                tl.store(new + place, value, mask=live)
        value = value.to(tl.float32)
        square += value * value
        gain = 1.0 + tl.load(norm + columns).to(tl.float32)
        right = (value * gain[None, :]).to(tl.bfloat16).to(tl.float32)
        acc += left.to(tl.float32)[:, None, :] * right[None, :, :]
    factor = tl.rsqrt(tl.sum(square, axis=1) / HIDDEN + EPS)
    total = tl.sum(acc, axis=2) * factor[None, :]
    base = (stream * ROWS + rows) * (RANK + 16)
    tl.store(
        sums + base[None, :] + tile * BLOCK_N + outputs[:, None], total,
        mask=(rows < ROWS)[None, :] & there[:, None],
    )  # fmt: skip
    if tile == 0:
        tl.store(factors + stream * ROWS + rows, factor, mask=rows < ROWS)


@triton.jit
def _down_many_kernel(
    streams, weights, y, norm, down, inject, new, parts, squares, PENDING: tl.constexpr,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    number = tl.program_id(2)
    stream = number // (HIDDEN // WIDTH)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = (rows < ROWS)[:, None]
    outputs = tl.arange(0, 64)
    low: tl.constexpr = (RANK + 63) // 64
    if tile < low:
        matrix = down + tile * 64 * (STREAMS * HIDDEN)
        there = tile * 64 + outputs < RANK
        first = tile * 64
    else:
        matrix = inject
        there = outputs < STREAMS
        first = RANK
    scale = tl.zeros((BLOCK_ROWS,), tl.float32)
    if PENDING:
        scale = tl.load(weights + rows * STREAMS + stream, mask=rows < ROWS, other=0.0)
    acc = tl.zeros((64, BLOCK_ROWS), tl.float32)
    square = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    for k in tl.range(0, WIDTH, BLOCK_K):
        columns = number * WIDTH + k + tl.arange(0, BLOCK_K)
        left = tl.load(
            matrix + outputs[:, None] * (STREAMS * HIDDEN) + columns[None, :],
            mask=there[:, None], other=0.0,
        )  # fmt: skip
        place = rows[:, None].to(tl.int64) * (STREAMS * HIDDEN) + columns[None, :]
        beside = rows[:, None] * HIDDEN + (columns - stream * HIDDEN)[None, :]
        value = _updated(streams, y, scale, place, beside, live, PENDING)
        if PENDING:
            if tile == 0:
                tl.store(new + place, value, mask=live)
        value = value.to(tl.float32)
        square += value * value
        gain = 1.0 + tl.load(norm + columns).to(tl.float32)
        right = (value * gain[None, :]).to(tl.bfloat16)
        acc = tl.dot(left, right.T, acc)
    base = number * ROWS + rows
    tl.store(
        parts + base[None, :] * (RANK + 16) + first + outputs[:, None], acc,
        mask=(rows < ROWS)[None, :] & there[:, None],
    )  # fmt: skip
    if tile == 0:
        tl.store(squares + base, tl.sum(square, axis=1), mask=rows < ROWS)


@triton.jit
def _squeeze(
    parts, squares, sums, factors, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, EACH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    # columns past the injection weights' were never written, and are never read
    live = (rows < ROWS)[:, None] & (columns < RANK + STREAMS)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_L), tl.float32)
    for stream in tl.static_range(STREAMS):
        own = tl.zeros((BLOCK_ROWS, BLOCK_L), tl.float32)
        square = tl.zeros((BLOCK_ROWS,), tl.float32)
        for i in tl.static_range(EACH):
            base = (stream * EACH + i) * ROWS + rows
            own += tl.load(
                parts + base[:, None] * (RANK + 16) + columns[None, :], mask=live, other=0.0
            )
            square += tl.load(squares + base, mask=rows < ROWS, other=0.0)
        factor = tl.rsqrt(square / HIDDEN + EPS)
        total += own * factor[:, None]
        if tl.program_id(1) == 0:
            tl.store(factors + stream * ROWS + rows, factor, mask=rows < ROWS)
    tl.store(sums + rows[:, None] * (RANK + 16) + columns[None, :], total, mask=live)


@triton.jit
def _added(
    sums, rows, columns, live, ROWS: tl.constexpr, STREAMS: tl.constexpr, RANK: tl.constexpr,
    SLICES: tl.constexpr,
):  # fmt: skip
    """Products with the normed streams over their number, [rows, columns]."""
    place = sums + rows[:, None] * (RANK + 16) + columns[None, :]
    total = tl.load(place, mask=live, other=0.0)
    for i in tl.static_range(1, SLICES):
        total += tl.load(place + i * ROWS * (RANK + 16), mask=live, other=0.0)
    return total / STREAMS


@triton.jit
def _up(
    streams, norm, up, sums, factors, x, weights, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, INJECT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = (rows < ROWS)[:, None]
    first = tl.program_id(1) * BLOCK_D
    # rows of `up` by (stream, channel)
    index = tl.arange(0, STREAMS * BLOCK_D)
    stream = index // BLOCK_D
    columns = stream * HIDDEN + first + index % BLOCK_D
    ranks = tl.arange(0, BLOCK_L)
    inside = (ranks < RANK)[None, :]
    # all loads are under way before the first sum: the chain of latencies is what costs here
    matrix = tl.load(
        up + columns[:, None] * RANK + ranks[None, :], mask=inside, other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    value = tl.load(
        streams + rows[:, None].to(tl.int64) * (STREAMS * HIDDEN) + columns[None, :],
        mask=live, other=0.0,
    )  # fmt: skip
    factor = tl.load(factors + stream[None, :] * ROWS + rows[:, None], mask=live, other=0.0)
    gain = 1.0 + tl.load(norm + columns).to(tl.float32)
    low = _added(sums, rows, ranks, live & inside, ROWS, STREAMS, RANK, SLICES)
    low = (low * tl.sigmoid(low)).to(tl.bfloat16)
    gates = tl.sigmoid(tl.dot(matrix, low.T))
    normed = (value.to(tl.float32) * factor * gain[None, :]).to(tl.bfloat16).to(tl.float32)
    product = tl.reshape(gates * normed.T, (STREAMS, BLOCK_D, BLOCK_ROWS))
    mean = tl.sum(product, axis=0) / STREAMS
    channels = first + tl.arange(0, BLOCK_D)
    tl.store(
        x + rows[None, :].to(tl.int64) * HIDDEN + channels[:, None],
        mean.to(x.dtype.element_ty), mask=(rows < ROWS)[None, :],
    )  # fmt: skip
    if INJECT:
        if tl.program_id(1) == 0:
            own = tl.arange(0, STREAMS)
            logits = _added(sums, rows, RANK + own, live, ROWS, STREAMS, RANK, SLICES)
            tl.store(
                weights + rows[:, None] * STREAMS + own[None, :],
                2.0 * tl.sigmoid(logits),
                mask=live,
            )
