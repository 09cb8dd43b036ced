# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Triton kernels of the n-gram embedding: hash and gather, and the mix of a few tokens.

`embed` reads 16 rows of 160 bytes a token, 2.5 KB, from a table of 51 GB that lies in pinned host
memory: the GPU loads over the bus (unified addressing) as it would from its own. At 55 GB/s 4
tokens take 0.2 us, so what counts is one trip over it: the hash runs in the same kernel, every row
is requested at once, and a program is one warp that waits for four rows.

`mix` moves 15 KB a token and stream in and 10 KB out, far below a launch; a program is one stream
of one token. The convolution reads what tokens up to 9 before it make: those of the same call are
made again, not waited for, which is cheap for few tokens and wrong for many.
"""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from qwen4jax import quant
from qwen4jax.pallas.triton_call import triton_call


@triton.jit
def _store_rows(
    table, scale, out, row, slot, there,
    W: tl.constexpr, WB: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Table rows `row` to the places `slot` of `out`; a scaled row is rounded to bfloat16 once."""
    c = tl.arange(0, WB)
    mask = there[:, None] & (c < W)[None, :]
    x = tl.load(table + row.to(tl.int64)[:, None] * W + c[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if SCALED:
        x = (x * tl.load(scale).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    tl.store(out + slot[:, None] * W + c[None, :], x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gather_kernel(
    table, scale, rows, out,
    N: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WB: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """`R` of `N` rows."""
    slot = tl.program_id(0) * R + tl.arange(0, R)
    there = slot < N
    row = tl.load(rows + slot, mask=there, other=0)
    _store_rows(table, scale, out, row, slot, there, W, WB, SCALED)


@triton.jit
def embed_kernel(
    table, scale, ids, sizes, offsets, out,
    T: tl.constexpr, ORDER: tl.constexpr, EOS: tl.constexpr, MULTIPLIERS: tl.constexpr,
    HEADS: tl.constexpr, PER_ORDER: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, WB: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """`R` heads of one token: 64-bit hash, row numbers, rows."""
    token = tl.program_id(0)
    head = tl.program_id(1) * R + tl.arange(0, R)
    there = head < HEADS
    # the order of a head's n-gram less one: 1 for bigrams
    longest = head // PER_ORDER + 1
    newest = ids + token // T * (T + ORDER - 1) + token % T + ORDER - 1
    c = tl.load(newest).to(tl.int64)
    mixed = tl.zeros((R,), tl.int64) + c * MULTIPLIERS[0]
    ended = c != c
    for i in tl.static_range(1, ORDER):
        # products stay below 2**63; nothing crosses the end of a document
        c = tl.load(newest - i).to(tl.int64)
        c = tl.where(ended, EOS, c)
        ended = c == EOS
        mixed = tl.where(longest >= i, mixed ^ (c * MULTIPLIERS[i]), mixed)
    size = tl.load(sizes + head, mask=there, other=1).to(tl.int64)
    row = mixed % size + tl.load(offsets + head, mask=there, other=0)
    _store_rows(table, scale, out, row, token * HEADS + head, there, W, WB, SCALED)


@triton.jit
def _unit(x, D: tl.constexpr, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)


@triton.jit
def _value(
    key, value, streams, norm_key, norm_query, norm_conv, token, stream,
    S: tl.constexpr, D: tl.constexpr, DB: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The gated value of a token's stream and its norm, both rounded, as float32 [DB]."""
    kind = streams.dtype.element_ty
    d = tl.arange(0, DB)
    there = d < D
    place = (token * S + stream) * D + d
    gain = stream * D + d
    k = tl.load(key + place, mask=there, other=0.0).to(tl.float32)
    q = tl.load(streams + place, mask=there, other=0.0).to(tl.float32)
    v = tl.load(value + token * D + d, mask=there, other=0.0).to(tl.float32)
    k_gain = 1.0 + tl.load(norm_key + gain, mask=there, other=0.0).to(tl.float32)
    q_gain = 1.0 + tl.load(norm_query + gain, mask=there, other=0.0).to(tl.float32)
    u_gain = 1.0 + tl.load(norm_conv + gain, mask=there, other=0.0).to(tl.float32)
    k = (_unit(k, D, EPS) * k_gain).to(kind).to(tl.float32)
    q = (_unit(q, D, EPS) * q_gain).to(kind).to(tl.float32)
    score = tl.sum(k * q, axis=0) * (D**-0.5)
    root = tl.sqrt(tl.maximum(tl.abs(score), 1e-6))
    gate = tl.where(score > 0, root, tl.where(score < 0, -root, 0.0))
    u = (tl.sigmoid(gate) * v).to(kind).to(tl.float32)
    return u, (_unit(u, D, EPS) * u_gain).to(kind).to(tl.float32)


@triton.jit
def mix_kernel(
    key, value, streams, norm_key, norm_query, norm_conv, taps, history, out, window,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DB: tl.constexpr,
    J: tl.constexpr, DILATION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One stream of one token."""
    P: tl.constexpr = (J - 1) * DILATION
    C: tl.constexpr = S * D
    stream = tl.program_id(0) % S
    t = tl.program_id(0) // S
    row = tl.program_id(1)
    d = tl.arange(0, DB)
    there = d < D
    channel = stream * D + d
    token = row * T + t
    u, normed = _value(
        key, value, streams, norm_key, norm_query, norm_conv, token, stream, S, D, DB, EPS
    )
    kept = window + row * (P + T) * C + channel
    tl.store(kept + (P + t) * C, normed.to(window.dtype.element_ty), mask=there)
    conv = normed * tl.load(taps + channel * J + J - 1, mask=there, other=0.0).to(tl.float32)
    for j in tl.static_range(1, J):
        tap = tl.load(taps + channel * J + J - 1 - j, mask=there, other=0.0).to(tl.float32)
        earlier = t - j * DILATION
        if earlier >= 0:
            _, x = _value(
                key, value, streams, norm_key, norm_query, norm_conv,
                row * T + earlier, stream, S, D, DB, EPS,
            )  # fmt: skip
        else:
            x = tl.load(history + (row * P + P + earlier) * C + channel, mask=there, other=0.0)
            x = x.to(tl.float32)
        conv += x * tap
    o = u + conv * tl.sigmoid(conv)
    tl.store(out + (token * S + stream) * D + d, o.to(out.dtype.element_ty), mask=there)
    # the history's places are shared out among the tokens
    for p in range(t, P, T):
        old = tl.load(history + (row * P + p) * C + channel, mask=there, other=0.0)
        tl.store(kept + p * C, old, mask=there)


# table rows of a program of one warp
_ROWS = 4


def gather(table, rows, dtype):
    """See `qwen4jax.pallas.ple.gather`."""
    values, scale = _stored(table)
    width = values.shape[1]
    return triton_call(
        values, scale, rows,
        kernel=gather_kernel,
        name=f"ple_gather_{rows.size}x{width}",
        out=jax.ShapeDtypeStruct((*rows.shape[:-1], rows.shape[-1] * width), jnp.dtype(dtype)),
        grid=(triton.cdiv(rows.size, _ROWS),),
        num_warps=1,
        N=rows.size, R=_ROWS, W=width, WB=triton.next_power_of_2(width),
        SCALED=isinstance(table, quant.ScaledTable),
    )  # fmt: skip


def embed(table, ids, hash, dtype, *, eos):
    """See `qwen4jax.pallas.ple.embed`."""
    values, scale = _stored(table)
    width, heads = values.shape[1], len(hash.head_sizes)
    places = ids.shape[1] - hash.ngram_size + 1
    return triton_call(
        values, scale, ids,
        jnp.asarray(np.array(hash.head_sizes, np.int32)),
        jnp.asarray(np.array(hash.head_offsets, np.int32)),
        kernel=embed_kernel,
        name=f"ple_embed_{ids.shape[0]}x{places}x{heads}",
        out=jax.ShapeDtypeStruct((ids.shape[0], places, heads * width), jnp.dtype(dtype)),
        grid=(ids.shape[0] * places, triton.cdiv(heads, _ROWS)),
        num_warps=1,
        T=places, ORDER=hash.ngram_size, EOS=eos, MULTIPLIERS=hash.multipliers,
        HEADS=heads, PER_ORDER=hash.heads_per_ngram,
        R=_ROWS, W=width, WB=triton.next_power_of_2(width),
        SCALED=isinstance(table, quant.ScaledTable),
    )  # fmt: skip


def mix(key, value, streams, norm_key, norm_query, norm_conv, conv1d, history, *, dilation, eps):
    """See `qwen4jax.pallas.ple.mix`."""
    rows, places, count, hidden = streams.shape
    taps = conv1d.shape[1]
    length = (taps - 1) * dilation + places
    return tuple(
        triton_call(
            key, value, streams, norm_key, norm_query, norm_conv, conv1d, history,
            kernel=mix_kernel,
            name=f"ple_mix_{rows}x{places}x{count}x{hidden}",
            out=(
                jax.ShapeDtypeStruct(streams.shape, streams.dtype),
                jax.ShapeDtypeStruct((rows, length, count * hidden), history.dtype),
            ),
            grid=(places * count, rows),
            num_warps=8,
            T=places, S=count, D=hidden, DB=triton.next_power_of_2(hidden),
            J=taps, DILATION=dilation, EPS=eps,
        )
    )  # fmt: skip


def _stored(table):
    """Rows as stored, and a scale, which a plain table has none of."""
    if isinstance(table, quant.ScaledTable):
        return table.weight, table.weight_scale
    return table, jnp.zeros((), jnp.bfloat16)
