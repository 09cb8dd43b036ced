# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""`up` of `triton_launches.py`, for few rows and for many.

What is done with the product takes as long as the product: streams come 16 bytes at a time (8 of
few rows), and the gates by the hardware's approximations.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.gated_residual.triton_kernels import rounded
from qwen4jax.pallas.triton_math import sigmoid


@triton.jit
def up_kernel(
    streams,
    norm,
    factors,
    up,
    low,
    x,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """The mean over streams of EACH channels: grid (blocks of rows, D / EACH).

    Args:
        streams: with everything in them, or their norm [T, R D].
        norm: gain minus one [R D].
        factors: of the norm [R, ROWS].
        up: gates' projection [R D, L].
        low: of `squeeze_kernel`.
        x: [T, D].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block.
        EACH: channels of each stream.
        BLOCK: columns of a step.
        FACTORS: whether the streams still are to be normed.
    """
    block, first = tl.program_id(0), tl.program_id(1) * EACH
    line = tl.arange(0, ROWS)
    # rows of `up`: 16 to a warp, all streams of some channels, so that their sum stays within it
    index = tl.arange(0, R * EACH)
    SOME: tl.constexpr = 16 // R
    stream = index % 16 // SOME
    column = stream * D + first + index // 16 * SOME + index % SOME
    row = (block * ROWS + line).to(tl.int64)
    live = (row < T)[:, None]
    # under way before the products' first step
    some = tl.arange(0, EACH // SOME)[None, :, None, None] * SOME + tl.arange(0, SOME)
    place = row[:, None, None, None] * (R * D) + tl.arange(0, R)[None, None, :, None] * D
    value = tl.load(streams + first + place + some, live[:, :, None, None], 0.0)
    value = tl.reshape(value, (ROWS, R * EACH))
    factor, gain = 1.0, 0.0
    if FACTORS:
        factor = tl.load(factors + (stream * ROWS)[None, :] + line[:, None])
        gain = tl.load(norm + column)
    k = tl.arange(0, BLOCK)
    w = up + column[:, None] * L + k[None, :]
    z = low + block * (L * ROWS) + k[:, None] * ROWS + line[None, :]
    acc = tl.zeros((R * EACH, ROWS), tl.float32)
    for i in tl.range(0, L, BLOCK):
        acc = tl.dot(tl.load(w + i), tl.load(z + i * ROWS), acc)
    gates = sigmoid(acc).T
    value = value.to(tl.float32)
    if FACTORS:
        value = value * factor * (1.0 + gain.to(tl.float32))[None, :]
        value = value.to(tl.bfloat16).to(tl.float32)
    gated = tl.reshape(gates * value, (ROWS, R * EACH // 16, R, SOME))
    mean = tl.reshape(tl.sum(gated, axis=2) / R, (ROWS, EACH))
    channel = first + tl.arange(0, EACH)
    tl.store(x + row[:, None] * D + channel[None, :], mean.to(tl.bfloat16), live)


@triton.jit
def up_many_kernel(
    normed,
    up,
    low,
    x,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`up_kernel` of many rows, which are the 64-row side of a product here.

    So a thread has all streams of what it has, and their sum needs no other: grid (shares of rows,
    D / EACH).

    Args:
        normed: norm of the streams [T, R D].
        up: gates' projection [R D, L].
        low: of `squeeze_kernel`.
        x: [T, D].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block of `low`.
        OWN: of a program, which divide ROWS.
        EACH: channels of each stream.
        BLOCK: columns of a step.
    """
    share, first = tl.program_id(0), tl.program_id(1) * EACH
    line = tl.arange(0, OWN)
    row = (share * OWN + line).to(tl.int64)
    channel = first + tl.arange(0, EACH)
    # under way before the products' first step
    column = tl.arange(0, R)[None, :, None] * D + channel[None, None, :]
    value = tl.load(normed + row[:, None, None] * (R * D) + column, (row < T)[:, None, None], 0.0)
    index = tl.arange(0, R * EACH)
    k = tl.arange(0, BLOCK)
    w = up + (index // EACH * D + first + index % EACH)[:, None] * L + k[None, :]
    block, inside = share // (ROWS // OWN), share % (ROWS // OWN) * OWN
    z = low + block * (L * ROWS) + k[:, None] * ROWS + inside + line[None, :]
    acc = tl.zeros((OWN, R * EACH), tl.float32)
    for i in tl.range(0, L, BLOCK):
        acc = tl.dot(tl.load(z + i * ROWS).T, tl.load(w + i).T, acc)
    gates = tl.reshape(sigmoid(acc), (OWN, R, EACH))
    mean = tl.sum(gates * value.to(tl.float32), axis=1) / R
    tl.store(x + row[:, None] * D + channel[None, :], rounded(mean), (row < T)[:, None])
