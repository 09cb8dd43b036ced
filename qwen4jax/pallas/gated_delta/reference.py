"""Gated DeltaNet in plain `jnp`: the recurrence, and its chunked (WY) form."""

import dataclasses

import jax
import jax.numpy as jnp

from qwen4jax.numerics import EXACT, l2_norm, windows_after

_CHUNK = 64
# exp(-88) is the last normal float32; a lower decay would make differences of -inf
DECAY_FLOOR = -88.0
# of the unit norm of queries and keys
UNIT_EPS = 1e-6
# a triangular solve of so few rows is cheaper written out than called
_UNROLL = 8


def recurrent(q, k, v, decay, beta, state):
    """The delta rule token by token, the form the others are held against.

    Args:
        q: [B, T, V, K] float32, normed and scaled.
        k: [B, T, V, K] float32, normed.
        v: [B, T, V, E] float32.
        decay: [B, T, V] log decay.
        beta: [B, T, V] step size.
        state: [B, V, K, E] float32.

    Returns:
        Outputs [B, T, V, E] and the state after the last token.
    """

    def token(s, x):
        q, k, v, g, beta = x
        s = s * jnp.exp(g)[..., None, None]
        delta = beta[..., None] * (v - _dot("bvke,bvk->bve", s, k))
        s = s + k[..., :, None] * delta[..., None, :]
        return s, _dot("bvke,bvk->bve", s, q)

    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, decay, beta))
    state, out = jax.lax.scan(token, state, steps)
    return jnp.moveaxis(out, 0, 1), state


def one_chunk(q, k, v, decay, beta, state):
    """Outputs [B, T, V, E] and corrections `delta` [B, T, V, E] of one chunk; as `recurrent`."""
    decay = jnp.maximum(decay, DECAY_FLOOR)
    between = _decay_between(decay)  # [B, V, T, T]
    since = jnp.exp(jnp.cumsum(decay, axis=1))  # [B, T, V], decay of the incoming state
    length = q.shape[1]
    lower = jnp.tril(jnp.ones((length, length), bool))
    weight = jnp.where(lower, jnp.exp(jnp.where(lower, between, 0.0)), 0.0)
    strict = jnp.where(lower & ~jnp.eye(length, dtype=bool), weight, 0.0)

    # one product reads the state for keys and queries together
    both = jnp.concatenate([k, q], axis=1)
    read = _dot("btvk,bvke->btve", both, state)
    from_keys = read[:, :length] * since[..., None]
    from_queries = read[:, length:] * since[..., None]

    step_size = jnp.moveaxis(beta, 1, -1)[..., None]  # [B, V, T, 1]
    system = step_size * strict * _dot("bivk,bjvk->bvij", k, k)
    right = jnp.moveaxis(beta[..., None] * (v - from_keys), 1, 2)  # [B, V, T, E]
    delta = _solve_unit_lower(system, right)
    out = _dot("bvij,bvje->bive", weight * _dot("bivk,bjvk->bvij", q, k), delta)
    return from_queries + out, jnp.moveaxis(delta, 1, 2)


def advance(state, k, delta, decay):
    """The state [B, V, K, E] after all tokens of a chunk with corrections `delta`."""
    decay = jnp.maximum(decay, DECAY_FLOOR)
    total = jnp.sum(decay, axis=1)
    # decay from each token to the end, summed backwards so that no difference is formed
    after = jnp.flip(jnp.cumsum(jnp.flip(decay, 1), axis=1), 1) - decay
    pushed = k * jnp.exp(jnp.minimum(after, 0.0))[..., None]
    added = _dot("btvk,btve->bvke", pushed, delta)
    return state * jnp.exp(total)[..., None, None] + added


def step(qkv, z, a, b, weights, state, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.step`."""
    window, q, k, v, decay, beta = _inputs(qkv, a, b, weights, state, key_heads)
    groups = v.shape[2] // key_heads
    wide = lambda x: jnp.repeat(x, groups, axis=2)  # noqa: E731
    out, delta = one_chunk(wide(q), wide(k), v, decay, beta, state.recurrent)
    return _finish(out, z, weights, activation, eps, qkv.dtype), window, k, delta, decay


def commit(states, factors, count):
    """See `qwen4jax.pallas.gated_delta.commit`."""
    return tuple(_commit(*layer, count) for layer in zip(states, factors, strict=True))


def _commit(state, factors, count):
    accepted = jnp.arange(factors.decay.shape[1]) < count[:, None]
    decay = jnp.where(accepted[..., None], factors.decay, 0.0)
    delta = jnp.where(accepted[..., None, None], factors.delta, 0.0)
    key = jnp.repeat(factors.key, delta.shape[2] // factors.key.shape[2], axis=2)
    key = jnp.where(accepted[..., None, None], key, 0.0)
    recurrent_state = advance(state.recurrent, key, delta, decay)
    idle = (count == 0)[:, None, None, None]
    return dataclasses.replace(
        state,
        conv=windows_after(factors.window, count, state.conv.shape[1]),
        recurrent=jnp.where(idle, state.recurrent, recurrent_state),
    )


def chunks(qkv, z, a, b, weights, state, count, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.chunks`."""
    rows, places = qkv.shape[:2]
    window, q, k, v, decay, beta = _inputs(qkv, a, b, weights, state, key_heads)
    there = jnp.arange(places) < count[:, None]
    decay = jnp.where(there[..., None], decay, 0.0)
    beta = jnp.where(there[..., None], beta, 0.0)
    # what stands beyond `count` may be anything, NaN included
    q, k, v = (jnp.where(there[..., None, None], x, 0.0) for x in (q, k, v))
    groups = v.shape[2] // key_heads
    q, k = (jnp.repeat(x, groups, axis=2) for x in (q, k))
    size = min(_CHUNK, places)
    number = -(-places // size)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, number * size - places)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, number, size, *x.shape[2:]), 1, 0)

    def body(s, chunk):
        q, k, v, decay, beta = chunk
        out, delta = one_chunk(q, k, v, decay, beta, s)
        return advance(s, k, delta, decay), out

    recurrent_state, out = jax.lax.scan(
        body, state.recurrent, tuple(split(x) for x in (q, k, v, decay, beta))
    )
    out = jnp.moveaxis(out, 0, 1).reshape(rows, number * size, *v.shape[2:])[:, :places]
    idle = (count == 0)[:, None, None, None]
    new = dataclasses.replace(
        state,
        conv=windows_after(window, count, state.conv.shape[1]),
        recurrent=jnp.where(idle, state.recurrent, recurrent_state),
    )
    return _finish(out, z, weights, activation, eps, qkv.dtype), new


def _inputs(qkv, a, b, weights, state, key_heads):
    """Convolution and gates: the window, float32 q, k [B, T, H, K], v [B, T, V, E], decay, beta."""
    rows, places = qkv.shape[:2]
    value_heads, value_dim = state.recurrent.shape[1], state.recurrent.shape[3]
    window = jnp.concatenate([state.conv, qkv.astype(state.conv.dtype)], axis=1)
    taps = weights.conv1d.astype(jnp.float32)
    mixed = sum(
        window[:, j : j + places].astype(jnp.float32) * taps[:, j] for j in range(taps.shape[1])
    )
    mixed = jax.nn.silu(mixed).astype(qkv.dtype).astype(jnp.float32)
    width = key_heads * state.recurrent.shape[2]
    q, k, v = jnp.split(mixed, [width, 2 * width], axis=-1)
    q = l2_norm(q.reshape(rows, places, key_heads, -1), UNIT_EPS)
    k = l2_norm(k.reshape(rows, places, key_heads, -1), UNIT_EPS)
    v = v.reshape(rows, places, value_heads, value_dim)
    softplus = jax.nn.softplus(a.astype(jnp.float32) + weights.dt_bias.astype(jnp.float32))
    decay = -jnp.exp(weights.A_log.astype(jnp.float32)) * softplus
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    return window, q * q.shape[-1] ** -0.5, k, v, decay, beta


def _finish(out, z, weights, activation, eps, dtype):
    """Output norm of each head with a plain gain, times the activated gate."""
    scale = jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
    normed = out * scale * weights.norm.astype(jnp.float32)
    gate = z.astype(jnp.float32).reshape(out.shape)
    gate = jax.nn.sigmoid(gate) if activation == "sigmoid" else jax.nn.silu(gate)
    return (normed * gate).astype(dtype).reshape(*out.shape[:2], -1)


def _decay_between(decay):
    """Log decay [B, V, T, T] from token j (after it) to token i (through it).

    Each entry is a sum of its own terms: a difference of running sums would lose digits once a
    strong decay is in them.
    """
    g = jnp.moveaxis(decay, 1, -1)  # [B, V, T]
    length = g.shape[-1]
    after = jnp.arange(length)[:, None] > jnp.arange(length)
    return jnp.cumsum(jnp.where(after, g[..., :, None], 0.0), axis=-2)


def _solve_unit_lower(system, right):
    """`(I + system)^-1 right` for strictly lower triangular systems [..., T, T]."""
    length = system.shape[-1]
    if length > _UNROLL:
        identity = jnp.eye(length)
        return jax.scipy.linalg.solve_triangular(
            system + identity, right, lower=True, unit_diagonal=True
        )
    solved = [right[..., 0, :]]
    for i in range(1, length):
        known = sum(system[..., i, j, None] * solved[j] for j in range(i))
        solved.append(right[..., i, :] - known)
    return jnp.stack(solved, axis=-2)


def _dot(equation, x, y):
    return jnp.einsum(equation, x, y, precision=EXACT)
