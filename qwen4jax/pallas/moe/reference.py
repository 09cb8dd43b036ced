"""Routed experts in plain `jnp`."""

import jax
import jax.numpy as jnp

from qwen4jax import quant
from qwen4jax.numerics import EXACT, alone
from qwen4jax.pallas.skinny_matmul.reference import projections

# choices per expert up to which reading an expert once per choice beats a loop over all of them
_CHOSEN_SHARE = 4


def route(logits, k, *, renormalize):
    """See `qwen4jax.pallas.moe.route`."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(probabilities, k)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return ids, weights


def router(x, gate, shared_gate, k, counter, *, renormalize):
    """See `qwen4jax.pallas.moe.router`."""
    weights, dtypes = (gate, shared_gate), (x.dtype, jnp.float32)
    logits, share = projections(x, weights, (None, None), out_dtypes=dtypes)
    # a softmax orders like its logits, but for those whose shares are equal in float32
    ids = jax.lax.top_k(logits, k)[1]
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    shares = jnp.take_along_axis(probabilities, ids, axis=-1)
    if renormalize:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return (ids, shares, share), counter


def experts(x, ids, weights, gate_up, down, shared, *, out_dtype):
    """See `qwen4jax.pallas.moe.experts`.

    Few tokens read the weights of their own experts only, once per token; many tokens pass all
    experts one after the other, which never holds more than one expert dequantised.
    """
    few = ids.size <= _CHOSEN_SHARE * gate_up.shape[0]
    run = _chosen_experts if few else _every_expert
    total = run(x, ids, weights, gate_up, down)
    if shared is not None:
        total = total + _shared_expert(x, *shared)
    return total.astype(out_dtype)


def _chosen_experts(x, ids, weights, gate_up, down):
    # multiply and reduce, not a dot: XLA then fuses the gather and the decoding into the product
    w1 = quant.dequantize(quant.take(gate_up, ids))  # [T, k, 2, I, D]
    h = jnp.sum(x.astype(jnp.float32)[:, None, None, None, :] * w1, axis=-1)
    h = _activate(h).astype(x.dtype).astype(jnp.float32)  # [T, k, I]
    w2 = quant.dequantize(quant.take(down, ids))  # [T, k, D, I]
    y = jnp.sum(h[:, :, None, :] * w2, axis=-1)
    return jnp.sum(y * weights[..., None], axis=1)


def _every_expert(x, ids, weights, gate_up, down):
    def add(total, e):
        w1 = quant.dequantize(quant.take(gate_up, e), x.dtype)
        w2 = quant.dequantize(quant.take(down, e), x.dtype)
        h = _activate(_dot("td,gid->tgi", x, w1)).astype(x.dtype)
        weight = jnp.sum(jnp.where(ids == e, weights, 0.0), axis=-1)
        return total + weight[:, None] * _dot("ti,di->td", h, w2), None

    start = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.scan(add, start, jnp.arange(gate_up.shape[0]))[0]


def _shared_expert(x, gate, up, down, logit):
    return jax.nn.sigmoid(logit) * plain_expert(x, gate, up, down)


def plain_expert(x, gate, up, down):
    """One expert [I, D], [I, D], [D, I] for all tokens, float32."""
    h = jnp.stack([_dot("td,id->ti", *alone(x, w)) for w in (gate, up)], axis=-2)
    return _dot("ti,di->td", _activate(h).astype(x.dtype), down)


def _activate(h):
    """SwiGLU of [..., 2, I] (gate, up)."""
    return jax.nn.silu(h[..., 0, :]) * h[..., 1, :]


def _dot(equation, x, w):
    precision = EXACT if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32, precision=precision)
