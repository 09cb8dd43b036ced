# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The boundary for the rows of a chunk of a prompt in Triton, where products decide, not launches.

At 2,048 rows the streams, their update and their norm are 126 MB (31 us at 4 TB/s), the two
products 27 GFLOP (35 us at 780 TFLOP/s). What a product reads comes from the level-2 cache, and a
small tile reads it often: tiles of 64 outputs, as `triton_launches` has, read 380 and 310 MB. Here
a program of `down` has all outputs of 128 rows over a slice of the streams, so that a row is read
once, and a program of `up` keeps what it needs of its 128 rows for all of its channels. At 2,048
rows all launches take 142 us on an H200, those of `triton_launches` 175; at 8,192 rows 505 and 799.

`norm` and `squeeze` are those of `triton_launches`. Order of sums: columns, slices, streams.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.gated_residual import limits, triton_launches
from qwen4jax.pallas.triton_call import triton_call

# of a block, which is the 64-row side of the products twice
ROWS = 128
# columns of a step of either product; channels of a step of `up`
BLOCK, CHANNELS = 64, 64
# programs that one wave of an H200 has
_PROGRAMS = 132


class Cut(NamedTuple):
    """How the work is cut.

    Attributes:
        slices: of the streams, among the programs of `down`.
        groups: of channels, among those of `up`.
    """

    slices: int
    groups: int


def cut(rows: int, count: int, hidden: int) -> Cut:
    """As many programs as there is room for at once, each as long as any other."""
    most = max(_PROGRAMS // triton.cdiv(rows, ROWS), 1)
    divisor = lambda n: next(k for k in range(min(most, n), 0, -1) if n % k == 0)  # noqa: E731
    return Cut(slices=divisor(count * hidden // BLOCK), groups=divisor(hidden // CHANNELS))


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
    MOST: tl.constexpr,
    REST: tl.constexpr,
    INJECT: tl.constexpr,
):
    """All sums of a block of rows over a slice of the streams: grid (blocks, slices).

    Args:
        normed: of `triton_kernels.norm_kernel` [T, R D].
        down: low-rank projection [L, R D].
        inject: projection to the injection weights [R, R D].
        parts: sums [R D / WIDTH, blocks, L + 16, ROWS].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block; those past T repeat the last.
        WIDTH: columns of a slice.
        BLOCK: columns of a step.
        MOST: the largest power of two that L holds.
        REST: what is left of L, a power of two or 0.
        INJECT: whether there is `inject`.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = R * D
    line = tl.arange(0, ROWS)
    row = tl.minimum(block * ROWS + line, T - 1).to(tl.int64)
    column = part * WIDTH + tl.arange(0, BLOCK)
    x = normed + row[:, None] * C + column[None, :]
    most = tl.arange(0, MOST)
    rest = MOST + tl.arange(0, REST if REST else 16)
    extra = tl.arange(0, 16)
    w = down + most[:, None] * C + column[None, :]
    v = down + rest[:, None] * C + column[None, :]
    u = inject + tl.minimum(extra, R - 1)[:, None] * C + column[None, :]
    first = tl.zeros((ROWS, MOST), tl.float32)
    second = tl.zeros((ROWS, REST if REST else 16), tl.float32)
    third = tl.zeros((ROWS, 16), tl.float32)
    for k in tl.range(0, WIDTH, BLOCK):
        left = tl.load(x + k)
        first = tl.dot(left, tl.load(w + k).T, first)
        if REST:
            second = tl.dot(left, tl.load(v + k).T, second)
        if INJECT:
            third = tl.dot(left, tl.load(u + k).T, third)
    to = parts + (part * tl.num_programs(0) + block) * ((L + 16) * ROWS) + line[:, None]
    tl.store(to + most[None, :] * ROWS, first)
    if REST:
        tl.store(to + rest[None, :] * ROWS, second)
    if INJECT:
        tl.store(to + (L + extra)[None, :] * ROWS, third)


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
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean over streams of GROUP channels of a block of rows: grid (blocks, D / GROUP).

    A step is CHANNELS channels of one stream; the sum over streams stays in registers.

    Args:
        normed: of `triton_kernels.norm_kernel` [T, R D].
        up: gates' projection [R D, L].
        low: of `triton_kernels.squeeze_kernel` [blocks, L, ROWS].
        x: [T, D].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block; those past T repeat the last, and are not stored.
        CHANNELS: of a step.
        GROUP: channels of a program.
        BLOCK: columns of a product.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, ROWS)
    live = (block * ROWS + line < T)[:, None]
    row = tl.minimum(block * ROWS + line, T - 1).to(tl.int64)[:, None]
    k = tl.arange(0, BLOCK)
    z = low + block * (L * ROWS) + k[None, :] * ROWS + line[:, None]
    left = ()
    for i in tl.static_range(L // BLOCK):
        left = left + (tl.load(z + i * (BLOCK * ROWS)),)  # noqa: RUF005
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for j in tl.range(0, GROUP // CHANNELS * R):
        stream = j % R
        channel = group * GROUP + j // R * CHANNELS + tl.arange(0, CHANNELS)
        value = tl.load(normed + row * (R * D) + (stream * D + channel)[None, :])
        w = up + (stream * D + channel)[:, None] * L + k[None, :]
        gates = tl.zeros((ROWS, CHANNELS), tl.float32)
        for i in tl.static_range(L // BLOCK):
            gates = tl.dot(left[i], tl.load(w + i * BLOCK).T, gates)
        gated = tl.sigmoid(gates) * value.to(tl.float32)
        total = tl.where(stream == 0, gated, total + gated)
        if stream == R - 1:
            tl.store(x + row * D + channel[None, :], (total / R).to(tl.bfloat16), live)


def boundary(streams, pending, norm, down, up, inject, counter, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    how = cut(rows, count, hidden)
    blocks, width = triton.cdiv(rows, ROWS), count * hidden // how.slices
    flat = streams.reshape(rows, count * hidden)
    sizes = dict(T=rows, R=count, D=hidden, L=rank, ROWS=ROWS)
    weights, y = (norm, flat) if pending is None else pending
    arrays = (flat, weights.reshape(rows, count) if pending else norm, y.reshape(rows, -1), norm)
    new, normed = triton_launches.normed(arrays, pending is not None, sizes, eps)
    most, rest = limits.powers(rank)
    parts = triton_call(
        normed,
        down,
        down if inject is None else inject,
        kernel=down_kernel,
        name=f"gated_residual_down_{rows}x{count}x{hidden}",
        out=jax.ShapeDtypeStruct((how.slices, blocks, rank + limits.EXTRA, ROWS), jnp.float32),
        grid=(blocks, how.slices),
        num_warps=8,
        num_stages=3,
        WIDTH=width,
        BLOCK=BLOCK,
        MOST=most,
        REST=rest,
        INJECT=inject is not None,
        **sizes,
    )
    low, wanted, _ = triton_launches.squeezed(parts, norm, inject is not None, False, sizes, eps)
    x = triton_call(
        normed,
        up,
        low,
        kernel=up_kernel,
        name=f"gated_residual_up_{rows}x{count}x{hidden}",
        out=jax.ShapeDtypeStruct((rows, hidden), flat.dtype),
        grid=(blocks, how.groups),
        num_warps=8,
        num_stages=3,
        CHANNELS=CHANNELS,
        GROUP=hidden // how.groups,
        BLOCK=BLOCK,
        **sizes,
    )
    return (
        new.reshape(streams.shape) if pending else streams,
        x.reshape(batch, time, hidden),
        None if inject is None else wanted.reshape(batch, time, count),
        counter,
    )
