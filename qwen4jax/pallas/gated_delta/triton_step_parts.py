# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""What both Triton kernels of Gated DeltaNet's step do: all but the products with the state."""

import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.pallas.triton_math import silu, softplus

_UNIT_EPS = tl.constexpr(reference.UNIT_EPS)


@triton.jit
def raw_inputs(qkv, conv, row, channel, T: tl.constexpr, C: tl.constexpr, J: tl.constexpr):
    """Convolution inputs of some channels, the history's first: a tensor for each place."""
    x = ()
    for p in tl.static_range(J - 1):
        x = x + (tl.load(conv + (row * (J - 1) + p) * C + channel),)  # noqa: RUF005
    for t in tl.static_range(T):
        x = x + (tl.load(qkv + (row * T + t) * C + channel),)  # noqa: RUF005
    return x


@triton.jit
def weights_of(taps, channel, J: tl.constexpr):
    """Convolution weights of some channels: a tensor for each tap."""
    w = ()
    for j in tl.static_range(J):
        w = w + (tl.load(taps + channel * J + j),)  # noqa: RUF005
    return w


@triton.jit
def convolved(x, taps, T: tl.constexpr, J: tl.constexpr):
    """SiLU of the causal convolution, rounded as the reference rounds it: a tensor a token."""
    out = ()
    for t in tl.static_range(T):
        mixed = x[t].to(tl.float32) * taps[0].to(tl.float32)
        for j in tl.static_range(1, J):
            mixed = tl.fma(x[t + j].to(tl.float32), taps[j].to(tl.float32), mixed)
        out = out + (silu(mixed).to(x[0].dtype).to(tl.float32),)  # noqa: RUF005
    return out


@triton.jit
def keep(window, x, row, channel, C: tl.constexpr, P: tl.constexpr):
    """Stores convolution inputs of `P` places."""
    for p in tl.static_range(P):
        tl.store(window + (row * P + p) * C + channel, x[p])


@triton.jit
def split_columns(x, N: tl.constexpr, W: tl.constexpr):
    """The `W` columns of [N, W], up to 8, which a thread has side by side."""
    if W == 1:
        columns = (x.reshape(N),)
    else:
        even, odd = x.reshape(N, W // 2, 2).split()
        even, odd = split_columns(even, N, W // 2), split_columns(odd, N, W // 2)
        columns = ()
        for i in tl.static_range(W // 2):
            columns = columns + (even[i], odd[i])  # noqa: RUF005
    return columns


@triton.jit
def joined_columns(x, N: tl.constexpr, W: tl.constexpr):
    """`split_columns` backwards."""
    if W == 1:
        columns = x[0].reshape(N, 1)
    else:
        even, odd = (), ()
        for i in tl.static_range(W // 2):
            even = even + (x[2 * i],)  # noqa: RUF005
            odd = odd + (x[2 * i + 1],)  # noqa: RUF005
        even, odd = joined_columns(even, N, W // 2), joined_columns(odd, N, W // 2)
        columns = tl.join(even, odd).reshape(N, W)
    return columns


@triton.jit
def log_decay(a, a_log, dt_bias):
    """Log decay of tokens from their logits."""
    g = softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    return -tl.exp(a_log.to(tl.float32)) * g


@triton.jit
def gate(z, SIGMOID: tl.constexpr):
    """The activated output gate."""
    return tl.sigmoid(z) if SIGMOID else silu(z)


@triton.jit
def solved(
    read, v, pairs, fades, steps,
    T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Corrections and outputs before the norm of each token, and what brings its key to norm 1.

    Decays between tokens are products of the tokens' own, so that no difference is formed.

    Args:
        read: products of the state with the `TP` queries, then with the keys.
        v: values of each token.
        pairs: products of queries, of queries with keys, of keys: of token `i` and `j` up to it
            number `i (i + 1) / 2 + j`, but of queries only those with themselves.
        fades: decay of each token.
        steps: step size of each.
        T: tokens.
        TP: tokens that `read` has room for.
        K: key channels.
    """
    qq, qk, kk = pairs
    k_unit, between, d, o = (), (), (), ()
    since = 1.0
    for i in tl.static_range(T):
        q_unit = tl.rsqrt(qq[i] + _UNIT_EPS) * K**-0.5
        k_unit = k_unit + (tl.rsqrt(kk[i * (i + 1) // 2 + i] + _UNIT_EPS),)  # noqa: RUF005
        since *= fades[i]
        right = tl.fma(read[TP + i], -since * k_unit[i], v[i])
        result = read[i] * (since * q_unit)
        through = ()
        for j in tl.static_range(i):
            weight = between[j] * fades[i]
            through = through + (weight,)  # noqa: RUF005
            weight *= k_unit[j]
            right = tl.fma(d[j], -weight * k_unit[i] * kk[i * (i + 1) // 2 + j], right)
            result = tl.fma(d[j], weight * q_unit * qk[i * (i + 1) // 2 + j], result)
        d = d + (right * steps[i],)  # noqa: RUF005
        own = k_unit[i] * q_unit * qk[i * (i + 1) // 2 + i]
        o = o + (tl.fma(d[i], own, result),)  # noqa: RUF005
        between = through + (1.0,)  # noqa: RUF005
    return d, o, k_unit


@triton.jit
def normed(
    x, eps, T: tl.constexpr, TP: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """`T` heads of `E` channels at their norm; one exchange between the warps for `G` of them."""
    out = ()
    if TP == 1:
        out = (x[0] * tl.rsqrt(tl.sum(x[0] * x[0], axis=0) / E + eps),)
    else:
        for first in tl.static_range(0, TP, G):
            heads = ()
            for t in tl.static_range(G):
                heads = heads + (x[first + t if first + t < T else 0],)  # noqa: RUF005
            heads = joined_columns(heads, E, G)
            scale = tl.rsqrt(tl.sum(heads * heads, axis=0) / E + eps)
            out = out + split_columns(heads * scale[None, :], E, G)
    return out
