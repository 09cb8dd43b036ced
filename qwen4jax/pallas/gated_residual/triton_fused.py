# pyright: reportGeneralTypeIssues=false
"""The boundary of two sublayers in one Triton launch: every weight is asked for at the start.

Floor at the released size and few rows: 13.2 MB of weights, 3.1 us at 4.3 TB/s. What costs more is
latency. A launch for each product starts its weights only when the one before has ended, and about
1.2 us pass between two. Here the programs of both products run side by side, in three roles by
number: `down` multiplies 16 or more low-rank features by a slice of one stream and waits for
nobody; `add` (many rows only) adds the slices up; `up` asks for its gates' weights, and then waits
for the others at a counter in memory. Who waits has a higher number than whom it waits for, so
that it can keep nobody from running, whatever else does, and however many fit on the device.

The counters are zero before and after: the last program to have waited puts them back. They are
an operand that the caller hands from one call to the next; making them costs a launch.

The streams are multiplied without their norm's factor, which is one number for each row and
stream: it is applied to the sums. Their squares are added up beside the product.

Order of sums: chunks of a slice in the tensor cores, warps, slices, streams. No atomics on floats.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        outputs: low-rank features of a `down` program.
        slices: of a stream, one for each `down` program of the same features.
        batch: columns side by side that warps multiply for themselves, of 64 each.
        channels: of an `up` program, of every stream.
        add: columns of an `add` program, 0 for none: then each `up` adds up for itself.
        warps: of every program.
        stages: of the pipeline over a slice's chunks.
    """

    outputs: int
    slices: int
    batch: int
    channels: int
    add: int
    warps: int
    stages: int = 5


def cut(rows: int, hidden: int, rank: int) -> Cut:
    """What was found best for a number of rows."""
    few = rows <= 8
    batch = 8
    while hidden % (64 * batch * (1 if few else 2)) and batch > 1:
        batch //= 2
    slices = 1 if few or hidden % (128 * batch) else 2
    outputs = 16 if few or rank % 32 else 32
    # one program a multiprocessor: 84 + 40 at the released size and few rows
    return Cut(outputs, slices, batch, 64, 0 if few else 128, 8)


def boundary(streams, pending, norm, down, up, inject, *, eps, barrier=None, how: Any = None):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    how = how or cut(rows, hidden, rank)
    counters = jnp.zeros((4,), jnp.int32) if barrier is None else barrier
    flat = streams.reshape(rows, count * hidden)
    weights, y = (norm, flat) if pending is None else pending
    parts = count * how.slices
    groups = rank // how.outputs + (inject is not None)
    adds = triton.cdiv(rank + count, how.add) if how.add else 0
    ups = hidden // how.channels
    shape = jax.ShapeDtypeStruct
    new, _, _, x, wanted, counters = triton_call(
        flat,
        weights.reshape(rows, count) if pending is not None else weights,
        y.reshape(rows, -1),
        norm,
        down,
        up,
        down if inject is None else inject,
        counters,
        kernel=_fused,
        name=f"gated_residual_boundary_{rows}x{count}x{hidden}",
        out=(
            shape(flat.shape if pending is not None else (1, 1), flat.dtype),
            # beside the low-rank columns 16: logits of the injection weights, then squares
            shape((parts, rows, rank + 16), jnp.float32),
            shape((rows, rank + 16), jnp.float32),
            shape((rows, hidden), flat.dtype),
            shape((rows, count), jnp.float32),
            shape(counters.shape, counters.dtype),
        ),
        aliases={7: 5},
        grid=(parts * groups + adds + ups,),
        num_warps=how.warps,
        num_stages=1,
        PENDING=pending is not None,
        INJECT=inject is not None,
        ROWS=rows,
        STREAMS=count,
        HIDDEN=hidden,
        RANK=rank,
        EPS=eps,
        PARTS=parts,
        GROUPS=groups,
        ADDS=adds,
        UPS=ups,
        OUTPUTS=how.outputs,
        SLICES=how.slices,
        BATCH=how.batch,
        CHANNELS=how.channels,
        ADD=max(how.add, 1),
        BLOCK_ROWS=max(8, triton.next_power_of_2(rows)),
        BLOCK_UP=max(16, triton.next_power_of_2(rows)),
        BLOCK_L=rank & -rank,
        CHUNKS=rank // (rank & -rank),
        STAGES=how.stages,
    )
    return (
        streams if pending is None else new.reshape(streams.shape),
        x.reshape(batch, time, hidden),
        None if inject is None else wanted.reshape(batch, time, count),
        None if barrier is None else counters,
    )


@triton.jit
def _signal(counter):
    """After everything that this program stored."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _wait(counter, COUNT: tl.constexpr):
    """Until `COUNT` programs have signalled; what they stored is seen afterwards."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < COUNT:
        seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _fused(
    streams, weights, y, norm, down, up, inject, counters, new, sums, low, x, wanted,
    PENDING: tl.constexpr, INJECT: tl.constexpr, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, EPS: tl.constexpr, PARTS: tl.constexpr,
    GROUPS: tl.constexpr, ADDS: tl.constexpr, UPS: tl.constexpr, OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr, BATCH: tl.constexpr, CHANNELS: tl.constexpr, ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_UP: tl.constexpr, BLOCK_L: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    if number < PARTS * GROUPS:
        _down(
            number % PARTS, number // PARTS, streams, weights, y, norm, down, inject, sums,
            PENDING, ROWS, STREAMS, HIDDEN, RANK, OUTPUTS, SLICES, BATCH, BLOCK_ROWS, STAGES,
        )  # fmt: skip
        _signal(counters)
    elif number < PARTS * GROUPS + ADDS:
        _wait(counters, PARTS * GROUPS)
        _add(
            number - PARTS * GROUPS, sums, low, wanted, INJECT, ROWS, STREAMS, HIDDEN, RANK, EPS,
            SLICES, ADD, BLOCK_UP,
        )  # fmt: skip
        _signal(counters + 1)
    else:
        _up(
            number - PARTS * GROUPS - ADDS, streams, weights, y, norm, up, counters, new, sums,
            low, x, wanted, PENDING, INJECT, ROWS, STREAMS, HIDDEN, RANK, EPS, PARTS * GROUPS,
            ADDS, UPS, SLICES, CHANNELS, BLOCK_UP, BLOCK_L, CHUNKS,
        )  # fmt: skip


@triton.jit
def _down(
    part, group, streams, weights, y, norm, down, inject, sums, PENDING: tl.constexpr,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr,
    OUTPUTS: tl.constexpr, SLICES: tl.constexpr, BATCH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over one slice of a stream, and its squares."""
    stream = part // SLICES
    start = part % SLICES * (HIDDEN // SLICES)
    width: tl.constexpr = BATCH * 64
    chunks: tl.constexpr = HIDDEN // SLICES // width
    outputs = tl.arange(0, OUTPUTS)
    # the last group is the injection weights'
    if group * OUTPUTS < RANK:
        matrix = down + group * OUTPUTS * (STREAMS * HIDDEN)
        there = outputs < OUTPUTS
    else:
        matrix = inject
        there = outputs < STREAMS
    rows = tl.arange(0, BLOCK_ROWS)
    live = (rows < ROWS)[None, :, None]
    channels = start + tl.arange(0, BATCH)[:, None, None] * 64 + tl.arange(0, 64)[None, None, :]
    columns = stream * HIDDEN + channels
    place = streams + rows[None, :, None] * (STREAMS * HIDDEN) + columns
    beside = y + rows[None, :, None] * HIDDEN + channels
    left = matrix + outputs[None, :, None] * (STREAMS * HIDDEN) + columns
    scale = tl.zeros((BLOCK_ROWS,), tl.float32)
    if PENDING:
        scale = tl.load(weights + rows * STREAMS + stream, mask=rows < ROWS, other=0.0)
    square = tl.zeros((BATCH, BLOCK_ROWS, 64), tl.float32)
    acc = tl.zeros((BATCH, OUTPUTS, BLOCK_ROWS), tl.float32)
    # a pipeline as deep as the loop is long: all chunks are under way before the first is needed.
    # Unrolled, the compiler changes the layout of each load before it issues the next
    for i in tl.range(0, chunks, num_stages=STAGES):
        tile = tl.load(
            left + i * width, mask=there[None, :, None], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        value = tl.load(place + i * width, mask=live, other=0.0).to(tl.float32)
        if PENDING:
            added = tl.load(beside + i * width, mask=live, other=0.0).to(tl.float32)
            value = (value + scale[None, :, None] * added).to(tl.bfloat16).to(tl.float32)
        square += value * value
        gain = 1.0 + tl.load(norm + columns + i * width).to(tl.float32)
        right = (value * gain).to(tl.bfloat16)
        acc = tl.dot(tile, tl.permute(right, (0, 2, 1)), acc)
    total = tl.sum(acc, axis=0)
    base = (part * ROWS + rows) * (RANK + 16)
    tl.store(
        sums + base[None, :] + group * OUTPUTS + outputs[:, None], total,
        mask=(rows < ROWS)[None, :] & there[:, None],
    )  # fmt: skip
    if group == 0:
        squares = tl.sum(tl.sum(square, axis=2), axis=0)
        tl.store(sums + base + RANK + STREAMS, squares, mask=rows < ROWS)


@triton.jit
def _factor(
    sums, stream, rows, live, ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    RANK: tl.constexpr, EPS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """The norm's factors of rows and streams, in the shape of `rows` and `stream` together."""
    place = sums + (stream * SLICES * ROWS + rows) * (RANK + 16) + RANK + STREAMS
    square = tl.load(place, mask=live, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, SLICES):
        square += tl.load(
            place + i * ROWS * (RANK + 16), mask=live, other=0.0, cache_modifier=".cg"
        )
    return tl.rsqrt(square / HIDDEN + EPS)


@triton.jit
def _summed(
    sums, rows, columns, there, ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    RANK: tl.constexpr, EPS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Products with the normed streams over their number, [rows, columns]."""
    live = rows < ROWS
    place = sums + rows[:, None] * (RANK + 16) + columns[None, :]
    mask = live[:, None] & there[None, :]
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for stream in tl.static_range(STREAMS):
        own = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
        for i in tl.static_range(SLICES):
            offset = (stream * SLICES + i) * ROWS * (RANK + 16)
            own += tl.load(place + offset, mask=mask, other=0.0, cache_modifier=".cg")
        factor = _factor(sums, stream, rows, live, ROWS, STREAMS, HIDDEN, RANK, EPS, SLICES)
        total += own * factor[:, None]
    return total / STREAMS


@triton.jit
def _add(
    unit, sums, low, wanted, INJECT: tl.constexpr, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, EPS: tl.constexpr, SLICES: tl.constexpr,
    ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Low-rank features after SiLU for all, or the injection weights."""
    rows = tl.arange(0, BLOCK_ROWS)
    columns = unit * ADD + tl.arange(0, ADD)
    last = RANK + STREAMS if INJECT else RANK
    total = _summed(
        sums, rows, columns, columns < last, ROWS, STREAMS, HIDDEN, RANK, EPS, SLICES
    )  # fmt: skip
    opened = tl.sigmoid(total)
    tl.store(
        low + rows[:, None] * (RANK + 16) + columns[None, :], total * opened,
        mask=(rows < ROWS)[:, None] & (columns < RANK)[None, :],
    )  # fmt: skip
    if INJECT:
        tl.store(
            wanted + rows[:, None] * STREAMS + (columns - RANK)[None, :], 2.0 * opened,
            mask=(rows < ROWS)[:, None] & ((columns >= RANK) & (columns < last))[None, :],
        )  # fmt: skip


@triton.jit
def _low(
    sums, low, rows, ranks, ROWS: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    RANK: tl.constexpr, EPS: tl.constexpr, SLICES: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Low-rank features, [rows, ranks]."""
    if ADDS:
        value = tl.load(
            low + rows[:, None] * (RANK + 16) + ranks[None, :],
            mask=(rows < ROWS)[:, None] & (ranks < RANK)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
    else:
        total = _summed(
            sums, rows, ranks, ranks < RANK, ROWS, STREAMS, HIDDEN, RANK, EPS, SLICES
        )  # fmt: skip
        value = total * tl.sigmoid(total)
    return value.to(tl.bfloat16)


@triton.jit
def _up(
    unit, streams, weights, y, norm, up, counters, new, sums, low, x, wanted,
    PENDING: tl.constexpr, INJECT: tl.constexpr, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, RANK: tl.constexpr, EPS: tl.constexpr, DOWNS: tl.constexpr,
    ADDS: tl.constexpr, UPS: tl.constexpr, SLICES: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_L: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Gates of some channels of all streams, the mean over the streams, and their update."""
    rows = tl.arange(0, BLOCK_ROWS)
    live = rows < ROWS
    # rows of `up` by (stream, channel)
    index = tl.arange(0, STREAMS * CHANNELS)
    stream = index // CHANNELS
    channel = unit * CHANNELS + index % CHANNELS
    columns = stream * HIDDEN + channel
    ranks = tl.arange(0, BLOCK_L)
    # the streams' channels first, for the weights would hold them up
    place = rows[:, None].to(tl.int64) * (STREAMS * HIDDEN) + columns[None, :]
    value = tl.load(streams + place, mask=live[:, None], other=0.0)
    gain = 1.0 + tl.load(norm + columns).to(tl.float32)
    scale, added = value, value
    if PENDING:
        scale = tl.load(
            weights + rows[:, None] * STREAMS + stream[None, :], mask=live[:, None], other=0.0
        )
        added = tl.load(
            y + rows[:, None] * HIDDEN + channel[None, :], mask=live[:, None], other=0.0
        )
    tiles = ()
    for i in tl.static_range(CHUNKS):
        tiles = tiles + (  # noqa: RUF005
            tl.load(
                up + columns[:, None] * RANK + i * BLOCK_L + ranks[None, :],
                eviction_policy="evict_first",
            ),
        )  # fmt: skip
    if PENDING:
        value = (value.to(tl.float32) + scale * added.to(tl.float32)).to(tl.bfloat16)
        tl.store(new + place, value, mask=live[:, None])
    if ADDS:
        _wait(counters + 1, ADDS)
    else:
        _wait(counters, DOWNS)
    # the last to have waited puts the counters back
    waited = tl.atomic_add(counters + 2, 1, sem="relaxed")
    gated = ()
    for i in tl.static_range(CHUNKS):
        gated = gated + (  # noqa: RUF005
            _low(
                sums, low, rows, i * BLOCK_L + ranks, ROWS, STREAMS, HIDDEN, RANK, EPS, SLICES, ADDS
            ),
        )  # fmt: skip
    factor = _factor(
        sums, stream[None, :], rows[:, None], live[:, None], ROWS, STREAMS, HIDDEN, RANK, EPS,
        SLICES,
    )  # fmt: skip
    gates = tl.zeros((STREAMS * CHANNELS, BLOCK_ROWS), tl.float32)
    for i in tl.static_range(CHUNKS):
        gates = tl.dot(tiles[i], gated[i].T, gates)
    gates = tl.sigmoid(gates)
    normed = (value.to(tl.float32) * factor * gain[None, :]).to(tl.bfloat16).to(tl.float32)
    product = tl.reshape(gates * normed.T, (STREAMS, CHANNELS, BLOCK_ROWS))
    mean = tl.sum(product, axis=0) / STREAMS
    channels = unit * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(
        x + rows[None, :] * HIDDEN + channels[:, None], mean.to(x.dtype.element_ty),
        mask=live[None, :],
    )  # fmt: skip
    if INJECT and not ADDS:  # noqa: SIM102
        if unit == 0:
            own = RANK + tl.arange(0, STREAMS)
            logits = _summed(
                sums, rows, own, own >= RANK, ROWS, STREAMS, HIDDEN, RANK, EPS, SLICES
            )  # fmt: skip
            tl.store(
                wanted + rows[:, None] * STREAMS + (own - RANK)[None, :],
                2.0 * tl.sigmoid(logits), mask=live[:, None],
            )  # fmt: skip
    if waited == UPS - 1:
        for i in tl.static_range(3):
            tl.store(counters + i, 0)
