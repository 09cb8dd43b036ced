# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The boundary for 9 and more rows in four Triton launches, of which two are matrix products.

Floor at the released size and 128 rows: 13.2 MB of weights and 5.9 MB of streams and outputs, 4.5
us at 4.3 TB/s; the arithmetic (1.7 GFLOP) takes half of that. So the products should wait for
nothing but memory: what they read is plain bfloat16, copied to shared memory without passing
registers, with (nearly) all of a program's chunks asked for before the first is used.

`norm` adds the pending output to a stream of a row, rounds, and norms it: everything that a program
needs for that is in its registers, and the streams are read once however many programs the products
have. `down` owns 64 outputs and a slice of the streams, so that there is one program for nearly
each multiprocessor and each reads about as much of the streams as of the weights. `squeeze` adds
the slices up: doing it in `up` would read them once for each of its programs. `up` owns some
channels of all streams, and with them their mean.

Weights are the 64-row side of a tensor-core product, the rows are the other: it may be 16 to 128
wide. What lies between the products is kept transposed, in blocks of as many rows as a product
takes: [columns, rows]. Order of sums: the slice's columns, slices, streams. No atomics.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

# columns of the sums beside the low-rank ones: room for the injection weights' logits
EXTRA = 16
# outputs of a `down` program; rows of `up` of an `up` program
OUTPUTS = 64
# of a `squeeze` program: a warp's 16-byte loads
SUMS = 128


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        rows: of a product.
        width: of a slice of the streams, columns.
        down_block: columns of a step of `down`.
        down_stages: buffers of such steps.
        up_stages: buffers of steps of `up`.
        down_warps: of a `down` program.
        up_warps: of an `up` program.
        norm_warps: of a `norm` program.
        swapped: whether `up` has the weights on the 64-row side. If not the rows are on it, and
            the sum over streams stays within a thread.
    """

    rows: int
    width: int
    down_block: int = 64
    down_stages: int = 8
    up_stages: int = 4
    down_warps: int = 4
    up_warps: int = 4
    norm_warps: int = 2
    swapped: bool = True


def cut(rows: int, hidden: int) -> Cut:
    """How sizes that are not refused are cut."""
    block = max(16, min(128, triton.next_power_of_2(rows)))
    # what `up` does with its product takes more threads than the product
    return Cut(block, _power(hidden, 512), up_warps=8 if block == 128 else 4)


def boundary(streams, pending, norm, down, up, inject, *, eps, how: Any = None):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    how = how or cut(rows, hidden)
    flat = streams.reshape(rows, count * hidden)
    sizes = dict(T=rows, R=count, D=hidden)
    new, normed = _normed(flat, pending, norm, how, sizes, eps)
    products = sizes | dict(L=rank, ROWS=how.rows)
    parts = _down(normed, down, inject, how, products)
    low, wanted = _squeezed(parts, how, products, inject is not None)
    x = _up(normed, up, low, how, products)
    return (
        streams if pending is None else new.reshape(streams.shape),
        x.reshape(batch, time, hidden),
        None if inject is None else wanted.reshape(batch, time, count),
    )


def _power(n: int, most: int) -> int:
    """The largest power of two up to `most` that divides `n`."""
    return min(most, n & -n)


def _normed(flat: Any, pending: Any, norm: Any, how: Cut, sizes: Any, eps: float) -> Any:
    """The streams with the pending output in them, and their norm."""
    rows, count, hidden = sizes["T"], sizes["R"], sizes["D"]
    # what a kernel has no use for is another array's pointer
    weights, y = (norm, flat) if pending is None else pending
    new, normed = triton_call(
        flat,
        weights if pending is None else weights.reshape(rows, count),
        y.reshape(rows, -1),
        norm,
        kernel=norm_kernel,
        name=f"gated_residual_norm_{rows}x{count}x{hidden}",
        out=(
            jax.ShapeDtypeStruct(flat.shape if pending is not None else (1, 1), flat.dtype),
            jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        ),
        grid=(rows, count),
        num_warps=how.norm_warps,
        PENDING=pending is not None,
        EPS=eps,
        CHUNK=_power(hidden, 256 * how.norm_warps),
        **sizes,
    )
    return new, normed


def _down(normed: Any, down: Any, inject: Any, how: Cut, sizes: Any) -> Any:
    """Sums by slice [slices, blocks of rows, rank + EXTRA, rows of a block]."""
    rows, count, hidden, rank = (sizes[n] for n in ("T", "R", "D", "L"))
    slices, blocks = count * hidden // how.width, triton.cdiv(rows, how.rows)
    return triton_call(
        normed,
        down,
        down if inject is None else inject,
        kernel=down_kernel,
        name=f"gated_residual_down_{rows}x{count}x{hidden}",
        out=jax.ShapeDtypeStruct((slices, blocks, rank + EXTRA, how.rows), jnp.float32),
        # blocks of rows next to each other: a weight's second reader finds it in the cache
        grid=(blocks, slices, triton.cdiv(rank, OUTPUTS) + (inject is not None)),
        num_warps=how.down_warps,
        num_stages=how.down_stages,
        WIDTH=how.width,
        BLOCK=min(how.width, how.down_block),
        N=OUTPUTS,
        **sizes,
    )


def _squeezed(parts: Any, how: Cut, sizes: Any, inject: bool) -> Any:
    """Low-rank values [blocks, rank, rows of a block] and the injection weights [rows, streams]."""
    rows, count, rank = (sizes[n] for n in ("T", "R", "L"))
    slices, blocks = parts.shape[:2]
    return triton_call(
        parts,
        kernel=squeeze_kernel,
        name=f"gated_residual_squeeze_{rows}x{rank}",
        out=(
            jax.ShapeDtypeStruct((blocks, rank, how.rows), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, count), jnp.float32),
        ),
        grid=(blocks, triton.cdiv((rank + (count if inject else 0)) * how.rows, SUMS)),
        # the warps share the slices: few loads each, and all under way at once
        num_warps=8,
        SLICES=slices,
        ALL=triton.next_power_of_2(slices),
        SUMS=SUMS,
        **{n: sizes[n] for n in ("T", "R", "L", "ROWS")},
    )


def _up(normed: Any, up: Any, low: Any, how: Cut, sizes: Any) -> Any:
    rows, count, hidden, rank = (sizes[n] for n in ("T", "R", "D", "L"))
    return triton_call(
        normed,
        up,
        low,
        kernel=up_kernel,
        name=f"gated_residual_up_{rows}x{count}x{hidden}",
        out=jax.ShapeDtypeStruct((rows, hidden), normed.dtype),
        grid=(triton.cdiv(rows, how.rows), hidden // (OUTPUTS // count)),
        num_warps=how.up_warps,
        num_stages=how.up_stages,
        EACH=OUTPUTS // count,
        BLOCK=_power(rank, 64),
        SWAPPED=how.swapped or how.rows < 64,
        **sizes,
    )


@triton.jit
def norm_kernel(
    streams,
    weights,
    y,
    norm,
    new,
    normed,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PENDING: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The pending output's update of a row's stream, and its norm: grid (T, R).

    Args:
        streams: [T, R D].
        weights: with which `y` is injected [T, R].
        y: output of the sublayer before [T, D].
        norm: gain minus one [R D].
        new: streams with `y` in them [T, R D].
        normed: RMS norm of each stream [T, R D].
        T: rows.
        R: streams.
        D: channels of a stream.
        PENDING: whether there is `y`.
        EPS: of the norm.
        CHUNK: channels of a load.
    """
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, CHUNK)
    place = row * (R * D) + stream * D + channel
    values, extra, gains = (), (), ()
    for i in tl.static_range(D // CHUNK):
        values = values + (tl.load(streams + place + i * CHUNK),)  # noqa: RUF005
        gains = gains + (tl.load(norm + stream * D + channel + i * CHUNK),)  # noqa: RUF005
        if PENDING:
            extra = extra + (tl.load(y + row * D + channel + i * CHUNK),)  # noqa: RUF005
    scale = 0.0
    if PENDING:
        scale = tl.load(weights + row * R + stream)
    square = tl.zeros((CHUNK,), tl.float32)
    updated = ()
    for i in tl.static_range(D // CHUNK):
        value = values[i]
        if PENDING:
            value = (value.to(tl.float32) + scale * extra[i].to(tl.float32)).to(tl.bfloat16)
            tl.store(new + place + i * CHUNK, value)
        updated = updated + (value,)  # noqa: RUF005
        square += value.to(tl.float32) * value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(square, axis=0) / D + EPS)
    for i in tl.static_range(D // CHUNK):
        value = updated[i].to(tl.float32) * factor * (1.0 + gains[i].to(tl.float32))
        tl.store(normed + place + i * CHUNK, value.to(tl.bfloat16))


@triton.jit
def down_kernel(
    normed,
    down,
    inject,
    parts,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Sums of N outputs over a slice of the streams: grid (blocks of rows, slices, tiles).

    Args:
        normed: of `norm_kernel`.
        down: low-rank projection [L, R D].
        inject: projection to the injection weights [R, R D], the last tile's.
        parts: sums [R D / WIDTH, blocks, L + 16, ROWS]; those past the weights are not written.
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block.
        WIDTH: columns of a slice.
        BLOCK: columns of a step.
        N: outputs.
    """
    block, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output = tl.arange(0, N)
    if tile < (L + N - 1) // N:
        matrix = down + tile * N * (R * D)
        there = tile * N + output < L
        first = tile * N
    else:
        matrix = inject
        there = output < R
        first = L
    row = block * ROWS + tl.arange(0, ROWS)
    column = part * WIDTH + tl.arange(0, BLOCK)
    w = matrix + output[:, None] * (R * D) + column[None, :]
    n = normed + row.to(tl.int64)[None, :] * (R * D) + column[:, None]
    acc = tl.zeros((N, ROWS), tl.float32)
    for k in tl.range(0, WIDTH, BLOCK):
        left = tl.load(w + k, there[:, None], 0.0)
        right = tl.load(n + k, (row < T)[None, :], 0.0)
        acc = tl.dot(left, right, acc)
    base = (part * tl.num_programs(0) + block) * (L + 16) + first
    place = (base + output)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(parts + place, acc, there[:, None])


@triton.jit
def squeeze_kernel(
    parts,
    low,
    wanted,
    T: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    ALL: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Sums over slices and what is made of them: grid (blocks of rows, (L + R) ROWS / SUMS).

    Args:
        parts: of `down_kernel`.
        low: SiLU of the low-rank sums over R [blocks, L, ROWS].
        wanted: injection weights [T, R].
        T: rows.
        R: streams.
        L: rank.
        ROWS: of a block.
        SLICES: of the streams.
        ALL: the power of two that is not less.
        SUMS: of a program.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    # the place in [L + 16, ROWS]
    place = group * SUMS + tl.arange(0, SUMS)
    part = tl.arange(0, ALL)[:, None]
    at = (part * tl.num_programs(0) + block) * ((L + 16) * ROWS) + place[None, :]
    there = (part < SLICES) & (place < (L + R) * ROWS)[None, :]
    total = tl.sum(tl.load(parts + at, there, 0.0), axis=0) / R
    if group < L * ROWS // SUMS:
        value = (total * tl.sigmoid(total)).to(tl.bfloat16)
        tl.store(low + block * (L * ROWS) + place, value)
    else:
        row = block * ROWS + place % ROWS
        stream = place // ROWS - L
        tl.store(wanted + row * R + stream, 2.0 * tl.sigmoid(total), (row < T) & (stream < R))


@triton.jit
def up_kernel(
    normed,
    up,
    low,
    x,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """The mean over streams of EACH channels: grid (blocks of rows, D / EACH).

    Args:
        normed: of `norm_kernel`.
        up: gates' projection [R D, L].
        low: of `squeeze_kernel`.
        x: [T, D].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block.
        EACH: channels of each stream.
        BLOCK: columns of a step.
        SWAPPED: whether the weights are the left operand.
    """
    block, first = tl.program_id(0), tl.program_id(1) * EACH
    line = tl.arange(0, ROWS)
    index = tl.arange(0, R * EACH)
    column = index // EACH * D + first + index % EACH
    row = (block * ROWS + line).to(tl.int64)
    k = tl.arange(0, BLOCK)
    w = up + column[:, None] * L + k[None, :]
    z = low + block * (L * ROWS) + k[:, None] * ROWS + line[None, :]
    if SWAPPED:
        acc = tl.zeros((R * EACH, ROWS), tl.float32)
        for i in tl.range(0, L, BLOCK):
            acc = tl.dot(tl.load(w + i), tl.load(z + i * ROWS), acc)
        gates = tl.sigmoid(acc).T
    else:
        acc = tl.zeros((ROWS, R * EACH), tl.float32)
        for i in tl.range(0, L, BLOCK):
            acc = tl.dot(tl.load(z + i * ROWS).T, tl.load(w + i).T, acc)
        gates = tl.sigmoid(acc)
    live = (row < T)[:, None]
    value = tl.load(normed + row[:, None] * (R * D) + column[None, :], live, 0.0)
    gated = tl.reshape(gates * value.to(tl.float32), (ROWS, R, EACH))
    mean = tl.sum(gated, axis=1) / R
    channel = first + tl.arange(0, EACH)
    tl.store(x + row[:, None] * D + channel[None, :], mean.to(tl.bfloat16), live)
