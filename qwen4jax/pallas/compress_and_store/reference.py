"""Cache writes of a sparse-attention layer in plain `jnp`."""

import dataclasses

import jax.numpy as jnp

from qwen4jax.numerics import rms_norm, rotate
from qwen4jax.span import member_rows


def prepare(x, norm, span, *, eps):
    """See `qwen4jax.pallas.compress_and_store.prepare`."""
    return rotate(rms_norm(x, norm, eps), span.cos, span.sin)


def store(cache, key, value, span):
    """See `qwen4jax.pallas.compress_and_store.store`."""
    return dataclasses.replace(
        cache,
        key=_write_pages(cache.key, key, span.slot),
        value=_write_pages(cache.value, value, span.slot),
    )


def compress(cache, raw_key, norm, span, *, ratio, eps):
    """See `qwen4jax.pallas.compress_and_store.compress`."""
    raw_key = raw_key.astype(cache.ring.dtype)
    members = span.block[..., None] * ratio + jnp.arange(ratio)
    flat = members.reshape(members.shape[0], -1)
    rows = member_rows(cache.ring, raw_key, span.start, flat)
    rows = rows.reshape(*members.shape, -1).astype(jnp.float32)
    pooled = jnp.mean(rows, axis=2).astype(raw_key.dtype)
    pooled = rms_norm(pooled, norm, eps)[:, :, None]
    block_key = rotate(pooled, span.block_cos, span.block_sin)[:, :, 0]
    batch = jnp.arange(raw_key.shape[0])[:, None]
    return dataclasses.replace(
        cache,
        index_key=_write_pages(cache.index_key, block_key, span.block_slot),
        ring=cache.ring.at[batch, span.ring].set(raw_key, mode="drop"),
    )


def prepare_and_store(cache, query_gate, key, value, index_qk, gains, span, *, ratio, eps):
    """See `qwen4jax.pallas.compress_and_store.prepare_and_store`."""
    query = prepare(query_gate[:, :, :, 0], gains.query, span, eps=eps)
    index_query = prepare(index_qk[:, :, :-1], gains.index_query, span, eps=eps)
    cache = compress(cache, index_qk[:, :, -1], gains.index_key, span, ratio=ratio, eps=eps)
    cache = store(cache, prepare(key, gains.key, span, eps=eps), value, span)
    return cache, query, query_gate[:, :, :, 1], index_query


def _write_pages(pages, rows, slots):
    """`pages` [P, S, ...] with `rows` [B, T, ...] at places `slots` [B, T], others dropped."""
    flat = pages.reshape(-1, *pages.shape[2:])
    limits = jnp.finfo(pages.dtype)
    if limits.bits == 8:
        # a cast beyond e4m3's range gives NaN
        rows = jnp.clip(rows, limits.min.astype(rows.dtype), limits.max.astype(rows.dtype))
    flat = flat.at[slots].set(rows.astype(pages.dtype), mode="drop")
    return flat.reshape(pages.shape)
