"""Arithmetic that the reference operations share: float32 inside, one rounding at the end."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# a float32 product may otherwise run as TF32 on a GPU
EXACT = jax.lax.Precision.HIGHEST


def rounded(x: Float[Array, "*any"], dtype: jnp.dtype) -> Float[Array, "*any"]:
    """`x` rounded to `dtype`, also where XLA fuses the reader.

    XLA may drop a cast to bfloat16 that is cast back, so that in one program a norm reads the
    value that another one reads rounded.
    """
    if dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def alone(x: Array, w: Any) -> tuple[Array, Any]:
    """Rows and weights of a product that XLA computes by itself.

    It would make one product of several with the same rows, and copy their weights for it into one
    matrix at every call.
    """
    return jax.lax.optimization_barrier((x, w))


def rms_norm(
    x: Float[Array, "*rows C"], weight: Float[Array, " G"], eps: float
) -> Float[Array, "*rows C"]:
    """RMS norm over the last axis with the gain `1 + weight`, in float32, cast to `x.dtype` once.

    A `weight` longer than `C` belongs to groups that the last axes of `x` enumerate: `[..., R, D]`
    with a weight of `R * D` norms each of the `R` rows for itself.
    """
    f = x.astype(jnp.float32)
    gain = 1 + weight.astype(jnp.float32)
    if weight.shape[-1] != x.shape[-1]:
        gain = gain.reshape(-1, x.shape[-1])
    scale = jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)
    return rounded(f * scale * gain, x.dtype)


def l2_norm(x: Float[Array, "*rows C"], eps: float = 1e-6) -> Float[Array, "*rows C"]:
    """`x / sqrt(sum(x**2) + eps)` over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def rotate(
    x: Float[Array, "*rows H C"], cos: Float[Array, "*rows F"], sin: Float[Array, "*rows F"]
) -> Float[Array, "*rows H C"]:
    """Rotary embedding of the first `2F` channels in half-split pairs `(i, i + F)`.

    Computed in float32 and cast to `x.dtype` once; the remaining channels pass unchanged.
    """
    pairs = cos.shape[-1]
    f = x.astype(jnp.float32)
    first, second, rest = f[..., :pairs], f[..., pairs : 2 * pairs], f[..., 2 * pairs :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return rounded(jnp.concatenate(turned, axis=-1), x.dtype)


def windows_after(
    window: Float[Array, "B L C"], counts: Array, length: int
) -> Float[Array, "B {length} C"]:
    """`window[b, counts[b] : counts[b] + length]`: a convolution's history after `counts`."""
    index = counts[:, None] + jnp.arange(length)
    return jnp.take_along_axis(window, index[..., None], axis=1)
