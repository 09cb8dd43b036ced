# pyright: reportAssignmentType=false
"""Dense projections of few rows over weights in a stored form, decoded exactly in registers.

An e4m3 code is a bfloat16 value, and so is an E2M1 code times its e4m3 group scale (6 significant
bits): both go to the tensor cores as they are. What would not fit, the scale of a 128 x 128 block
or of a whole matrix, multiplies float32 sums: once for each step of 128 inputs, or at the end.
Weights of several forms may go in one launch, each program to its own.

Floor: the stored bytes over 4.3 TB/s, for lm_head 148 us in FP8 and 83 in NVFP4, where bfloat16 has
296. Decoding costs about 3 instructions a value in FP8 and 6 in NVFP4; at these rates a
multiprocessor has time for 7 and 12. An H200 takes 153 and 234 us. Above 32 rows FP8 is slower than
bfloat16 (13,952 outputs and 128 rows: 30.1 us, and 24.1): a program decodes, multiplies and scales
one after the other.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax import quant
from qwen4jax.pallas.skinny_matmul import MOST_WEIGHTS
from qwen4jax.pallas.triton_call import triton_call

# inputs of a step: those of a block of FP8, so that a step has one scale
_STEP = 128
# programs that fill the 132 multiprocessors of an H200 (152 of a GB300) with wide tiles
ENOUGH_TILES = 100
# and those with several tiles each at once
_MANY_TILES = 400


def form_of(w: Any) -> str:
    """How a weight is stored, as the kernel names it."""
    if isinstance(w, quant.BlockFp8):
        return "fp8"
    return "nvfp4" if isinstance(w, quant.Nvfp4) else "bf16"


def projections(
    x: jax.Array, weights: Sequence[Any], *, out_dtypes: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """See `qwen4jax.pallas.skinny_matmul.projections`."""
    flat = x.reshape(-1, x.shape[-1])
    rows, inputs = flat.shape
    outputs = [w.shape[0] for w in weights]
    absent = MOST_WEIGHTS - len(weights)
    forms = [*map(form_of, weights), *["bf16"] * absent]
    given = [*(parts(w, flat) for w in weights), *[(flat,) * 3] * absent]
    values, scales, whole = zip(*given, strict=True)
    return launched(
        x,
        (*values, *scales, *whole),
        outputs,
        out_dtypes,
        tiling(rows, outputs, forms[: len(weights)]),
        kernel=_projections,
        name=f"skinny_matmul_{form_of(weights[0])}_{rows}x{sum(outputs)}x{inputs}",
        **{f"FORM{i}": form for i, form in enumerate(forms)},
    )


def launched(
    x: jax.Array,
    stored: Sequence[jax.Array],
    outputs: Sequence[int],
    out_dtypes: Sequence[Any],
    tile: dict[str, Any],
    **how: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel over all tiles of up to `MOST_WEIGHTS` weights, whose arrays are `stored`."""
    flat = x.reshape(-1, x.shape[-1])
    rows, inputs = flat.shape
    absent = MOST_WEIGHTS - len(outputs)
    shape = jax.ShapeDtypeStruct
    results = triton_call(
        flat,
        *stored,
        out=(
            *(shape((rows, n), dtype) for n, dtype in zip(outputs, out_dtypes, strict=True)),
            # what is never written is small
            *[shape((1, 1), jnp.float32)] * absent,
        ),
        # tiles of tokens next to each other: a weight's second reader finds it in L2
        grid=(
            triton.cdiv(rows, tile["BLOCK_ROWS"]),
            sum(triton.cdiv(n, tile["BLOCK_N"]) for n in outputs),
        ),
        ROWS=rows,
        K=inputs,
        **{f"N{i}": n for i, n in enumerate([*outputs, *[0] * absent])},
        **tile,
        **how,
    )
    return tuple(y.reshape(*x.shape[:-1], n) for y, n in zip(results, outputs, strict=False))


def parts(w: Any, idle: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stored values, scales along the inputs, scale of the matrix; `idle` where one is not."""
    if isinstance(w, quant.BlockFp8):
        return w.weight, w.weight_scale_inv, idle
    if isinstance(w, quant.Nvfp4):
        return w.weight, w.weight_scale, w.weight_scale_2
    return w, idle, idle


def square(rows: int, outputs: Sequence[int]) -> bool:
    """Whether there are rows enough for square tiles, and tiles enough for all multiprocessors."""
    if rows <= 32:
        return False
    # above 128 rows programs of few outputs would read the weight once for every 32 of the rows
    return rows > 128 or sum(-(-n // 128) for n in outputs) >= ENOUGH_TILES


def tiling(rows: int, outputs: Sequence[int], forms: Sequence[str]) -> dict[str, Any]:
    """As for bfloat16: square tiles, 64 weight rows a program, or 16 and one warp."""
    if square(rows, outputs) and "nvfp4" not in forms:
        block_rows = 64 if rows <= 64 else 128
        return dict(BLOCK_ROWS=block_rows, BLOCK_N=128, BLOCK_K=_STEP, STAGES=3, num_warps=8)
    block_rows = max(8, triton.next_power_of_2(min(rows, 32)))
    common = dict(BLOCK_ROWS=block_rows, BLOCK_K=_STEP)
    tiles = sum(triton.cdiv(n, 64) for n in outputs)
    if tiles < ENOUGH_TILES:
        return dict(BLOCK_N=16, STAGES=8, num_warps=1, **common)
    if block_rows == 8 or "fp8" not in forms:
        return dict(BLOCK_N=64, STAGES=5, num_warps=4, **common)
    # A group of four warps waits for all of its products at once, two warps do not: 17.3 us instead
    # of 22.0 for 13,952 outputs and 32 rows. Of many tiles four at a time share a multiprocessor.
    return dict(BLOCK_N=64, STAGES=3 if tiles > _MANY_TILES else 5, num_warps=2, **common)


@triton.jit
def _e2m1(bits):
    """Codes whose bits s|eem stand at 15|11..9 of a uint16, as float32: their values times 2**-14.

    Such a half-precision number has the code's exponent, 14 lower; a code without an exponent
    becomes a subnormal one, which is exact too.
    """
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nvfp4_step(codes, scales, tokens, acc, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    """`acc` plus the products with K columns of N rows of packed codes, but for the last scale."""
    codes = codes.to(tl.uint16)
    scales = scales.to(tl.float32) * 16384.0
    scales = tl.broadcast_to(scales[:, :, None], (N, K // 16, 8)).reshape(N, K // 2)
    even, odd = tl.split(tokens.reshape(R, K // 2, 2))
    low = _e2m1(((codes & 0x07) << 9) | ((codes & 0x08) << 12))
    acc = tl.dot((low * scales).to(tl.bfloat16), even.T, acc)
    high = _e2m1(((codes & 0x70) << 5) | ((codes & 0x80) << 8))
    return tl.dot((high * scales).to(tl.bfloat16), odd.T, acc)


@triton.jit
def product(
    x, w, s, g, tile, first, last, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    FORM: tl.constexpr, STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of one weight's outputs for a program's rows, float32 [BLOCK_N, BLOCK_ROWS].

    Of the steps of BLOCK_K inputs from `first` to before `last`. What is past the last output is
    the last one again.
    """
    # stored elements of a row, and of a step of it
    PACKED: tl.constexpr = 2 if FORM == "nvfp4" else 1
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    stored = tl.arange(0, BLOCK_K // PACKED)
    read = tl.minimum(outputs, N - 1)[:, None].to(tl.int64)
    weight = w + read * (K // PACKED) + stored[None, :]
    groups = s + read * (K // 16) + tl.arange(0, BLOCK_K // 16)[None, :]
    token = x + rows[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    # of FP8: asked for a step before, for it comes from memory (two before, and the compiler would
    # not pipeline the loop)
    blocks = s + tile * BLOCK_N // 128 * (K // 128)
    scale = 0.0
    if FORM == "fp8":
        scale = tl.load(blocks + first * BLOCK_K // 128).to(tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * BLOCK_K
        left = tl.load(weight + k // PACKED, eviction_policy="evict_first")
        right = tl.load(token + k, mask=(rows < ROWS)[:, None], other=0.0)
        if FORM == "nvfp4":
            # a sector of scales serves four steps: it stays
            scales = tl.load(groups + k // 16)
            acc = _nvfp4_step(left, scales, right, acc, BLOCK_N, BLOCK_K, BLOCK_ROWS)
        elif FORM == "fp8":
            following = tl.load(blocks + tl.minimum(step + 1, last - 1) * BLOCK_K // 128)
            # by way of float32: the direct conversion takes one slow instruction a value
            part = tl.dot(left.to(tl.float32).to(tl.bfloat16), right.T)
            acc = tl.fma(part, tl.zeros_like(part) + scale, acc)
            scale = following.to(tl.float32)
        else:
            acc = tl.dot(left, right.T, acc)
    if FORM == "nvfp4":
        acc = acc * tl.load(g)
    return acc


@triton.jit
def _one(
    x, w, s, g, y, tile, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes a tile of one weight's outputs."""
    acc = product(
        x, w, s, g, tile, 0, K // BLOCK_K, ROWS, K, N, FORM, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K
    )
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = y + rows[None, :] * N + outputs[:, None]
    there = (rows < ROWS)[None, :] & (outputs < N)[:, None]
    tl.store(place, acc.to(y.dtype.element_ty), mask=there)


@triton.jit
def _projections(
    x, w0, w1, w2, w3, s0, s1, s2, s3, g0, g1, g2, g3, y0, y1, y2, y3,
    ROWS: tl.constexpr, K: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    FORM0: tl.constexpr, FORM1: tl.constexpr, FORM2: tl.constexpr, FORM3: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t0: tl.constexpr = tl.cdiv(N0, BLOCK_N)
    t1: tl.constexpr = t0 + tl.cdiv(N1, BLOCK_N)
    t2: tl.constexpr = t1 + tl.cdiv(N2, BLOCK_N)
    tile = tl.program_id(1)
    if tile < t0:
        _one(x, w0, s0, g0, y0, tile, ROWS, K, N0, FORM0, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N1 > 0:
        if (tile >= t0) & (tile < t1):
            own = tile - t0
            _one(x, w1, s1, g1, y1, own, ROWS, K, N1, FORM1, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N2 > 0:
        if (tile >= t1) & (tile < t2):
            own = tile - t1
            _one(x, w2, s2, g2, y2, own, ROWS, K, N2, FORM2, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
    if N3 > 0:
        if tile >= t2:
            own = tile - t2
            _one(x, w3, s3, g3, y3, own, ROWS, K, N3, FORM3, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K)
