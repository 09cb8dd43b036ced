# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Triton kernel of Gated DeltaNet's step of up to 8 tokens.

Bytes decide: the state is 64 KiB a head, 3.1 MB a row (48 heads), against 0.2 MB of everything
else. A step reads it once, at 4.3 TB/s 0.7 us a row. A kernel in a graph costs about 1 us more, and
one program's chain of loads and barriers 1 to 2 us, so that with few rows the chain is what there
is to shorten.

A step's program is one row's value head. The state is loaded first, into registers and before
anything waits; the convolution, norms, gates and the products between the tokens, all small, run
while it is on its way. The WY form (`reference.one_chunk`) then needs one pass over it: products
with the keys and queries of all tokens at once, where the recurrence would need two products and
an update per token, each waiting for the one before.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

# exp(-88) is the last normal float32, as in the reference
DECAY_FLOOR = tl.constexpr(-88.0)
_UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def _log1p(x):
    """`log(1 + x)` of x in [0, 1], to float32 rounding: 2 atanh(x / (2 + x)) as a series.

    The hardware's logarithm is exact to 2**-22 absolutely, and decays are often smaller.
    """
    s = x / (2.0 + x)
    s2 = s * s
    p = 1.0 / 19.0
    for i in tl.static_range(8):
        p = p * s2 + 1.0 / (17.0 - 2.0 * i)
    return 2.0 * s * (1.0 + s2 * p)


@triton.jit
def _inputs(qkv, conv, row, place, channel, T: tl.constexpr, C: tl.constexpr, J: tl.constexpr):
    """Convolution inputs; place 0 is the oldest of the history, what is past the tokens is 0."""
    old = tl.load(conv + (row * (J - 1) + place) * C + channel, mask=place < J - 1, other=0)
    token = place - (J - 1)
    here = (token >= 0) & (token < T)
    new = tl.load(qkv + (row * T + token) * C + channel, mask=here, other=0)
    return tl.where(here, new, old)


@triton.jit
def _convolved(qkv, conv, taps, row, t, channel, T: tl.constexpr, C: tl.constexpr, J: tl.constexpr):
    """SiLU of the causal convolution, rounded as the reference rounds it; 0 past the tokens."""
    mixed = tl.load(taps + channel * J).to(tl.float32)
    mixed *= _inputs(qkv, conv, row, t, channel, T, C, J).to(tl.float32)
    for j in tl.static_range(1, J):
        x = _inputs(qkv, conv, row, t + j, channel, T, C, J)
        mixed += x.to(tl.float32) * tl.load(taps + channel * J + j).to(tl.float32)
    mixed = mixed * tl.sigmoid(mixed)
    mixed = mixed.to(qkv.dtype.element_ty).to(tl.float32)
    return tl.where(t < T, mixed, 0.0)


@triton.jit
def _keep_window(
    qkv, conv, window, row, channel,
    T: tl.constexpr, C: tl.constexpr, J: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, LP)[:, None]
    x = _inputs(qkv, conv, row, place, channel[None, :], T, C, J)
    where = window + (row * (T + J - 1) + place) * C + channel[None, :]
    tl.store(where, x, mask=place < T + J - 1)


@triton.jit
def _gated(out, z, norm, eps, E: tl.constexpr, SIGMOID: tl.constexpr):
    """Output norm of [places, E] with its gain, times the activated gate."""
    scale = tl.rsqrt(tl.sum(out * out, axis=1) / E + eps)
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = gate * z
    return out * scale[:, None] * norm[None, :] * gate


@triton.jit
def _product(x, y):
    """Product of two tiny matrices."""
    return tl.sum(x[:, :, None] * y[None, :, :], axis=1)


@triton.jit
def _inverse(system, TP: tl.constexpr):
    """`(I + system)^-1` of a strictly lower matrix, whose power `TP` is zero.

    `I - A + A^2 - ... = (I - A)(I + A^2)(I + A^4)`: exact but for rounding, and few steps that
    depend on each other.
    """
    t = tl.arange(0, TP)
    one = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    inverse = one - system
    if TP > 2:
        system = _product(system, system)
        inverse = _product(inverse, one + system)
    if TP > 4:
        system = _product(system, system)
        inverse = _product(inverse, one + system)
    return inverse


@triton.jit
def _stacked(x, R: tl.constexpr, N: tl.constexpr):
    """The upper and the lower half of the rows of [2R, N]."""
    return x.reshape(2, R, N).permute(1, 2, 0).split()


@triton.jit
def _mixed(matrix, x):
    """`matrix x` of [TP, TP] and [TP, EB], the sum within a thread."""
    return tl.sum(tl.trans(matrix)[:, :, None] * x[:, None, :], axis=0)


@triton.jit
def step_kernel(
    qkv, z, a, b, taps, a_log, dt_bias, norm, conv, state,
    out, window, key, delta, decay,
    T: tl.constexpr, TP: tl.constexpr, LP: tl.constexpr, J: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EB: tl.constexpr,
    EPS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One row's value head, or `EB` of its channels: then `out` is not normed yet, and float32.

    A thread holds whole columns of the state: the sum over the keys stays inside of it, and a warp
    still loads 128 bytes at a time. Triton would give 16 bytes to a thread and then move 64 KiB
    through shared memory; that `program_id(2)` is 0 it does not know, so it sees no 16 bytes.
    """
    C: tl.constexpr = 2 * H * K + V * E
    blocks: tl.constexpr = E // EB
    head = tl.program_id(0) // blocks
    part = tl.program_id(0) % blocks
    row = tl.program_id(1)
    zero = tl.program_id(2)
    kk = tl.arange(0, K)
    ee = part * EB + tl.arange(0, EB) + zero
    start = (row * V + head).to(tl.int64) * (K * E)
    s = tl.load(state + start + kk[:, None] * E + ee[None, :])

    # queries and keys as one: half as many instructions that wait for each other
    t = tl.arange(0, TP)
    key_head = head // (V // H)
    q_channel = key_head * K + kk + zero
    two = tl.arange(0, 2)[:, None, None]
    x_channel = two * (H * K) + q_channel[None, None, :]
    v_channel = 2 * H * K + head * E + ee
    x = _convolved(qkv, conv, taps, row, t[None, :, None], x_channel, T, C, J)
    v = _convolved(qkv, conv, taps, row, t[:, None], v_channel[None, :], T, C, J)
    live = t < T
    gate = (row * T + t) * V + head
    g = tl.load(a + gate, mask=live, other=0.0).to(tl.float32)
    g += tl.load(dt_bias + head).to(tl.float32)
    g = tl.maximum(g, 0.0) + _log1p(tl.exp(-tl.abs(g)))
    g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * g
    beta = tl.sigmoid(tl.load(b + gate, mask=live, other=0.0).to(tl.float32))
    x *= tl.rsqrt(tl.sum(x * x, axis=2) + _UNIT_EPS)[:, :, None] * tl.where(two == 0, K**-0.5, 1.0)
    _, k = x.permute(1, 2, 0).split()
    x = x.reshape(2 * TP, K)

    if part == 0:
        tl.store(decay + gate, g, mask=live)
        if head % (V // H) == 0:
            where = key + ((row * T + t) * H + key_head)[:, None] * K + (kk + zero)[None, :]
            tl.store(where, k, mask=live[:, None])
            _keep_window(qkv, conv, window, row, q_channel, T, C, J, LP)
            _keep_window(qkv, conv, window, row, H * K + q_channel, T, C, J, LP)
    _keep_window(qkv, conv, window, row, v_channel, T, C, J, LP)

    # log decay between tokens as a sum of its own terms, never a difference of running sums
    g = tl.where(live, tl.maximum(g, DECAY_FLOOR), 0.0)
    i, j = t[:, None], t[None, :]
    since = tl.exp(tl.sum(tl.where(j <= i, g[None, :], 0.0), axis=1))
    inside = (t[None, None, :] > j[:, :, None]) & (t[None, None, :] <= i[:, :, None])
    weight = tl.exp(tl.sum(tl.where(inside, g[None, None, :], 0.0), axis=2))
    pairs = tl.sum(tl.trans(x)[:, :, None] * tl.trans(k)[:, None, :], axis=0)
    from_q, from_k = _stacked(pairs, TP, TP)
    solve = _inverse(tl.where(i > j, beta[:, None] * weight * from_k, 0.0), TP)
    mixing = _product(tl.where(i >= j, weight * from_q, 0.0), solve)

    # all that waits for the state
    read_q, read_k = _stacked(tl.sum(s[None, :, :] * x[:, :, None], axis=1), TP, EB)
    r = beta[:, None] * (v - since[:, None] * read_k)
    d = _mixed(solve, r)
    o = since[:, None] * read_q + _mixed(mixing, r)

    place = ((row * T + t) * V + head)[:, None] * E + ee[None, :]
    tl.store(delta + place, d, mask=live[:, None])
    if EB == E:
        zz = tl.load(z + place, mask=live[:, None], other=0.0).to(tl.float32)
        gain = tl.load(norm + ee).to(tl.float32)
        o = _gated(o, zz, gain, EPS, E, SIGMOID)
    tl.store(out + place, o.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def norm_kernel(
    raw, z, norm, out, N: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    EPS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Output norm and gate of `R` heads of `raw` [N, E] float32."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    e = tl.arange(0, E)
    place = r[:, None] * E + e[None, :]
    there = (r < N)[:, None]
    o = tl.load(raw + place, mask=there, other=0.0)
    zz = tl.load(z + place, mask=there, other=0.0).to(tl.float32)
    o = _gated(o, zz, tl.load(norm + e).to(tl.float32), EPS, E, SIGMOID)
    tl.store(out + place, o.to(out.dtype.element_ty), mask=there)


# most tokens -> (programs per head, warps) of a step. A thread holds the columns of the state and,
# for a while, what they are multiplied with; these are what compiles without spills
_STEP_TILES = {1: (1, 4), 2: (1, 8), 4: (1, 8), 8: (4, 8)}


def step(qkv, z, a, b, weights, state, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.step`."""
    tile = next(tile for most, tile in _STEP_TILES.items() if qkv.shape[1] <= most)
    return _step(qkv, z, a, b, weights, state, key_heads, activation, eps, tile)


def step_16_warps(qkv, z, a, b, weights, state, *, key_heads, activation, eps):
    """`step` with more threads to a program, which then holds fewer registers."""
    split = 1 if qkv.shape[1] <= 4 else 2
    return _step(qkv, z, a, b, weights, state, key_heads, activation, eps, (split, 16))


def _step(qkv, z, a, b, weights, state, key_heads, activation, eps, tile):
    rows, places, width = qkv.shape
    _, heads, key, value = state.recurrent.shape
    taps = weights.conv1d.shape[1]
    split, num_warps = min(tile[0], value), tile[1]
    shape = jax.ShapeDtypeStruct
    sigmoid = activation == "sigmoid"
    out, *factors = triton_call(
        qkv, z, a, b, weights.conv1d, weights.A_log, weights.dt_bias, weights.norm,
        state.conv, state.recurrent,
        kernel=step_kernel,
        name=f"gated_delta_step_{rows}x{places}",
        out=(
            shape(z.shape, qkv.dtype if split == 1 else jnp.float32),
            shape((rows, places + taps - 1, width), state.conv.dtype),
            shape((rows, places, key_heads, key), jnp.float32),
            shape((rows, places, heads, value), jnp.float32),
            shape((rows, places, heads), jnp.float32),
        ),
        grid=(heads * split, rows),
        num_warps=num_warps,
        T=places, TP=triton.next_power_of_2(places),
        LP=triton.next_power_of_2(places + taps - 1), J=taps,
        H=key_heads, V=heads, K=key, E=value, EB=value // split, EPS=eps, SIGMOID=sigmoid,
    )  # fmt: skip
    if split > 1:
        out = _norm(out, z, weights.norm, heads, eps, sigmoid, qkv.dtype)
    return out, *factors


def _norm(raw, z, norm, heads, eps, sigmoid, dtype):
    total = raw.size // norm.shape[0]
    return triton_call(
        raw, z, norm,
        kernel=norm_kernel,
        name=f"gated_delta_norm_{total}",
        out=jax.ShapeDtypeStruct(raw.shape, dtype),
        grid=(triton.cdiv(total, 4),),
        num_warps=4,
        N=total, E=norm.shape[0], R=4, EPS=eps, SIGMOID=sigmoid,
    )  # fmt: skip
