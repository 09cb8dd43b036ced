"""Dense projections of few rows in Triton: the weight streams once through tensor cores.

The weight's rows are the left operand, so that the few tokens are the narrow side of the product.
Three tilings. `wide`: 64 weight rows a program. `narrow`: 16 weight rows and one warp, for matrices
with too few rows to give every multiprocessor a wide tile; five steps of it are under way at once.
`square`, above 32 rows: 128 weight rows a program with up to 128 of the few, which otherwise would
be read from L2 by so many programs that this takes longer than the weight. Where tiles are too few,
`triton_split` splits the inputs, and `triton_few` those of an FP8 weight and up to 8 rows.
Above 128 rows tiles are square, whatever they are.
Several weights that multiply the same rows go in one launch, each program to its own.

Floor: the weight's bytes over 4.3 TB/s, plus 1 us for a launch. At 4 rows a 64 x 128 tile costs
16 KB of traffic for 64 kFLOP: memory-bound by a factor of 50.
"""

from collections.abc import Sequence
from typing import Any

import jax
import triton
import triton.language as tl

from qwen4jax import quant
from qwen4jax.pallas.skinny_matmul import MOST_WEIGHTS, triton_few, triton_split, triton_stored
from qwen4jax.pallas.skinny_matmul.triton_stored import ENOUGH_TILES, square


def skinny_matmul(x: jax.Array, w: Any, bias: None, *, out_dtype: Any) -> jax.Array:
    """See `qwen4jax.pallas.skinny_matmul.skinny_matmul`."""
    rows = x.size // x.shape[-1]
    for form in (triton_few, triton_split):
        if form.takes(rows, w):
            return form.skinny_matmul(x, w, out_dtype=out_dtype)
    return projections(x, (w,), (bias,), out_dtypes=(out_dtype,))[0]


def projections(
    x: jax.Array, weights: Sequence[Any], biases: Sequence[None], *, out_dtypes: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """See `qwen4jax.pallas.skinny_matmul.projections`."""
    if any(isinstance(w, quant.Quantized) for w in weights):
        return triton_stored.projections(x, weights, out_dtypes=out_dtypes)
    inputs = x.shape[-1]
    rows, outputs = x.size // inputs, [w.shape[0] for w in weights]
    absent = MOST_WEIGHTS - len(weights)
    return triton_stored.launched(
        x,
        (*weights, *[weights[0]] * absent),
        outputs,
        out_dtypes,
        tiling(rows, inputs, outputs),
        kernel=_projections,
        name=f"skinny_matmul_{rows}x{sum(outputs)}x{inputs}",
    )


def tiling(rows: int, inputs: int, outputs: Sequence[int]) -> dict[str, Any]:
    """How a program's share is cut, and the warps and stages that measured best with it."""
    if square(rows, outputs):
        return dict(
            BLOCK_ROWS=64 if rows <= 64 else 128,
            BLOCK_N=128,
            BLOCK_K=64,
            STAGES=6 if rows <= 64 else 5,
            num_warps=8,
        )
    block_rows = max(8, triton.next_power_of_2(min(rows, 32)))
    if sum(triton.cdiv(n, 64) for n in outputs) >= ENOUGH_TILES:
        return dict(BLOCK_ROWS=block_rows, BLOCK_N=64, BLOCK_K=128, STAGES=4, num_warps=4)
    step = min(256, inputs & -inputs)
    return dict(BLOCK_ROWS=block_rows, BLOCK_N=16, BLOCK_K=step, STAGES=5, num_warps=1)


@triton.jit
def _one(
    x, w, y, tile, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of one weight's outputs."""
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inputs = tl.arange(0, BLOCK_K)
    weight = w + outputs[:, None].to(tl.int64) * K + inputs[None, :]
    token = x + rows[:, None] * K + inputs[None, :]
    there = (outputs < N)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if N % BLOCK_N == 0:
            left = tl.load(weight + k, eviction_policy="evict_first")
        else:
            left = tl.load(weight + k, mask=there, other=0.0, eviction_policy="evict_first")
        right = tl.load(token + k, mask=(rows < ROWS)[:, None], other=0.0)
        acc = tl.dot(left, right.T, acc)
    place = y + rows[None, :] * N + outputs[:, None]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(rows < ROWS)[None, :] & there)


@triton.jit
def _projections(
    x, w0, w1, w2, w3, y0, y1, y2, y3, ROWS: tl.constexpr, K: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t0: tl.constexpr = tl.cdiv(N0, BLOCK_N)
    t1: tl.constexpr = t0 + tl.cdiv(N1, BLOCK_N)
    t2: tl.constexpr = t1 + tl.cdiv(N2, BLOCK_N)
    tile = tl.program_id(1)
    if tile < t0:
        _one(x, w0, y0, tile, ROWS, K, N0, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N1 > 0:
        if (tile >= t0) & (tile < t1):
            _one(x, w1, y1, tile - t0, ROWS, K, N1, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N2 > 0:
        if (tile >= t1) & (tile < t2):
            _one(x, w2, y2, tile - t1, ROWS, K, N2, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N3 > 0:
        if tile >= t2:
            _one(x, w3, y3, tile - t2, ROWS, K, N3, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
