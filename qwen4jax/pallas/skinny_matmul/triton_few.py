# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""A dense projection of up to 8 rows by an FP8 weight of few outputs, by way of registers only.

A program has 16 outputs, and its warps take chunks of the inputs in turn: the products of
`moe.triton_stored`, whose lanes decode in place what they load. So all of a weight is under way at
once, where tiles in shared memory are too few for that: 2,560 outputs of 6,144 inputs in 10.2 us,
14.3 by one-warp programs of `triton_stored`, and of 2,560 in 6.0 (an H200, one row).
"""

from typing import Any

import jax
import triton
import triton.language as tl

from qwen4jax.pallas.moe.triton_stored import (
    FP8,
    lane_columns,
    load_chunk,
    load_tokens,
    product,
    scale_pointers,
    weight_pointers,
)
from qwen4jax.pallas.skinny_matmul import triton_stored
from qwen4jax.pallas.triton_call import triton_call

# rows and outputs of a product, and inputs of a step of a warp
_MOST_ROWS, _OUTPUTS, _CHUNK = 8, 16, 64
_WARPS = 8
# steps at most, and those asked for at once: with more registers a multiprocessor has one program
_MOST_STEPS, _AHEAD = 12, 7


def takes(rows: int, w: Any) -> bool:
    """Whether a weight is in FP8, and has too few outputs for wide tiles."""
    if triton_stored.form_of(w) != "fp8" or rows > _MOST_ROWS:
        return False
    outputs, inputs = w.shape
    few = -(-outputs // 64) < triton_stored.ENOUGH_TILES and outputs % _OUTPUTS == 0
    return few and inputs % (_CHUNK * _WARPS) == 0 and inputs <= _MOST_STEPS * _CHUNK * _WARPS


def skinny_matmul(x: jax.Array, w: Any, *, out_dtype: Any) -> jax.Array:
    """See `qwen4jax.pallas.skinny_matmul.skinny_matmul`; of what `takes` takes."""
    flat = x.reshape(-1, x.shape[-1])
    (rows, inputs), outputs = flat.shape, w.shape[0]
    y = triton_call(
        flat,
        w.weight,
        w.weight_scale_inv,
        kernel=_few,
        name=f"skinny_few_fp8_{rows}x{outputs}x{inputs}",
        out=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        grid=(outputs // _OUTPUTS,),
        num_warps=_WARPS,
        num_stages=1,
        ROWS=rows,
        K=inputs,
        N=outputs,
        C=_CHUNK,
        STEPS=inputs // (_CHUNK * _WARPS),
        AHEAD=_AHEAD,
        W=_WARPS,
    )
    return y.reshape(*x.shape[:-1], outputs)


@triton.jit
def _few(
    x, w, s, y, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """16 outputs of up to 8 rows: grid (N / 16,)."""
    first = tl.program_id(0) * 16
    weight = weight_pointers(w, first, K, C, C, True, W)
    scale = scale_pointers(s, 0, first, N, K, FP8, True, W)
    line = tl.arange(0, 8 * W)
    # rows after the last are that one: what comes of them is not looked at
    token = tl.minimum(line % 8, ROWS - 1) * K + line // 8 * C
    tokens = x + token[:, None] + lane_columns(C)[None, :]
    asked = ()
    for i in tl.static_range(min(AHEAD, STEPS)):
        asked = asked + (load_chunk(weight, scale, i, K, C, C, FP8, True, W),)  # noqa: RUF005
    # Loads stay above the barrier and products below the branch, which is always taken. Otherwise
    # the assembler saves registers, and waits for memory several times instead of once.
    tl.debug_barrier()
    if first < N:
        acc = tl.zeros((W, 16, 8), tl.float32)
        chunks = asked
        for i in tl.static_range(STEPS):
            right = load_tokens(tokens + i * (C * W), C, W)
            acc = product(chunks[i][0], chunks[i][1], right, acc, FP8, W)
            if i + AHEAD < STEPS:
                following = load_chunk(weight, scale, i + AHEAD, K, C, C, FP8, True, W)
                chunks = chunks + (following,)  # noqa: RUF005
        # in the order of the warps
        total = tl.sum(acc, 0)
        row = tl.arange(0, 8)[None, :]
        place = y + row * N + first + tl.arange(0, 16)[:, None]
        tl.store(place, total.to(y.dtype.element_ty), row < ROWS)
