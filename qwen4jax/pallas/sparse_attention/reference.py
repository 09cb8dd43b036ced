"""Sparse attention in plain `jnp`: gather, then softmax."""

import jax
import jax.numpy as jnp

from qwen4jax.numerics import EXACT
from qwen4jax.span import physical

# queries whose keys and values are gathered at a time; more would hold gigabytes in a long chunk
_TILE = 128


def sparse_attention(query, gate, key, value, slots, page_table=None):
    """See `qwen4jax.pallas.sparse_attention`."""
    if page_table is not None:
        slots = physical(page_table, slots, key.shape[1])
    rows, places, heads, channels = query.shape
    flat_key = key.reshape(-1, *key.shape[2:])
    flat_value = value.reshape(-1, *value.shape[2:])

    def attend(one):
        q, g, s = one
        return _attend(q, g, flat_key, flat_value, s)

    queries = (
        query.reshape(rows * places, heads, channels),
        gate.reshape(rows * places, heads, channels),
        slots.reshape(rows * places, -1),
    )
    if rows * places <= _TILE:
        out = jax.vmap(attend)(queries)
    else:
        out = jax.lax.map(attend, queries, batch_size=_TILE)
    return out.reshape(rows, places, heads * channels).astype(query.dtype)


def _attend(query, gate, key, value, slots):
    """One query [H, C] over `slots` [M]."""
    heads, channels = query.shape
    there = slots >= 0
    place = jnp.maximum(slots, 0)
    # a place without a token may hold NaN, which a zero weight would not silence
    k = jnp.where(there[:, None, None], key[place].astype(jnp.float32), 0)
    v = jnp.where(there[:, None, None], value[place].astype(jnp.float32), 0)
    q = query.astype(jnp.float32).reshape(k.shape[1], -1, channels)
    scores = jnp.einsum("kgc,mkc->kgm", q, k, precision=EXACT) * channels**-0.5
    scores = jnp.where(there, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("kgm,mkc->kgc", weights, v, precision=EXACT)
    out = out / jnp.where(total == 0, 1, total)
    return out.reshape(heads, channels) * jax.nn.sigmoid(gate.astype(jnp.float32))
