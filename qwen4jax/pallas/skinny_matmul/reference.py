"""The dense projection in plain `jnp`."""

import jax.numpy as jnp

from qwen4jax import quant
from qwen4jax.numerics import EXACT, alone


def skinny_matmul(x, w, bias, *, out_dtype):
    """See `qwen4jax.pallas.skinny_matmul`."""
    precision = EXACT if x.dtype == jnp.float32 else None
    x, w = alone(x, w)
    if isinstance(w, quant.Quantized):
        # exact: a product of a code and its scales does not fit bfloat16
        x, w = x.astype(jnp.float32), quant.dequantize(w)
    y = jnp.einsum("...i,oi->...o", x, w, preferred_element_type=jnp.float32, precision=precision)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype)


def projections(x, weights, biases, *, out_dtypes):
    """See `qwen4jax.pallas.skinny_matmul.projections`."""
    return tuple(
        skinny_matmul(x, w, bias, out_dtype=dtype)
        for w, bias, dtype in zip(weights, biases, out_dtypes, strict=True)
    )


def argmax(x, w):
    """See `qwen4jax.pallas.skinny_matmul.argmax`."""
    return best_and_finite(skinny_matmul(x, w, None, out_dtype=jnp.float32))


def best_and_finite(logits):
    """Number of the largest along the last axis, and whether all are finite."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.isfinite(logits).all(axis=-1)
