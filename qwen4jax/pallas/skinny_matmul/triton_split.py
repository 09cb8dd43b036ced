# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""A dense projection of 33 to 128 rows whose weight has too few outputs for all multiprocessors.

Programs split the inputs too, and a second launch adds their sums in their order. At the released
size (2,560 outputs of 6,144 inputs, 31.5 MB) that is 120 programs, and 3.9 MB of sums, which stay
in L2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

MOST_ROWS = 128
_OUTPUTS, _STEP, _STAGES, _WARPS = 64, 64, 6, 4
# programs that run at once: one on each multiprocessor of an H200
_PROGRAMS = 132
# outputs that a program of the second launch adds up
_SHARE = 1024


def skinny_matmul(x: jax.Array, w: jax.Array, *, out_dtype: Any) -> jax.Array:
    """See `qwen4jax.pallas.skinny_matmul.skinny_matmul`; of up to `MOST_ROWS` rows."""
    flat = x.reshape(-1, x.shape[-1])
    (rows, inputs), outputs = flat.shape, w.shape[0]
    tiles, steps = triton.cdiv(outputs, _OUTPUTS), inputs // _STEP
    most = max(1, _PROGRAMS // tiles)
    splits = next(n for n in range(min(most, steps), 0, -1) if steps % n == 0)
    name = f"{rows}x{outputs}x{inputs}"
    parts = triton_call(
        flat,
        w,
        kernel=_part,
        name=f"skinny_split_{name}",
        out=jax.ShapeDtypeStruct((splits, rows, outputs), jnp.float32),
        grid=(tiles, splits),
        num_warps=_WARPS,
        ROWS=rows,
        PADDED=64 if rows <= 64 else MOST_ROWS,
        K=inputs,
        N=outputs,
        SHARE=inputs // splits,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_STEP,
        STAGES=_STAGES,
    )
    total = triton_call(
        parts,
        kernel=_sum,
        name=f"skinny_split_sum_{name}",
        out=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        grid=(triton.cdiv(rows * outputs, _SHARE),),
        num_warps=4,
        SIZE=rows * outputs,
        SPLITS=splits,
        SHARE=_SHARE,
    )
    return total.reshape(*x.shape[:-1], outputs)


@triton.jit
def _part(
    x, w, parts, ROWS: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over SHARE inputs of BLOCK_N outputs: grid (tiles, splits)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.arange(0, PADDED)
    place = split * SHARE + tl.arange(0, BLOCK_K)
    weight = w + tl.minimum(output, N - 1)[:, None].to(tl.int64) * K + place[None, :]
    token = x + row[:, None] * K + place[None, :]
    acc = tl.zeros((BLOCK_N, PADDED), tl.float32)
    for k in tl.range(0, SHARE, BLOCK_K, num_stages=STAGES):
        left = tl.load(weight + k, eviction_policy="evict_first")
        right = tl.load(token + k, mask=(row < ROWS)[:, None], other=0.0)
        acc = tl.dot(left, right.T, acc)
    at = parts + (split * ROWS + row)[None, :] * N + output[:, None]
    tl.store(at, acc, mask=(row < ROWS)[None, :] & (output < N)[:, None])


@triton.jit
def _sum(parts, y, SIZE: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr):
    """The splits' sums added in their order."""
    at = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    there = at < SIZE
    total = tl.load(parts + at, there, 0.0)
    for i in tl.static_range(1, SPLITS):
        total += tl.load(parts + i * SIZE + at, there, 0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), there)
