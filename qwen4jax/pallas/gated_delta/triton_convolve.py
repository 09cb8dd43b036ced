# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Triton kernel of what comes first in a run of chunks of Gated DeltaNet: the convolution.

A head is a warp's share of a token here, so queries and keys leave at unit norm but for a factor,
in the float16 that tensor cores take: they need not go to memory in bfloat16 and come back.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.pallas.gated_delta.triton_prepare import CHUNK, exponent_of, power
from qwen4jax.pallas.gated_delta.triton_step_parts import joined_columns
from qwen4jax.pallas.triton_math import silu

_UNIT_EPS = tl.constexpr(reference.UNIT_EPS)


@triton.jit
def _place(
    qkv, conv, row, p, n, channel, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Convolution inputs of token `p` of a row; before 0 the history, from `n` on 0."""
    start = tl.where(p < 0, conv + (row * 3 + p + 3) * C, qkv + (row.to(tl.int64) * T + p) * C)
    return tl.load(start + channel, mask=(p < n) & (channel < C), other=0.0)


@triton.jit
def _taps(taps, channel, C: tl.constexpr):
    """The four bfloat16 taps of some channels, a channel's by one load of 8 bytes."""
    words = tl.load(
        taps.to(tl.pointer_type(tl.int64), bitcast=True) + channel, mask=channel < C, other=0
    )
    low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    w0, w1 = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
    w2, w3 = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(tl.float32, bitcast=True)
    return w0, w1, w2, w3


@triton.jit
def _convolved(x, w, i: tl.constexpr, there):
    """SiLU of the convolution that ends at place `i + 3`; 0 if it is not `there`."""
    y = x[i].to(tl.float32) * w[0]
    for j in tl.static_range(1, 4):
        y = tl.fma(x[i + j].to(tl.float32), w[j], y)
    return tl.where(there, silu(y), 0.0)


@triton.jit
def _near_unit(x, K: tl.constexpr, CB: tl.constexpr):
    """Heads of `K` channels by a power of two near unit norm, and what is left to unit norm."""
    heads = x.reshape(CB // K, K)
    unit = tl.rsqrt(tl.sum(heads * heads, axis=1) + _UNIT_EPS)
    near = power(exponent_of(unit) + 1)
    return (heads * near[:, None]).reshape(CB), unit / near


@triton.jit
def convolve_kernel(
    qkv, taps, conv, count,
    mixed, narrow, units, after,
    T: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, TB: tl.constexpr, CB: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution for `TB` tokens and `CB` channels; 0 from `count` to a chunk's end.

    A thread has the same channels of all tokens, so each input is loaded and widened once. Values
    go to `mixed`. Queries and keys go to `narrow` in float16, brought near unit norm by powers of
    two, which is exact but for what is below 2**-25 of the norm, and what is left to unit norm to
    `units`. Also writes the history after `count` tokens.
    """
    row = tl.program_id(2)
    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    first = tl.program_id(1) * TB
    n = tl.load(count + row)
    if first == 0:
        for j in tl.static_range(3):
            x = _place(qkv, conv, row, n - 3 + j, n, channel, T, C)
            tl.store(after + (row * 3 + j) * C + channel, x, mask=channel < C)
    if first < tl.cdiv(n, CHUNK) * CHUNK:
        # all at once: behind a store the compiler asks for nothing, as it may be what was stored
        x = ()
        for i in tl.static_range(TB + 3):
            x = x + (_place(qkv, conv, row, first - 3 + i, n, channel, T, C),)  # noqa: RUF005
        w = _taps(taps, channel, C)
        token = row.to(tl.int64) * PADDED + first
        if tl.program_id(0) < 2 * H * K // CB:
            head = tl.program_id(0) * (CB // K) + tl.arange(0, CB // K)
            left = ()
            for i in tl.static_range(TB):
                y = _convolved(x, w, i, first + i < n).to(mixed.dtype.element_ty)
                near, unit = _near_unit(y.to(tl.float32), K, CB)
                tl.store(narrow + (token + i) * (2 * H * K) + channel, near.to(tl.float16))
                left = left + (unit,)  # noqa: RUF005
            of = units + (token + tl.arange(0, TB)[None, :]) * (2 * H) + head[:, None]
            tl.store(of, joined_columns(left, CB // K, TB))
        else:
            to = mixed + token * (C - 2 * H * K) + (channel - 2 * H * K)
            for i in tl.static_range(TB):
                value = _convolved(x, w, i, first + i < n).to(mixed.dtype.element_ty)
                tl.store(to + i * (C - 2 * H * K), value, mask=channel < C)
