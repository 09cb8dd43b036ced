# pyright: reportArgumentType=false
"""The boundary for any number of rows in Triton, by products that wait for nothing but memory.

Floor at the released size: 13.2 MB of weights, 3.1 us at 4.3 TB/s (with the streams of 128 rows 4.6
us; their arithmetic takes half of that), and for each launch its start and one latency.
Measured on an H200, alone: 12.4 us at 16 rows, 13.1 at 32, 18.5 at 128. The four launches as one,
whose programs meet three times (`triton_meeting`), took as long as they did before their `up` was
cut as now: 12.7, 13.6, 21.1.

Above 16 rows there are four launches. `norm` adds the pending output to a stream of a row, rounds,
and norms it: all that a program needs for that is in its registers, and the streams are read once
however many programs the products have. `down` owns 64 outputs and a slice of the streams, so that
there is one program for nearly each multiprocessor and each reads about as much of the streams as
of the weights: bfloat16, copied to shared memory without passing registers, nearly all of it asked
for before the first is used. `squeeze` adds the slices up: doing it in `up` would read them once
for each of its programs. `up` owns some channels of all streams, and with them their mean. Above 32
rows a program has 64 of them, and few enough buffers that all 320 run at once: 18.5 us at 128 rows
instead of 21.5 with two stages more, and 20.0 with all rows in a program.

Up to 16 rows `update_down` stands for the first two: so few rows are updated by each of its
programs in no time (at 32 rows all took 18.6 us so, and 15.3 with the two). The norm's factors are
left to `squeeze` and `up`. To have the cache get the weights of later launches, as `triton_few`
does, made it 0.5 us slower at 16 and at 128 rows.

Weights are the 64-row side of a tensor-core product, the rows are the other: it may be 16 to 128
wide. What lies between the products is kept transposed, in blocks of as many rows as a product
takes: [columns, rows]. Order of sums: columns, slices, streams. No atomics.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton

from qwen4jax.pallas.gated_residual import limits
from qwen4jax.pallas.gated_residual import triton_kernels as kernels
from qwen4jax.pallas.gated_residual.triton_up import up_kernel, up_many_kernel
from qwen4jax.pallas.triton_call import triton_call

# outputs of a `down` program; rows of `up` of an `up` program
OUTPUTS = 64
# sums of a `squeeze` program: a warp's 16-byte loads of a slice
SUMS = 128


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        rows: of a product.
        width: of a slice of the streams, columns.
        updates: whether `down` updates and norms the streams, instead of a launch of its own.
        down_block: columns of a step of `down`.
        down_stages: buffers of such steps.
        up_warps: of an `up` program.
        up_stages: buffers of steps of `up`.
        up_rows: of a program of `up`, where they are the long side of its product; else it has all
            of a block.
    """

    rows: int
    width: int
    updates: bool
    down_block: int
    down_stages: int
    up_warps: int
    up_stages: int
    up_rows: int | None = None


def cut(rows: int, count: int, hidden: int) -> Cut:
    """How sizes that are not refused are cut."""
    block = max(16, min(128, triton.next_power_of_2(rows)))
    # of the steps of a slice and of `up` all are under way at once where they fit
    if block == 16:
        return Cut(block, _power(hidden, 512), True, 128, 5, up_warps=4, up_stages=6)
    # wider slices where blocks of rows make programs
    width = _power(count * hidden, 512 * triton.cdiv(rows, block))
    if block == 32:
        return Cut(block, width, False, 64, 8, up_warps=4, up_stages=6)
    # all programs of `up` run at once: with another stage fewer would
    return Cut(block, width, False, 64, 8, up_warps=4, up_stages=3, up_rows=64)


def boundary(streams, pending, norm, down, up, inject, counter, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    batch, time, count, hidden = streams.shape
    rows, rank = batch * time, down.shape[0]
    how = cut(rows, count, hidden)
    flat = streams.reshape(rows, count * hidden)
    # what a kernel has no use for is another array's pointer
    weights, y = (norm, flat) if pending is None else pending
    arrays = (flat, weights.reshape(rows, count) if pending else norm, y.reshape(rows, -1), norm)
    matrices = down, (down if inject is None else inject)
    sizes = dict(T=rows, R=count, D=hidden, L=rank, ROWS=how.rows)
    tiles = triton.cdiv(rank, OUTPUTS) + (inject is not None)
    if how.updates:
        given = arrays, matrices, tiles, pending is not None
        new, parts, squares = _updated_down(*given, how, sizes)
        source = new if pending else flat
    else:
        new, source = normed(arrays, pending is not None, sizes, eps)
        parts = _down(source, matrices, tiles, how, sizes)
        squares = norm
    low, wanted, factors = squeezed(parts, squares, inject is not None, how.updates, sizes, eps)
    x = _up(source, norm, factors, up, low, how, sizes)
    return (
        new.reshape(streams.shape) if pending else streams,
        x.reshape(batch, time, hidden),
        None if inject is None else wanted.reshape(batch, time, count),
        counter,
    )


def _power(n: int, most: int) -> int:
    """The largest power of two up to `most` that divides `n`."""
    return min(most, n & -n)


def _new(arrays: Any, pending: bool) -> Any:
    return jax.ShapeDtypeStruct(arrays[0].shape if pending else (1, 1), arrays[0].dtype)


def normed(arrays: Any, pending: bool, sizes: Any, eps: float) -> Any:
    """The streams with the pending output in them, and their norm."""
    rows, count, hidden = sizes["T"], sizes["R"], sizes["D"]
    return triton_call(
        *arrays,
        kernel=kernels.norm_kernel,
        name=f"gated_residual_norm_{rows}x{count}x{hidden}",
        out=(_new(arrays, pending), _new(arrays, True)),
        grid=(rows, count),
        num_warps=2,
        T=rows,
        R=count,
        D=hidden,
        PENDING=pending,
        EPS=eps,
        CHUNK=_power(hidden, 512),
    )


def _down(normed: Any, matrices: Any, tiles: int, how: Cut, sizes: Any) -> Any:
    """Sums by slice [slices, blocks of rows, rank + limits.EXTRA, rows of a block]."""
    rows, count, hidden, rank = (sizes[n] for n in ("T", "R", "D", "L"))
    slices, blocks = count * hidden // how.width, triton.cdiv(rows, how.rows)
    return triton_call(
        normed,
        *matrices,
        kernel=kernels.down_kernel,
        name=f"gated_residual_down_{rows}x{count}x{hidden}",
        out=jax.ShapeDtypeStruct((slices, blocks, rank + limits.EXTRA, how.rows), jnp.float32),
        # blocks of rows next to each other: a weight's second reader finds it in the cache
        grid=(blocks, slices, tiles),
        num_stages=how.down_stages,
        WIDTH=how.width,
        BLOCK=min(how.width, how.down_block),
        N=OUTPUTS,
        **sizes,
    )


def _updated_down(
    arrays: Any, matrices: Any, tiles: int, pending: bool, how: Cut, sizes: Any
) -> Any:
    """The streams, sums by slice as of `_down` without the norm's factors, sums of squares."""
    rows, count, hidden, rank = (sizes[n] for n in ("T", "R", "D", "L"))
    slices = count * hidden // how.width
    return triton_call(
        *arrays,
        *matrices,
        kernel=kernels.update_down_kernel,
        name=f"gated_residual_update_down_{rows}x{count}x{hidden}",
        out=(
            _new(arrays, pending),
            jax.ShapeDtypeStruct((slices, 1, rank + limits.EXTRA, how.rows), jnp.float32),
            jax.ShapeDtypeStruct((slices, how.rows), jnp.float32),
        ),
        grid=(slices, tiles),
        num_stages=how.down_stages,
        WIDTH=how.width,
        BLOCK=min(how.width, how.down_block),
        N=OUTPUTS,
        PENDING=pending,
        **sizes,
    )


def squeezed(parts: Any, squares: Any, inject: bool, updates: bool, sizes: Any, eps: float) -> Any:
    """Low-rank values [blocks, rank, rows of a block], injection weights, the norm's factors."""
    rows, count, rank, block = (sizes[n] for n in ("T", "R", "L", "ROWS"))
    slices, blocks = parts.shape[:2]
    return triton_call(
        parts,
        squares,
        kernel=kernels.squeeze_kernel,
        name=f"gated_residual_squeeze_{rows}x{rank}",
        out=(
            jax.ShapeDtypeStruct((blocks, rank, block), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, count), jnp.float32),
            jax.ShapeDtypeStruct((count, block), jnp.float32),
        ),
        grid=(blocks, triton.cdiv((rank + (count if inject else 0)) * block, SUMS)),
        # the warps share the slices: few loads each, and all under way at once
        num_warps=8,
        SLICES=slices,
        ALL=triton.next_power_of_2(slices),
        SUMS=SUMS,
        FACTORS=updates,
        EPS=eps,
        **sizes,
    )


def _up(source: Any, norm: Any, factors: Any, up: Any, low: Any, how: Cut, sizes: Any) -> Any:
    """What the sublayer reads [rows, hidden]."""
    rows, count, hidden, rank = (sizes[n] for n in ("T", "R", "D", "L"))
    each = OUTPUTS // count
    common: dict[str, Any] = dict(
        name=f"gated_residual_up_{rows}x{count}x{hidden}",
        out=jax.ShapeDtypeStruct((rows, hidden), source.dtype),
        grid=(triton.cdiv(rows, how.up_rows or how.rows), hidden // each),
        num_warps=how.up_warps,
        num_stages=how.up_stages,
        EACH=each,
        BLOCK=_power(rank, 64),
        **sizes,
    )
    if how.up_rows:
        return triton_call(source, up, low, kernel=up_many_kernel, OWN=how.up_rows, **common)
    arrays = source, norm, factors, up, low
    return triton_call(*arrays, kernel=up_kernel, FACTORS=how.updates, **common)
