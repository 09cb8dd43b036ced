# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""A dense projection of 17 rows and more whose weight has too few outputs for all multiprocessors.

Programs split the inputs too, and a second launch adds their sums in their order. At the released
size (2,560 outputs of 6,144 inputs, 31.5 MB) that is 120 programs, and at 128 rows 3.9 MB of sums,
which stay in L2. Of 32 rows an H200 takes 11.7 us, and 15.8 by programs of 16 outputs: each of
those reads all rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.skinny_matmul import triton_stored
from qwen4jax.pallas.skinny_matmul.triton_stored import product
from qwen4jax.pallas.triton_call import triton_call

# forms of the weights, and rows: fewer are a small part of what is read
_FORMS, _LEAST_ROWS = ("bf16", "fp8"), 17
# programs that run at once: one on each multiprocessor of an H200
_PROGRAMS = 132
# outputs that a program of the second launch adds up
_SHARE = 1024


def takes(rows: int, w: Any) -> bool:
    """Whether tiles are so few that the inputs are split."""
    return triton_stored.form_of(w) in _FORMS and rows >= _LEAST_ROWS and splits(rows, w) > 1


def splits(rows: int, w: Any) -> int:
    """Programs that share the inputs of a tile."""
    tile = _tiling(rows, w)
    outputs, inputs = w.shape
    tiles = triton.cdiv(rows, tile["BLOCK_ROWS"]) * triton.cdiv(outputs, tile["BLOCK_N"])
    return min(_PROGRAMS // tiles, inputs // tile["BLOCK_K"])


def _tiling(rows: int, w: Any) -> dict[str, Any]:
    """How a program's share is cut, and the warps and stages that measured best with it."""
    fp8 = triton_stored.form_of(w) == "fp8"
    block_rows = max(16, min(128, triton.next_power_of_2(rows)))
    if rows > 128:
        # blocks of rows make programs, too: with wider tiles each reads fewer rows
        step, stages = (128, 3) if fp8 else (64, 5)
        return dict(BLOCK_ROWS=128, BLOCK_N=128, BLOCK_K=step, STAGES=stages, num_warps=8)
    step, stages = (64, 6) if block_rows > 32 and not fp8 else (128, 6 if block_rows <= 32 else 4)
    return dict(BLOCK_ROWS=block_rows, BLOCK_N=64, BLOCK_K=step, STAGES=stages, num_warps=4)


def skinny_matmul(x: jax.Array, w: Any, *, out_dtype: Any) -> jax.Array:
    """See `qwen4jax.pallas.skinny_matmul.skinny_matmul`; of what `takes` takes."""
    flat = x.reshape(-1, x.shape[-1])
    (rows, inputs), outputs = flat.shape, w.shape[0]
    tile, parts, form = _tiling(rows, w), splits(rows, w), triton_stored.form_of(w)
    name = f"{form}_{rows}x{outputs}x{inputs}"
    sums = triton_call(
        flat,
        *triton_stored.parts(w, flat),
        kernel=_part,
        name=f"skinny_split_{name}",
        out=jax.ShapeDtypeStruct((parts, rows, outputs), jnp.float32),
        grid=(
            triton.cdiv(rows, tile["BLOCK_ROWS"]),
            triton.cdiv(outputs, tile["BLOCK_N"]),
            parts,
        ),
        ROWS=rows,
        K=inputs,
        N=outputs,
        FORM=form,
        **tile,
    )
    total = triton_call(
        sums,
        kernel=_sum,
        name=f"skinny_split_sum_{name}",
        out=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        grid=(triton.cdiv(rows * outputs, _SHARE),),
        num_warps=4,
        SIZE=rows * outputs,
        SPLITS=parts,
        SHARE=_SHARE,
    )
    return total.reshape(*x.shape[:-1], outputs)


@triton.jit
def _part(
    x, w, s, g, parts, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over a split's inputs of BLOCK_N outputs: grid (blocks of rows, tiles, splits)."""
    tile, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    STEPS: tl.constexpr = K // BLOCK_K
    first, last = split * STEPS // splits, (split + 1) * STEPS // splits
    acc = product(
        x, w, s, g, tile, first, last, ROWS, K, N, FORM, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K
    )
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    at = parts + (split * ROWS + row)[None, :] * N + output[:, None]
    tl.store(at, acc, mask=(row < ROWS)[None, :] & (output < N)[:, None])


@triton.jit
def _sum(parts, y, SIZE: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr):
    """The splits' sums added in their order."""
    at = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    there = at < SIZE
    loaded = ()
    for i in tl.static_range(SPLITS):
        loaded = loaded + (tl.load(parts + i * SIZE + at, there, 0.0),)  # noqa: RUF005
    total = loaded[0]
    for i in tl.static_range(1, SPLITS):
        total += loaded[i]
    tl.store(y + at, total.to(y.dtype.element_ty), there)
