"""The gated residual in plain `jnp`, float32 between the stores."""

import jax
import jax.numpy as jnp

from qwen4jax.numerics import rms_norm, rounded
from qwen4jax.pallas.skinny_matmul.reference import skinny_matmul


def boundary(streams, pending, norm, down, up, inject, counter, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    if pending is not None:
        streams = update(streams, *pending)
    x, weights, _ = mix(streams, norm, down, up, inject, eps=eps)
    return streams, x, weights, counter


def mix(streams, norm, down, up, inject, *, eps):
    """See `qwen4jax.pallas.gated_residual.mix`."""
    count = streams.shape[-2]
    normed = rms_norm(streams, norm, eps)
    flat = normed.reshape(*normed.shape[:-2], -1)
    low = skinny_matmul(flat, down, None, out_dtype=jnp.float32)
    low = jax.nn.silu(low / count).astype(streams.dtype)
    # XLA's CPU compiler of jaxlib 0.11.2 fuses both products into one that is wrong from a few
    # hundred rows on, if nothing else reads the streams
    low = jax.lax.optimization_barrier(low)
    gates = jax.nn.sigmoid(skinny_matmul(low, up, None, out_dtype=jnp.float32))
    gates = gates.reshape(normed.shape)
    x = jnp.mean(gates * normed.astype(jnp.float32), axis=-2).astype(streams.dtype)
    if inject is None:
        return x, None, gates
    logits = skinny_matmul(flat, inject, None, out_dtype=jnp.float32)
    return x, 2 * jax.nn.sigmoid(logits / count), gates


def update(streams, inject, y):
    """See `qwen4jax.pallas.gated_residual.update`."""
    added = inject[..., None] * y.astype(jnp.float32)[..., None, :]
    return rounded(streams.astype(jnp.float32) + added, streams.dtype)
