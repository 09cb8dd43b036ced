# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Triton kernel of Gated DeltaNet's step of up to 8 tokens: a thread has a column of the state.

Bytes decide: the state is 64 KiB a head, 3.1 MB a row (48 heads), against 0.5 MB of everything
else; read once, that is 0.8 us a row at 4.3 TB/s. With few rows a program's chain of loads and
barriers is what there is to shorten, with many its instructions: so that they hide behind the
loads of another program, there may be about 14,000 of them for a head.

A program is one row's value head, a thread one value channel with its 128 numbers of the state in
registers. Sums over the keys, the triangular system of the WY form and the outputs then stay inside
of a thread. What all threads need, the convolved queries and keys, the products between the tokens
and the gates, goes through a few KiB of global memory, read back as broadcasts of 16 bytes: as
tensors Triton would compute them anew in each thread, or move them through shared memory for every
use. All but the products is done while the state is on its way, and 8 barriers are left.

A multiprocessor's loads return 128 bytes a clock, so such a broadcast to a warp takes 4 clocks. In
float32 the queries and keys of 4 tokens would be 4,096 clocks of them, twice the arithmetic of the
pass over the state; in bfloat16, where they are exact, they are half of that.

With many rows programs come in waves, each of which begins with a wait for its state. A program
therefore asks for the state of one of the next wave, which then comes from the cache while this
wave computes: 73.5 us for 32 rows instead of 80.3 on an H200.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.pallas.triton_math import exp, silu, softplus

_DECAY_FLOOR = tl.constexpr(reference.DECAY_FLOOR)
_UNIT_EPS = tl.constexpr(reference.UNIT_EPS)
# rows of a tensor core's smallest product: queries and keys of 8 tokens
_PAIRS = tl.constexpr(16)
# Triton wants a result
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def _raw(qkv, conv, row, channel, T: tl.constexpr, C: tl.constexpr, J: tl.constexpr):
    """Convolution inputs of some channels, the history's first: a tensor for each place."""
    x = ()
    for p in tl.static_range(J - 1):
        x = x + (tl.load(conv + (row * (J - 1) + p) * C + channel),)  # noqa: RUF005
    for t in tl.static_range(T):
        x = x + (tl.load(qkv + (row * T + t) * C + channel),)  # noqa: RUF005
    return x


@triton.jit
def _taps(taps, channel, J: tl.constexpr):
    """Convolution weights of some channels: a tensor for each tap."""
    w = ()
    for j in tl.static_range(J):
        w = w + (tl.load(taps + channel * J + j),)  # noqa: RUF005
    return w


@triton.jit
def _convolved(x, taps, T: tl.constexpr, J: tl.constexpr):
    """SiLU of the causal convolution, rounded as the reference rounds it: a tensor a token."""
    out = ()
    for t in tl.static_range(T):
        mixed = x[t].to(tl.float32) * taps[0].to(tl.float32)
        for j in tl.static_range(1, J):
            mixed = tl.fma(x[t + j].to(tl.float32), taps[j].to(tl.float32), mixed)
        out = out + (silu(mixed).to(x[0].dtype).to(tl.float32),)  # noqa: RUF005
    return out


@triton.jit
def _keep(window, x, row, channel, C: tl.constexpr, P: tl.constexpr):
    for p in tl.static_range(P):
        tl.store(window + (row * P + p) * C + channel, x[p])


@triton.jit
def _split(x, N: tl.constexpr, W: tl.constexpr):
    """The `W` columns of [N, W], up to 8, which a thread has side by side."""
    if W == 1:
        columns = (x.reshape(N),)
    else:
        even, odd = x.reshape(N, W // 2, 2).split()
        even, odd = _split(even, N, W // 2), _split(odd, N, W // 2)
        columns = ()
        for i in tl.static_range(W // 2):
            columns = columns + (even[i], odd[i])  # noqa: RUF005
    return columns


@triton.jit
def _joined(x, N: tl.constexpr, W: tl.constexpr):
    """`_split` backwards."""
    if W == 1:
        columns = x[0].reshape(N, 1)
    else:
        even, odd = (), ()
        for i in tl.static_range(W // 2):
            even = even + (x[2 * i],)  # noqa: RUF005
            odd = odd + (x[2 * i + 1],)  # noqa: RUF005
        even, odd = _joined(even, N, W // 2), _joined(odd, N, W // 2)
        columns = tl.join(even, odd).reshape(N, W)
    return columns


@triton.jit
def _both(q, k, T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr):
    """[K, 2 TP] of the queries and the keys of `T` tokens; what is past them nobody reads."""
    columns = ()
    for t in tl.static_range(TP):
        columns = columns + (q[t if t < T else 0],)  # noqa: RUF005
    for t in tl.static_range(TP):
        columns = columns + (k[t if t < T else 0],)  # noqa: RUF005
    return _joined(columns, K, 2 * TP)


@triton.jit
def _normed(
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
            heads = _joined(heads, E, G)
            scale = tl.rsqrt(tl.sum(heads * heads, axis=0) / E + eps)
            out = out + _split(heads * scale[None, :], E, G)
    return out


@triton.jit
def _log_decay(a, a_log, dt_bias, head, at, live):
    g = tl.load(a + at, mask=live, other=0.0).to(tl.float32)
    g += tl.load(dt_bias + head).to(tl.float32)
    g = softplus(g)
    return -tl.exp(tl.load(a_log + head).to(tl.float32)) * g


@triton.jit
def _gate(z, SIGMOID: tl.constexpr):
    """The activated output gate."""
    return tl.sigmoid(z) if SIGMOID else silu(z)


@triton.jit
def _pairs(x, pairs, dtype: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    """Products between all queries and keys `x` [K, W], which are exact in `dtype`."""
    r = tl.arange(0, _PAIRS)
    kk = tl.arange(0, K if K > _PAIRS else _PAIRS)
    there = (r < W)[:, None] & (kk < K)[None, :]
    both = tl.load(x + kk[None, :] * W + r[:, None], mask=there, other=0.0).to(dtype)
    product = tl.dot(both, tl.trans(both), input_precision="ieee")
    tl.store(pairs + r[:, None] * _PAIRS + r[None, :], product)


@triton.jit
def _ask(state, program, programs, SIZE: tl.constexpr):
    """Has memory send a program's state, or the last one's, to the cache by lines of 128 bytes."""
    own = state + tl.minimum(program, programs - 1).to(tl.int64) * SIZE
    lines = own + tl.arange(0, (SIZE + 31) // 32) * 32
    tl.inline_asm_elementwise(_PREFETCH, "=r,l", [lines.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def column_kernel(
    qkv, z, a, b, taps, a_log, dt_bias, norm, conv, state,
    out, window, key, delta, decay, scratch,
    T: tl.constexpr, TP: tl.constexpr, J: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr,
    EPS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One row's value head; `scratch` has `SIZE` numbers for each.

    The state of the program `AHEAD` later is asked for, where it is not 0.
    `S` threads share a column. `R` of a thread's rows are one tensor, and each has sums of its own:
    Triton's compile time grows with the square of the number of loads. Decays between tokens are
    products of the tokens' own, so that no difference is formed.
    """
    C: tl.constexpr = 2 * H * K + V * E
    W: tl.constexpr = 2 * TP
    head, row = tl.program_id(0), tl.program_id(1)
    key_head = head // (V // H)
    e, kk, t_ = tl.arange(0, E), tl.arange(0, K), tl.arange(0, TP)
    q_at, v_at = key_head * K + kk, 2 * H * K + head * E + e
    k_at = H * K + q_at
    live, gates = t_ < T, (row * T + t_) * V + head
    first = (row * T * V + head) * E + e
    pairs = scratch + (row * V + head).to(tl.int64) * SIZE
    factors = pairs + _PAIRS * _PAIRS
    # a load returns 128 bytes a clock, also of one address: bfloat16 halves what this waits for
    packed: tl.constexpr = qkv.dtype.element_ty == tl.bfloat16 and TP > 1
    x = (factors + W).to(tl.pointer_type(tl.bfloat16 if packed else tl.float32), bitcast=True)

    # before the 64 KiB of the state, behind which they would wait
    q_raw, q_taps = _raw(qkv, conv, row, q_at, T, C, J), _taps(taps, q_at, J)
    k_raw, k_taps = _raw(qkv, conv, row, k_at, T, C, J), _taps(taps, k_at, J)
    v_raw, v_taps = _raw(qkv, conv, row, v_at, T, C, J), _taps(taps, v_at, J)
    g = _log_decay(a, a_log, dt_bias, head, gates, live)
    beta = tl.load(b + gates, mask=live, other=0.0).to(tl.float32)
    # that `program_id(2)` is 0 Triton does not know: it would give 16 bytes to a thread
    own = state + (row * V + head).to(tl.int64) * (K * E) + tl.program_id(2)
    own += tl.arange(0, R)[:, None] * (S * E) + tl.arange(0, S * E)[None, :]
    s = ()
    for i in tl.static_range(K // (R * S)):
        s = s + (tl.load(own + i * (R * S * E)),)  # noqa: RUF005
    if AHEAD:
        _ask(state, row * V + head + AHEAD, tl.num_programs(1) * V, K * E)
    gain = tl.load(norm + e).to(tl.float32)
    z_raw = ()
    for t in tl.static_range(T):
        z_raw = z_raw + (tl.load(z + first + t * V * E),)  # noqa: RUF005

    q, k = _convolved(q_raw, q_taps, T, J), _convolved(k_raw, k_taps, T, J)
    # by 16 bytes: one by one, the stores to neighbouring columns would queue for hundreds of clocks
    both = _both(q, k, T, TP, K).to(x.dtype.element_ty)
    tl.store(x + kk[:, None] * W + tl.arange(0, W)[None, :], both)
    tl.store(factors + t_, exp(tl.maximum(g, _DECAY_FLOOR)))
    tl.store(factors + TP + t_, tl.sigmoid(beta))
    tl.debug_barrier()
    tl.store(decay + gates, g, mask=live)
    _keep(window, v_raw, row, v_at, C, T + J - 1)
    if head % (V // H) == 0:
        _keep(window, q_raw, row, q_at, C, T + J - 1)
        _keep(window, k_raw, row, k_at, C, T + J - 1)
    v = _convolved(v_raw, v_taps, T, J)
    gated = ()
    for t in tl.static_range(T):
        gated = gated + (gain * _gate(z_raw[t].to(tl.float32), SIGMOID),)  # noqa: RUF005

    # all that waits for the state
    words: tl.constexpr = W // 2 if packed else W
    side: tl.constexpr = 4 if words > 4 else words
    at = x.to(tl.pointer_type(tl.int32), bitcast=True)
    beside = tl.arange(0, side)[None, None, :]
    beside += (tl.arange(0, R)[:, None] * S + tl.arange(0, S * E)[None, :] // E)[:, :, None] * words
    sums = ()
    for _ in tl.static_range(W // side):
        sums = sums + (tl.zeros((R, S * E, side), tl.float32),)  # noqa: RUF005
    for i in tl.static_range(K // (R * S)):
        more = ()
        for p in tl.static_range(words // side):
            word = tl.load(at + (i * R * S * words + p * side) + beside)
            if packed:
                even = (word << 16).to(tl.float32, bitcast=True)
                odd = (word & -65536).to(tl.float32, bitcast=True)
                even = tl.fma(s[i][:, :, None], even, sums[2 * p])
                odd = tl.fma(s[i][:, :, None], odd, sums[2 * p + 1])
                more = more + (even, odd)  # noqa: RUF005
            else:
                one = word.to(tl.float32, bitcast=True)
                more = more + (tl.fma(s[i][:, :, None], one, sums[p]),)  # noqa: RUF005
        sums = more
    columns = ()
    for p in tl.static_range(W // side):
        together = tl.sum(sums[p], axis=0)
        if S > 1:
            together = tl.sum(together.reshape(S, E, side), axis=0)
        columns = columns + (_split(together, E, side),)  # noqa: RUF005
    read = ()
    for i in tl.static_range(W):
        if packed:
            read = read + (columns[i // (2 * side) * 2 + i % 2][i // 2 % side],)  # noqa: RUF005
        else:
            read = read + (columns[i // side][i % side],)  # noqa: RUF005

    # not before the pass over the state, which does not wait for them: 8.5 us instead of 8.8
    _pairs(x, pairs, qkv.dtype.element_ty, K, W)
    tl.debug_barrier()

    k_unit, between, d, o = (), (), (), ()
    since = 1.0
    for i in tl.static_range(T):
        own_q = pairs + i * _PAIRS
        own_k = own_q + TP * _PAIRS
        q_unit = tl.rsqrt(tl.load(own_q + i) + _UNIT_EPS) * K**-0.5
        k_unit = k_unit + (tl.rsqrt(tl.load(own_k + TP + i) + _UNIT_EPS),)  # noqa: RUF005
        fade = tl.load(factors + i)
        since *= fade
        right = tl.fma(read[TP + i], -since * k_unit[i], v[i])
        result = read[i] * (since * q_unit)
        through = ()
        for j in tl.static_range(i):
            weight = between[j] * fade
            through = through + (weight,)  # noqa: RUF005
            weight *= k_unit[j]
            right = tl.fma(d[j], -weight * k_unit[i] * tl.load(own_k + TP + j), right)
            result = tl.fma(d[j], weight * q_unit * tl.load(own_q + TP + j), result)
        d = d + (right * tl.load(factors + TP + i),)  # noqa: RUF005
        o = o + (tl.fma(d[i], k_unit[i] * q_unit * tl.load(own_q + TP + i), result),)  # noqa: RUF005
        between = through + (1.0,)  # noqa: RUF005

    normed = _normed(o, EPS, T, TP, E, TP if TP < 4 else 4)
    for t in tl.static_range(T):
        y = normed[t] * gated[t]
        tl.store(out + first + t * V * E, y.to(out.dtype.element_ty))
        tl.store(delta + first + t * V * E, d[t])
    if head % (V // H) == 0:
        for t in tl.static_range(T):
            tl.store(key + ((row * T + t) * H + key_head) * K + kk, k[t] * k_unit[t])


# tokens -> threads of a column: what compiles without spills
_SHARE = {1: 1, 2: 1, 4: 1, 8: 2}
# rows of one tensor
_ROWS = 4
# programs that run at once: two on each of an H200's multiprocessors
_WAVE = 264


def step(qkv, z, a, b, weights, state, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.step`."""
    rows, places, width = qkv.shape
    _, heads, key, value = state.recurrent.shape
    taps = weights.conv1d.shape[1]
    padded = triton.next_power_of_2(places)
    share = min(_SHARE[padded], key)
    size = 2 * padded * (key + 1) + _PAIRS.value**2
    shape = jax.ShapeDtypeStruct
    return triton_call(
        qkv, z, a, b, weights.conv1d, weights.A_log, weights.dt_bias, weights.norm,
        state.conv, state.recurrent,
        kernel=column_kernel,
        name=f"gated_delta_step_{rows}x{places}",
        out=(
            shape(z.shape, qkv.dtype),
            shape((rows, places + taps - 1, width), state.conv.dtype),
            shape((rows, places, key_heads, key), jnp.float32),
            shape((rows, places, heads, value), jnp.float32),
            shape((rows, places, heads), jnp.float32),
            shape((rows, heads, size), jnp.float32),
        ),
        grid=(heads, rows),
        num_warps=max(1, share * value // 32),
        T=places, TP=padded, J=taps, H=key_heads, V=heads, K=key, E=value,
        S=share, R=min(_ROWS, key // share), SIZE=size,
        AHEAD=_WAVE if rows * heads > _WAVE else 0, EPS=eps, SIGMOID=activation == "sigmoid",
    )[:5]  # fmt: skip
