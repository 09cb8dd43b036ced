"""The n-gram embedding in plain `jnp`; 64-bit arithmetic in 32-bit words, as JAX has by default."""

import jax
import jax.numpy as jnp

from qwen4jax import quant
from qwen4jax.numerics import rms_norm, rounded


def ngram_rows(ids, hash, *, eos):
    """See `qwen4jax.pallas.ple.ngram_rows`."""
    order = hash.ngram_size
    places = ids.shape[1] - (order - 1)
    back = [ids[:, order - 1 - i : order - 1 - i + places] for i in range(order)]
    for i in range(2, order):
        back[i] = jnp.where(back[i - 1] == eos, eos, back[i])
    products = [_multiply(m, c) for m, c in zip(hash.multipliers, back, strict=True)]
    mixed = products[0]
    rows = []
    for i in range(1, order):
        mixed = (mixed[0] ^ products[i][0], mixed[1] ^ products[i][1])
        heads = range((i - 1) * hash.heads_per_ngram, i * hash.heads_per_ngram)
        rows += [_remainder(mixed, hash.head_sizes[h]) + hash.head_offsets[h] for h in heads]
    return jnp.stack(rows, axis=-1)


def gather(table, rows, dtype):
    """See `qwen4jax.pallas.ple.gather`."""
    found = quant.dequantize(quant.take(table, rows), dtype)
    return found.reshape(*rows.shape[:-1], -1)


def embed(table, ids, hash, dtype, *, eos):
    """See `qwen4jax.pallas.ple.embed`."""
    return gather(table, ngram_rows(ids, hash, eos=eos), dtype)


def mix(key, value, streams, norm_key, norm_query, norm_conv, conv1d, history, *, dilation, eps):
    """See `qwen4jax.pallas.ple.mix`."""
    dtype, places = streams.dtype, streams.shape[1]
    k = rms_norm(key, norm_key, eps).astype(jnp.float32)
    q = rms_norm(streams, norm_query, eps).astype(jnp.float32)
    score = jnp.sum(k * q, axis=-1, keepdims=True) * streams.shape[-1] ** -0.5
    gate = jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6))
    u = rounded(jax.nn.sigmoid(gate) * value.astype(jnp.float32)[..., None, :], dtype)
    normed = rms_norm(u, norm_conv, eps)
    normed = normed.reshape(*normed.shape[:2], -1)
    window = jnp.concatenate([history, normed.astype(history.dtype)], axis=1)
    taps = conv1d.astype(jnp.float32)
    conv = sum(
        window[:, j * dilation : j * dilation + places].astype(jnp.float32) * taps[:, j]
        for j in range(taps.shape[1])
    )
    out = u.astype(jnp.float32) + jax.nn.silu(conv).reshape(u.shape)
    return rounded(out, dtype), window


def _multiply(constant, ids):
    """`constant * ids` below 2**64 as (high, low) words of uint32."""
    ids = ids.astype(jnp.uint32)
    low, high = constant & 0xFFFFFFFF, constant >> 32
    return _high_word(low, ids) + jnp.uint32(high) * ids, jnp.uint32(low) * ids


def _high_word(constant, ids):
    """Upper 32 bits of the 64-bit product of two 32-bit numbers, from 16-bit halves."""
    a1, a0 = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    b1, b0 = ids >> 16, ids & 0xFFFF
    middle = a1 * b0 + ((a0 * b0) >> 16)
    carry = a0 * b1 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (carry >> 16)


def _remainder(words, size):
    """`(high * 2**32 + low) % size` as int32, by long division in digits that fit a word."""
    high, low = words
    digit = 32 - size.bit_length()
    rest, left = high % jnp.uint32(size), 32
    while left:
        bits = min(digit, left)
        left -= bits
        next_digit = (low >> left) & jnp.uint32((1 << bits) - 1)
        rest = ((rest << bits) | next_digit) % jnp.uint32(size)
    return rest.astype(jnp.int32)
