# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Triton kernels of Gated DeltaNet's step of up to 8 tokens.

Bytes decide: the state is 64 KiB a head, 3.1 MB a row (48 heads), against 0.5 MB of everything
else; read once, that is 0.8 us a row at 4.3 TB/s. With few rows a program's chain of loads and
barriers is what there is to shorten, with many the number of programs that are under way.

Released heads go to the tensor cores (`triton_step_wide`). Here is the form for any others: a
program is one row's value head, a thread one value channel with its numbers of the state in
registers. Sums over the keys, the triangular system of the WY form and the outputs then stay inside
of a thread. What all threads need, the convolved queries and keys, the products between the tokens
and the gates, goes through a few KiB of global memory, read back as broadcasts of 16 bytes: as
tensors Triton would compute them anew in each thread, or move them through shared memory for every
use. All but the products is done while the state is on its way.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.pallas.gated_delta.triton_step_parts import (
    convolved,
    gate,
    joined_columns,
    keep,
    log_decay,
    normed,
    raw_inputs,
    solved,
    split_columns,
    weights_of,
)
from qwen4jax.pallas.gated_delta.triton_step_wide import wide_kernel
from qwen4jax.pallas.triton_call import triton_call
from qwen4jax.pallas.triton_math import exp

_DECAY_FLOOR = tl.constexpr(reference.DECAY_FLOOR)
# rows of a tensor core's smallest product: queries and keys of 8 tokens
_PAIRS = tl.constexpr(16)


@triton.jit
def _both(q, k, T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr):
    """[K, 2 TP] of the queries and the keys of `T` tokens; what is past them nobody reads."""
    columns = ()
    for t in tl.static_range(TP):
        columns = columns + (q[t if t < T else 0],)  # noqa: RUF005
    for t in tl.static_range(TP):
        columns = columns + (k[t if t < T else 0],)  # noqa: RUF005
    return joined_columns(columns, K, 2 * TP)


@triton.jit
def _pairs(
    x, to, dtype: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Products between queries and keys `x` [K, 2 TP], exact in `dtype`, as `solved` takes them.

    `to` is memory for them.
    """
    W: tl.constexpr = 2 * TP
    r = tl.arange(0, _PAIRS)
    kk = tl.arange(0, K if K > _PAIRS else _PAIRS)
    there = (r < W)[:, None] & (kk < K)[None, :]
    both = tl.load(x + kk[None, :] * W + r[:, None], mask=there, other=0.0).to(dtype)
    product = tl.dot(both, tl.trans(both), input_precision="ieee")
    tl.store(to + r[:, None] * _PAIRS + r[None, :], product)
    tl.debug_barrier()
    of_queries, mixed, of_keys = (), (), ()
    for i in tl.static_range(T):
        of_queries = of_queries + (tl.load(to + i * (_PAIRS + 1)),)  # noqa: RUF005
        for j in tl.static_range(i + 1):
            mixed = mixed + (tl.load(to + i * _PAIRS + TP + j),)  # noqa: RUF005
            of_keys = of_keys + (tl.load(to + (TP + i) * _PAIRS + TP + j),)  # noqa: RUF005
    return of_queries, mixed, of_keys


@triton.jit
def column_kernel(
    qkv, z, a, b, taps, a_log, dt_bias, norm, conv, state,
    out, window, key, delta, decay, scratch,
    T: tl.constexpr, TP: tl.constexpr, J: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr,
    EPS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One row's value head; `scratch` has `SIZE` numbers for each.

    `S` threads share a column. `R` of a thread's rows are one tensor, and each has sums of its own:
    Triton's compile time grows with the square of the number of loads.
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
    x = factors + W

    # before the state, behind which they would wait
    q_raw, q_taps = raw_inputs(qkv, conv, row, q_at, T, C, J), weights_of(taps, q_at, J)
    k_raw, k_taps = raw_inputs(qkv, conv, row, k_at, T, C, J), weights_of(taps, k_at, J)
    v_raw, v_taps = raw_inputs(qkv, conv, row, v_at, T, C, J), weights_of(taps, v_at, J)
    g = tl.load(a + gates, mask=live, other=0.0)
    g = log_decay(g, tl.load(a_log + head), tl.load(dt_bias + head))
    beta = tl.load(b + gates, mask=live, other=0.0).to(tl.float32)
    # that `program_id(2)` is 0 Triton does not know: it would give 16 bytes to a thread
    own = state + (row * V + head).to(tl.int64) * (K * E) + tl.program_id(2)
    own += tl.arange(0, R)[:, None] * (S * E) + tl.arange(0, S * E)[None, :]
    s = ()
    for i in tl.static_range(K // (R * S)):
        s = s + (tl.load(own + i * (R * S * E)),)  # noqa: RUF005
    gain = tl.load(norm + e).to(tl.float32)
    z_raw = ()
    for t in tl.static_range(T):
        z_raw = z_raw + (tl.load(z + first + t * V * E),)  # noqa: RUF005

    q, k = convolved(q_raw, q_taps, T, J), convolved(k_raw, k_taps, T, J)
    # by 16 bytes: one by one, the stores to neighbouring columns would queue for hundreds of clocks
    tl.store(x + kk[:, None] * W + tl.arange(0, W)[None, :], _both(q, k, T, TP, K))
    tl.store(factors + t_, exp(tl.maximum(g, _DECAY_FLOOR)))
    tl.store(factors + TP + t_, tl.sigmoid(beta))
    tl.debug_barrier()
    tl.store(decay + gates, g, mask=live)
    keep(window, v_raw, row, v_at, C, T + J - 1)
    if head % (V // H) == 0:
        keep(window, q_raw, row, q_at, C, T + J - 1)
        keep(window, k_raw, row, k_at, C, T + J - 1)
    v = convolved(v_raw, v_taps, T, J)
    gated = ()
    for t in tl.static_range(T):
        gated = gated + (gain * gate(z_raw[t].to(tl.float32), SIGMOID),)  # noqa: RUF005

    # all that waits for the state
    side: tl.constexpr = 4 if W > 4 else W
    beside = tl.arange(0, side)[None, None, :]
    beside += (tl.arange(0, R)[:, None] * S + tl.arange(0, S * E)[None, :] // E)[:, :, None] * W
    sums = ()
    for _ in tl.static_range(W // side):
        sums = sums + (tl.zeros((R, S * E, side), tl.float32),)  # noqa: RUF005
    for i in tl.static_range(K // (R * S)):
        more = ()
        for p in tl.static_range(W // side):
            some = tl.load(x + (i * R * S * W + p * side) + beside)
            more = more + (tl.fma(s[i][:, :, None], some, sums[p]),)  # noqa: RUF005
        sums = more
    read = ()
    for p in tl.static_range(W // side):
        together = tl.sum(sums[p], axis=0)
        if S > 1:
            together = tl.sum(together.reshape(S, E, side), axis=0)
        read = read + split_columns(together, E, side)
    # not before the pass over the state, which does not wait for them
    products = _pairs(x, pairs, qkv.dtype.element_ty, T, TP, K)

    fades, steps = (), ()
    for t in tl.static_range(T):
        fades = fades + (tl.load(factors + t),)  # noqa: RUF005
        steps = steps + (tl.load(factors + TP + t),)  # noqa: RUF005
    d, o, k_unit = solved(read, v, products, fades, steps, T, TP, K)
    scaled = normed(o, EPS, T, TP, E, TP if TP < 4 else 4)
    for t in tl.static_range(T):
        y = scaled[t] * gated[t]
        tl.store(out + first + t * V * E, y.to(out.dtype.element_ty))
        tl.store(delta + first + t * V * E, d[t])
    if head % (V // H) == 0:
        for t in tl.static_range(T):
            tl.store(key + ((row * T + t) * H + key_head) * K + kk, k[t] * k_unit[t])


# tokens -> threads of a column: what compiles without spills
_SHARE = {1: 1, 2: 1, 4: 1, 8: 2}
# rows of one tensor
_ROWS = 4
# channels of the heads that tensor cores take
_WIDE = 128
# programs of which each has a multiprocessor of an H200 to itself; and how many of its 32 loads of
# the state each begins with, if there are so many, or more
_FEW, _EARLY_OF_FEW, _EARLY_OF_MANY = 132, 32, 12


def step(qkv, z, a, b, weights, state, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.step`."""
    rows, places, width = qkv.shape
    _, heads, key, value = state.recurrent.shape
    taps = weights.conv1d.shape[1]
    sizes = dict(
        T=places, J=taps, H=key_heads, V=heads, K=key, E=value,
        EPS=eps, SIGMOID=activation == "sigmoid",
    )  # fmt: skip
    padded = triton.next_power_of_2(places)
    if key == value == _WIDE and qkv.dtype == jnp.bfloat16:
        kernel, room = wide_kernel, max(padded, 4)
        warps, scratch = value // 32, ()
        early = _EARLY_OF_FEW if rows * heads <= _FEW else _EARLY_OF_MANY
        sizes |= dict(TP=room, TN=padded, EARLY=early)
    else:
        kernel, share = column_kernel, min(_SHARE[padded], key)
        size = 2 * padded * (key + 1) + _PAIRS.value**2
        scratch = (jax.ShapeDtypeStruct((rows, heads, size), jnp.float32),)
        warps = max(1, share * value // 32)
        sizes |= dict(TP=padded, S=share, R=min(_ROWS, key // share), SIZE=size)
    shape = jax.ShapeDtypeStruct
    return triton_call(
        qkv, z, a, b, weights.conv1d, weights.A_log, weights.dt_bias, weights.norm,
        state.conv, state.recurrent,
        kernel=kernel,
        name=f"gated_delta_step_{rows}x{places}",
        out=(
            shape(z.shape, qkv.dtype),
            shape((rows, places + taps - 1, width), state.conv.dtype),
            shape((rows, places, key_heads, key), jnp.float32),
            shape((rows, places, heads, value), jnp.float32),
            shape((rows, places, heads), jnp.float32),
            *scratch,
        ),
        grid=(heads, rows),
        num_warps=warps,
        **sizes,
    )[:5]  # fmt: skip
