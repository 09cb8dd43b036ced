# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""The boundary for up to 8 rows in one Triton launch, whose programs meet halfway.

What `triton_few` does in two launches, product for product: here each program has a share of `down`
and one of `up`, and asks for the weights of the second before the meeting, which costs less than a
second launch (on an H200 with cold weights a form of it took 11.1 us a boundary of the released
size, two launches 13.1). The shares are such that every multiprocessor has a program, and each
about as many weights.

Memory answers in the order in which it is asked. The streams, the output and the gains come first:
they are in the cache, and updated by the time the weights are there.

Order of sums: chunks of a warp, warps, streams. No atomics but the meeting's.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas import counters
from qwen4jax.pallas.gated_residual import limits
from qwen4jax.pallas.gated_residual.triton_few_math import (
    down_weights,
    gated_mean,
    products,
    store_stream,
    store_sums,
    store_wanted,
    stream_of,
    up_weights,
    updated_stream,
)
from qwen4jax.pallas.gated_residual.triton_kernels import ask
from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.pallas.triton_meeting import meet


def boundary(streams, pending, norm, down, up, inject, counter, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    cut = limits.one_cut(count, hidden, rank)
    assert cut is not None
    flat = streams.reshape(rows, count * hidden)
    # what the kernel has no use for is another array's pointer; it always makes injection weights
    weights, y = (norm, flat) if pending is None else pending
    shape = jax.ShapeDtypeStruct
    counter, new, _, _, x, wanted = triton_call(
        counter,
        flat,
        weights.reshape(rows, count) if pending is not None else weights,
        y.reshape(rows, -1),
        norm,
        down,
        down if inject is None else inject,
        up,
        kernel=one_kernel,
        name=f"gated_residual_{rows}x{count}x{hidden}",
        out=(
            shape(counter.shape, jnp.int32),
            shape(flat.shape if pending is not None else (1, 1), flat.dtype),
            shape((count, rows, rank + limits.EXTRA), jnp.float32),
            shape((count, rows), jnp.float32),
            shape((rows, hidden), flat.dtype),
            shape((rows, count), jnp.float32),
        ),
        grid=(cut.programs,),
        num_warps=cut.warps,
        aliases={0: 0},
        T=rows,
        R=count,
        D=hidden,
        L=rank,
        PENDING=pending is not None,
        EPS=eps,
        MEETING=counters.MEETING,
        OUTS=cut.outputs,
        TALL=cut.tall,
        W=cut.warps,
    )
    return (
        streams if pending is None else new.reshape(streams.shape),
        x.reshape(batch, time, hidden),
        None if inject is None else wanted.reshape(batch, time, count),
        counter,
    )


@triton.jit
def one_kernel(
    counter,
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
    x,
    wanted,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    PENDING: tl.constexpr,
    EPS: tl.constexpr,
    MEETING: tl.constexpr,
    OUTS: tl.constexpr,
    TALL: tl.constexpr,
    W: tl.constexpr,
):
    """Sums of OUTS outputs over a stream, then the mean of 16 TALL / R channels.

    Grid: R (L / OUTS + 1), the last R for the injection weights; more than D / channels, of which
    the first past them has the injection weights.

    Args:
        counter: int32; at MEETING the programs meet.
        streams: [T, R D].
        weights: with which `y` is injected [T, R].
        y: output of the sublayer before [T, D].
        norm: gain minus one [R D].
        down: low-rank projection [L, R D].
        inject: projection to the injection weights [R, R D].
        up: gates' projection [R D, L].
        new: streams with `y` in them [T, R D].
        parts: sums without the norm's factors [R, T, L + 16].
        squares: sums of the streams' squares [R, T].
        x: [T, D].
        wanted: injection weights [T, R].
        T: rows, up to 8.
        R: streams.
        D: channels of a stream.
        L: rank.
        PENDING: whether there is `y`.
        EPS: of the norm.
        MEETING: place in `counter`.
        OUTS: outputs, up to 16, which divide L.
        TALL: groups of 16 rows of `up`, up to W.
        W: warps.
    """
    program = tl.program_id(0)
    stream, tile = program % R, program // R
    STEPS: tl.constexpr = D // (32 * W)
    TILES: tl.constexpr = L // OUTS + 1
    CHANNELS: tl.constexpr = TALL * 16 // R
    values, extra, gain, scale = stream_of(streams, weights, y, norm, stream, T, R, D, PENDING, W)
    tiles = down_weights(down, inject, stream, tile, R, D, L, OUTS, W)
    # Loads stay above the barrier, and what becomes of them below the branch, which is always
    # taken. Otherwise the assembler saves registers: weights are asked for when streams are there.
    tl.debug_barrier()
    if tl.program_id(1) < 1:
        ask(up, program, R * TILES, L * R * D)
        updated = updated_stream(values, extra, scale, STEPS, PENDING)
        if tile == TILES - 1:
            store_stream(updated, new, squares, stream, T, R, D, PENDING, W)
        even, odd = products(tiles, updated, gain, STEPS, W)
        # programs past the last channels load what they have no use for
        first = tl.minimum(program, D // CHANNELS - 1) * CHANNELS
        gates = up_weights(up, first, R, D, L, TALL, W)
        store_sums(even, odd, parts, stream, tile, T, R, L, OUTS)
        meet(counter + MEETING, R * TILES)
        read = streams
        if PENDING:
            read = new
        if program < D // CHANNELS:
            gated_mean(read, norm, gates, parts, squares, x, first, T, R, D, L, EPS, TALL, W)
        elif program == D // CHANNELS:
            store_wanted(parts, squares, wanted, T, R, D, L, EPS)
