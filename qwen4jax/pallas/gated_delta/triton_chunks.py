# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""Triton kernels of Gated DeltaNet over many tokens: the WY form on tensor cores.

Four launches: the convolution of all tokens; what each chunk of 64 needs before it knows its state,
all chunks at once; the chunks of a head one after the other, for a slice of its value channels; the
output norm, which wants all channels of a head.

The floor for 8,192 tokens and 48 value heads of 128 x 128 (6,144 chunks of heads), on an H200:
bytes 0.34 GB convolution + 0.22 GB preparation + 0.42 GB recurrence + 0.30 GB norm = 1.3 GB, 310 us
at 4.3 TB/s, of which the recurrence's 100 us hide behind its products: 8.9 million multiplications
a chunk and head, 0.11 PFLOP in all, 110 us at the peak of bf16 and 140 us on the 96 multiprocessors
that have a program. They wait for each other: 1,900 cycles of products a chunk, and as much again
of latency and of conversions between them, 128 chunks, 280 us.

Precision: the state is good to float32 rounding, as that of single steps. The convolution leaves
bfloat16, so queries, keys and values are exact operands (in float16 too, near unit norm), and the
unit norms are factors of rows. Every other operand whose product reaches the state is the sum of
two float16, 22 bits of the largest of its row, which a power of two brings into their range. What
only reaches the output, of bfloat16 itself, is one of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta.triton_convolve import convolve_kernel
from qwen4jax.pallas.gated_delta.triton_prepare import (
    CHUNK,
    SCALE,
    exponent_of,
    power,
    prepare_kernel,
    split,
)
from qwen4jax.pallas.triton_call import triton_call

# exponent to which rows are brought in float16: a row of 64 then stays in it when the triangular
# system is solved, as no entry of the inverse is above 1
_LARGEST = tl.constexpr(8)


@triton.jit
def _size(x):
    """Exponents of the powers of two that rows of `x` are divided by to go into float16.

    They are cut where a power or its inverse would not be a normal number.
    """
    largest = exponent_of(tl.max(tl.abs(x), axis=1))
    return tl.minimum(tl.maximum(largest, -80), 120) - _LARGEST


@triton.jit
def recur_kernel(
    mixed, narrow, solve, mixing, scales, count, state,
    raw,
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, E: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """The chunks of one row's value head in order, for `EB` of its channels.

    All of it is transposed, value channels first: what one product leaves in registers is then laid
    out as the left operand of the next, and the chain from state to state never waits for shared
    memory. The state is replaced in place; `raw` is the output before its norm.
    """
    head, row = tl.program_id(0) // (E // EB), tl.program_id(1)
    e = tl.program_id(0) % (E // EB) * EB + tl.arange(0, EB)
    t, kk = tl.arange(0, CHUNK), tl.arange(0, K)
    n = tl.load(count + row)
    own = state + (row * V + head).to(tl.int64) * (K * E) + kk[:, None] * E + e[None, :]
    s = tl.trans(tl.load(own))

    # numbers move on from chunk to chunk, where tensors of addresses would hold registers
    q_at = narrow + row.to(tl.int64) * (N * CHUNK * 2 * H * K) + head // (V // H) * K
    v_at = mixed + row.to(tl.int64) * (N * CHUNK * V * E) + head * E
    raw_at = raw + row.to(tl.int64) * (T * V * E) + head * E
    part = (row * N * V + head).to(tl.int64)
    mixing_at = mixing + part * (CHUNK * CHUNK)
    solve_at = solve + part * (2 * CHUNK * CHUNK)
    scales_at = scales + part * (4 * CHUNK)
    keys = t[:, None] * (2 * H * K) + kk[None, :]
    values = t[:, None] * (V * E) + e[None, :]
    square = t[:, None] * CHUNK + t[None, :]
    # turns the values without leaving the registers' layout, and exactly
    one = tl.where(t[:, None] == t[None, :], 1.0, 0.0).to(tl.bfloat16)
    total = tl.load(scales_at + 3 * CHUNK, mask=n > 0, other=1.0)
    for chunk in range(tl.cdiv(n, CHUNK)):
        # what no pipeline loads ahead is asked for well before its use
        q_scale = tl.load(scales_at + CHUNK + t)
        more = (chunk + 1) * CHUNK < n
        next_total = tl.load(scales_at + (V * 4 + 3) * CHUNK, mask=more, other=1.0)
        k = tl.load(q_at + H * K + keys)
        # powers of two by rows bring operands into the range of float16, and results back
        s_size = _size(s)
        old, low = split(s * power(-s_size)[:, None])
        read = tl.dot(old, tl.trans(k), tl.dot(low, tl.trans(k)))
        v = tl.dot(tl.trans(tl.load(v_at + values)), one)
        read *= power(s_size)[:, None]
        # fused, which XLA's Triton does only where it is written
        right = tl.fma(read, -tl.load(scales_at + t)[None, :], v)

        size = _size(right)
        down = power(size)[:, None]
        high, low = split(right * power(-size)[:, None])
        solved = tl.trans(tl.load(solve_at + square))
        solved_low = tl.trans(tl.load(solve_at + CHUNK * CHUNK + square))
        delta = tl.dot(high, solved, tl.dot(high, solved_low, tl.dot(low, solved))) * (1 / SCALE)
        out = tl.dot(old, tl.trans(tl.load(q_at + keys)))
        out *= q_scale[None, :] * power(s_size)[:, None]
        mixed_in = tl.dot(delta.to(tl.float16), tl.trans(tl.load(mixing_at + square)))
        out = tl.fma(mixed_in, down * (1 / SCALE), out)
        live = (t < n - chunk * CHUNK)[:, None]
        to = raw_at + t[:, None] * (V * E) + e[None, :]
        tl.store(to, tl.trans(out.to(raw.dtype.element_ty)), mask=live)

        # a chunk may have decayed to far below its corrections: again a power of its own
        pushed = delta * tl.load(scales_at + 2 * CHUNK + t)[None, :]
        more_size = _size(pushed)
        high, low = split(pushed * power(-more_size)[:, None])
        down *= power(more_size)[:, None]
        # added up here: tensor cores cut sums off, and the state must not shrink with every chunk
        s = tl.fma(s, total, tl.dot(high, k, tl.dot(low, k)) * down)
        total = next_total

        q_at += CHUNK * 2 * H * K
        v_at += CHUNK * V * E
        raw_at += CHUNK * V * E
        mixing_at += V * CHUNK * CHUNK
        solve_at += V * 2 * CHUNK * CHUNK
        scales_at += V * 4 * CHUNK
    tl.store(own, tl.trans(s))


@triton.jit
def _gated(out, z, norm, eps, E: tl.constexpr, SIGMOID: tl.constexpr):
    """Output norm of [places, E] with its gain, times the activated gate."""
    scale = tl.rsqrt(tl.sum(out * out, axis=1) / E + eps)
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = gate * z
    return out * scale[:, None] * norm[None, :] * gate


@triton.jit
def finish_kernel(
    raw, z, norm, count,
    out,
    T: tl.constexpr, V: tl.constexpr, E: tl.constexpr, TB: tl.constexpr,
    EPS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Output norm and gate of `TB` tokens of one head; 0 from `count` on."""
    head, row = tl.program_id(0), tl.program_id(2)
    t = tl.program_id(1) * TB + tl.arange(0, TB)
    e = tl.arange(0, E)
    at = (row.to(tl.int64) * T + t[:, None]) * (V * E) + head * E + e[None, :]
    there = (t < T)[:, None]
    # before `count` is known: what is behind it may be anything, and is not looked at
    o = tl.load(raw + at, mask=there, other=0.0)
    gate = tl.load(z + at, mask=there, other=0.0)
    gain = tl.load(norm + e)
    live = (t < tl.load(count + row))[:, None]
    tl.debug_barrier()
    o = _gated(o.to(tl.float32), gate.to(tl.float32), gain.to(tl.float32), EPS, E, SIGMOID)
    tl.store(out + at, tl.where(live, o, 0.0).to(out.dtype.element_ty), mask=there)


# tokens and channels of a convolution's program, 4 channels a thread: with 16 tokens a thread needs
# too many registers for the norms of queries and keys, 5 us more for 8,192 tokens
_CONV_TOKENS, _CONV_CHANNELS = 8, 512
# value channels, warps and pipeline depth of the recurrence
_RECUR_CHANNELS, _RECUR_WARPS, _RECUR_STAGES = 64, 4, 3
_PREPARE_WARPS = 4
_FINISH_TOKENS = 16


def prepared(qkv, a, b, weights, state, count, *, key_heads):
    """What needs no state: the convolution, its history after `count`, what chunks prepare."""
    rows, places, width = qkv.shape
    _, heads, key, value = state.recurrent.shape
    size, conv = CHUNK.value, state.conv
    number = triton.cdiv(places, size)
    like = jax.ShapeDtypeStruct
    label = f"{rows}x{places}"
    of_pairs = 2 * key_heads * key
    # all of a program's are queries and keys, or none
    channels = min(_CONV_CHANNELS, of_pairs & -of_pairs)
    mixed, narrow, units, history = triton_call(
        qkv, weights.conv1d, conv, count,
        kernel=convolve_kernel,
        name=f"gated_delta_convolve_{label}",
        out=(
            like((rows, number * size, heads * value), qkv.dtype),
            like((rows, number * size, 2, key_heads, key), jnp.float16),
            like((rows, number * size, 2, key_heads), jnp.float32),
            like(conv.shape, conv.dtype),
        ),
        grid=(triton.cdiv(width, channels), number * (size // _CONV_TOKENS), rows),
        T=places, PADDED=number * size, C=width, TB=_CONV_TOKENS, CB=channels,
        H=key_heads, K=key,
    )  # fmt: skip
    group = next(n for n in (3, 4, 2, 1) if heads // key_heads % n == 0)
    more = triton_call(
        narrow, units, a, b, weights.A_log, weights.dt_bias, count,
        kernel=prepare_kernel,
        name=f"gated_delta_prepare_{label}",
        out=(
            like((rows, number, heads, 2, size, size), jnp.float16),
            like((rows, number, heads, size, size), jnp.float16),
            like((rows, number, heads, 4, size), jnp.float32),
        ),
        grid=(number, heads // group, rows),
        num_warps=_PREPARE_WARPS,
        T=places, N=number, H=key_heads, V=heads, K=key,
        G=group, GP=triton.next_power_of_2(group),
    )  # fmt: skip
    return history, (mixed, narrow, *more)


def finished(raw, z, norm, count, activation, eps, heads):
    """The outputs: norm of each head, times the gate."""
    rows, places, width = z.shape
    return triton_call(
        raw, z, norm, count,
        kernel=finish_kernel,
        name=f"gated_delta_finish_{rows}x{places}",
        out=jax.ShapeDtypeStruct(z.shape, z.dtype),
        grid=(heads, triton.cdiv(places, _FINISH_TOKENS), rows),
        T=places, V=heads, E=width // heads, TB=_FINISH_TOKENS,
        EPS=eps, SIGMOID=activation == "sigmoid",
    )  # fmt: skip


def chunks(qkv, z, a, b, weights, state, count, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.chunks`."""
    rows, places, _ = qkv.shape
    _, heads, key, value = state.recurrent.shape
    history, given = prepared(qkv, a, b, weights, state, count, key_heads=key_heads)
    like = jax.ShapeDtypeStruct
    part = min(_RECUR_CHANNELS, value)
    recurrent, raw = triton_call(
        *given, count, state.recurrent,
        kernel=recur_kernel,
        name=f"gated_delta_recur_{rows}x{places}",
        out=(like(state.recurrent.shape, jnp.float32), like(z.shape, jnp.bfloat16)),
        grid=(heads * (value // part), rows),
        num_warps=_RECUR_WARPS,
        num_stages=_RECUR_STAGES,
        aliases={6: 0},
        T=places, N=triton.cdiv(places, CHUNK.value), H=key_heads, V=heads, K=key, E=value, EB=part,
    )  # fmt: skip
    out = finished(raw, z, weights.norm, count, activation, eps, heads)
    return out, dataclasses.replace(state, conv=history, recurrent=recurrent)
