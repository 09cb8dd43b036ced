# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""The boundary for up to 8 rows in two Triton launches, each one memory latency deep.

Floor at the released size: 13.2 MB of weights, 3.1 us at 4.3 TB/s, and for each launch its start
and one latency. So every load of a program is under way before the first is waited for: no loop
carries loads, and weights go straight from memory to the tensor cores' registers
(`moe/triton_stored.py` says how), without shared memory. And `down` has the cache get the weights
of `up`, so that memory does not rest between the launches.

`down` multiplies 16 outputs by a stream. It adds the pending output to the stream, rounds it, and
multiplies without the norm's factor, which is one number for each row and stream, and so applies to
sums. All programs of a stream do so alike: what an element costs there is what the launch costs,
hence the packed arithmetic. The last tile of outputs has the fewest weights (the injection weights'
few): it stores the stream and the sums of its squares.

`up` owns some channels of all streams. Its warps split the rank, so that a lane makes just those
low-rank values that it multiplies, and nothing is handed around before the sums. Every program adds
up the sums of all streams itself: one that did that for all would cost another latency.

Order of sums: chunks of a warp, warps, streams. No atomics.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

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

# of a `down` program (16 are slower at 4 rows)
WARPS = 8
# of an `up` program, which has 16 rows of `up` for each
UP_WARPS = 4


def boundary(streams, pending, norm, down, up, inject, counter, *, eps):
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
            shape((count, rows, rank + limits.EXTRA), jnp.float32),
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
        counter,
    )


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
    tiles = down_weights(down, inject, stream, tile, R, D, L, 16, W)
    values, extra, gain, scale = stream_of(streams, weights, y, norm, stream, T, R, D, PENDING, W)
    # the assembler would put loads off to save registers
    tl.debug_barrier()
    updated = updated_stream(values, extra, scale, STEPS, PENDING)
    if tile == TILES - 1:
        store_stream(updated, new, squares, stream, T, R, D, PENDING, W)
    even, odd = products(tiles, updated, gain, STEPS, W)
    ask(up, tile * R + stream, R * TILES, L * R * D)
    store_sums(even, odd, parts, stream, tile, T, R, L, 16)


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
    """The mean over streams of 16 W / R channels: a program for each so many, then one more.

    The last one's are the injection weights.

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
        EPS: of the norm.
        W: warps, which take chunks of 32 columns in turn.
    """
    if tl.program_id(0) < D // (W * 16 // R):
        first = tl.program_id(0) * (W * 16 // R)
        tiles = up_weights(up, first, R, D, L, W, W)
        gated_mean(streams, norm, tiles, parts, squares, x, first, T, R, D, L, EPS, W, W)
    else:
        store_wanted(parts, squares, wanted, T, R, D, L, EPS)
