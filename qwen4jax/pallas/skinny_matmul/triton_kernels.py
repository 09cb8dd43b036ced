"""Dense projections of few rows in Triton: the weight streams once through tensor cores.

The weight's rows are the left operand, so that the few tokens are the narrow side of the product.
Two tilings. `wide`: 64 weight rows a program, wgmma, a pipeline over the inputs. `narrow`: 16
weight rows, the inputs dealt to the warps, for matrices with too few rows to give every
multiprocessor a wide tile; the warps' sums are added in one fixed order at the end.
Several weights that multiply the same rows go in one launch, each program to its own.

Floor: the weight's bytes over 4.3 TB/s, plus 1 us for a launch. At 4 rows a 64 x 128 tile costs
16 KB of traffic for 64 kFLOP: memory-bound by a factor of 50.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

MOST_WEIGHTS = 4
# programs that fill the 132 multiprocessors of an H200 (152 of a GB300) with wide tiles
_ENOUGH_TILES = 100
_WIDE, _NARROW = 64, 16


def skinny_matmul(x: jax.Array, w: jax.Array, bias: None, *, out_dtype: Any) -> jax.Array:
    """See `qwen4jax.pallas.skinny_matmul.skinny_matmul`."""
    return projections(x, (w,), (bias,), out_dtypes=(out_dtype,))[0]


def projections(
    x: jax.Array, weights: Sequence[jax.Array], biases: Sequence[None], *, out_dtypes: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """See `qwen4jax.pallas.skinny_matmul.projections`."""
    flat = x.reshape(-1, x.shape[-1])
    rows, inputs = flat.shape
    outputs = [w.shape[0] for w in weights]
    wide = sum(triton.cdiv(n, _WIDE) for n in outputs) >= _ENOUGH_TILES
    tile = _WIDE if wide else _NARROW
    block_rows = max(8 if wide else 16, triton.next_power_of_2(min(rows, 32)))
    shapes = [
        jax.ShapeDtypeStruct((rows, n), dtype) for n, dtype in zip(outputs, out_dtypes, strict=True)
    ]
    absent = MOST_WEIGHTS - len(weights)
    results = triton_call(
        flat,
        *weights,
        *weights[:1] * absent,
        kernel=_wide if wide else _narrow,
        name=f"skinny_matmul_{rows}x{sum(outputs)}x{inputs}",
        # what is never written is small
        out=(*shapes, *[jax.ShapeDtypeStruct((1, 1), jnp.float32)] * absent),
        # tiles of tokens next to each other: a weight's second reader finds it in L2
        grid=(triton.cdiv(rows, block_rows), sum(triton.cdiv(n, tile) for n in outputs)),
        num_warps=4,
        num_stages=4 if wide else 3,
        ROWS=rows,
        K=inputs,
        **{f"N{i}": n for i, n in enumerate([*outputs, *[0] * absent])},
        BLOCK_ROWS=block_rows,
        BLOCK_N=tile,
        BLOCK_K=128 if wide else _narrow_step(inputs),
    )
    return tuple(y.reshape(*x.shape[:-1], n) for y, n in zip(results, outputs, strict=False))


def _narrow_step(inputs: int) -> int:
    """Inputs of a narrow tile's step: all four warps' together."""
    return next(step for step in (512, 256, 128) if inputs % step == 0)


@triton.jit
def _wide_tile(
    x, w, y, tile, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inputs = tl.arange(0, BLOCK_K)
    weight = w + outputs[:, None].to(tl.int64) * K + inputs[None, :]
    token = x + rows[:, None] * K + inputs[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        if N % BLOCK_N == 0:
            left = tl.load(weight + k, eviction_policy="evict_first")
        else:
            left = tl.load(
                weight + k, mask=(outputs < N)[:, None], other=0.0, eviction_policy="evict_first"
            )
        right = tl.load(token + k, mask=(rows < ROWS)[:, None], other=0.0)
        acc = tl.dot(left, right.T, acc)
    place = y + rows[None, :] * N + outputs[:, None]
    live = (rows < ROWS)[None, :] & (outputs < N)[:, None]
    tl.store(place, acc.to(y.dtype.element_ty), mask=live)


@triton.jit
def _narrow_tile(
    x, w, y, tile, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # a batch of four products, one a warp: [4, outputs, inputs / 4] x [4, inputs / 4, rows]
    part: tl.constexpr = BLOCK_K // 4
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inputs = tl.arange(0, 4)[:, None] * part + tl.arange(0, part)[None, :]
    weight = w + outputs[None, :, None].to(tl.int64) * K + inputs[:, None, :]
    token = x + rows[None, :, None] * K + inputs[:, None, :]
    acc = tl.zeros((4, BLOCK_N, BLOCK_ROWS), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        left = tl.load(
            weight + k, mask=(outputs < N)[None, :, None], other=0.0, eviction_policy="evict_first"
        )
        right = tl.load(token + k, mask=(rows < ROWS)[None, :, None], other=0.0)
        acc = tl.dot(left, tl.permute(right, (0, 2, 1)), acc)
    total = tl.sum(acc, axis=0)
    place = y + rows[None, :] * N + outputs[:, None]
    live = (rows < ROWS)[None, :] & (outputs < N)[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=live)


@triton.jit
def _wide(
    x, w0, w1, w2, w3, y0, y1, y2, y3, ROWS: tl.constexpr, K: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t0: tl.constexpr = tl.cdiv(N0, BLOCK_N)
    t1: tl.constexpr = t0 + tl.cdiv(N1, BLOCK_N)
    t2: tl.constexpr = t1 + tl.cdiv(N2, BLOCK_N)
    tile = tl.program_id(1)
    if tile < t0:
        _wide_tile(x, w0, y0, tile, ROWS, K, N0, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N1 > 0:
        if (tile >= t0) & (tile < t1):
            _wide_tile(x, w1, y1, tile - t0, ROWS, K, N1, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N2 > 0:
        if (tile >= t1) & (tile < t2):
            _wide_tile(x, w2, y2, tile - t1, ROWS, K, N2, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N3 > 0:
        if tile >= t2:
            _wide_tile(x, w3, y3, tile - t2, ROWS, K, N3, BLOCK_ROWS, BLOCK_N, BLOCK_K)


@triton.jit
def _narrow(
    x, w0, w1, w2, w3, y0, y1, y2, y3, ROWS: tl.constexpr, K: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t0: tl.constexpr = tl.cdiv(N0, BLOCK_N)
    t1: tl.constexpr = t0 + tl.cdiv(N1, BLOCK_N)
    t2: tl.constexpr = t1 + tl.cdiv(N2, BLOCK_N)
    tile = tl.program_id(1)
    if tile < t0:
        _narrow_tile(x, w0, y0, tile, ROWS, K, N0, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N1 > 0:
        if (tile >= t0) & (tile < t1):
            _narrow_tile(x, w1, y1, tile - t0, ROWS, K, N1, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N2 > 0:
        if (tile >= t1) & (tile < t2):
            _narrow_tile(x, w2, y2, tile - t1, ROWS, K, N2, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N3 > 0:
        if tile >= t2:
            _narrow_tile(x, w3, y3, tile - t2, ROWS, K, N3, BLOCK_ROWS, BLOCK_N, BLOCK_K)
