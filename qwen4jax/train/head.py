"""The output head's losses, without keeping logits: they are formed again for the derivative."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen4jax.pallas.skinny_matmul import skinny_matmul

_logits = functools.partial(skinny_matmul, out_dtype=jnp.float32, implementation="reference")


@jax.custom_vjp
def token_nats(
    hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    """Negative log-probabilities of the targets, nats in float32, and the likeliest ids."""
    return _token_nats(hidden, weight, targets)[0]


def _token_nats(hidden, weight, targets):
    logits = _logits(hidden, weight)
    size = jax.nn.logsumexp(logits, axis=-1)
    nats = size - _at(logits, targets)
    return (nats, jnp.argmax(logits, axis=-1)), (hidden, weight, targets, size)


def _token_nats_backward(kept, cotangents):
    hidden, weight, targets, size = kept
    scale = cotangents[0][..., None]
    own = jnp.exp(_logits(hidden, weight) - size[..., None])
    return *_through(scale * (own - _one_hot(targets, own)), hidden, weight), None


token_nats.defvjp(_token_nats, _token_nats_backward)


@jax.custom_vjp
def draft_nats(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    teacher: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Int[Array, "B T"]]:
    """As `token_nats`, with the divergence from the teacher's distribution, nats, in the middle.

    Args:
        hidden: output-head inputs of the draft.
        weight: of the output head.
        targets: true tokens.
        teacher: output-head inputs of the main model for the same tokens; it learns nothing here.
    """
    return _draft_nats(hidden, weight, targets, teacher)[0]


def _draft_nats(hidden, weight, targets, teacher):
    logits, aim = _logits(hidden, weight), _logits(teacher, weight)
    size, aim_size = (jax.nn.logsumexp(x, axis=-1) for x in (logits, aim))
    nats = size - _at(logits, targets)
    shares = jnp.exp(aim - aim_size[..., None])
    divergence = jnp.sum(shares * (aim - logits), axis=-1) - aim_size + size
    kept = (hidden, weight, targets, teacher, size, aim_size)
    return (nats, divergence, jnp.argmax(logits, axis=-1)), kept


def _draft_nats_backward(kept, cotangents):
    hidden, weight, targets, teacher, size, aim_size = kept
    d_nats, d_divergence = (c[..., None] for c in cotangents[:2])
    own = jnp.exp(_logits(hidden, weight) - size[..., None])
    shares = jnp.exp(_logits(teacher, weight) - aim_size[..., None])
    d_logits = (d_nats + d_divergence) * own - d_nats * _one_hot(targets, own)
    return *_through(d_logits - d_divergence * shares, hidden, weight), None, None


draft_nats.defvjp(_draft_nats, _draft_nats_backward)


def _at(logits, targets):
    # a sum over all ids reads the logits once with what else does; a gather would not
    return jnp.sum(logits * _one_hot(targets, logits), axis=-1)


def _one_hot(targets, like):
    return (jnp.arange(like.shape[-1]) == targets[..., None]).astype(jnp.float32)


def _through(d_logits, hidden, weight):
    """Cotangents of the head's input and weight."""
    d_logits = d_logits.astype(hidden.dtype)
    d_hidden = skinny_matmul(d_logits, weight.T, implementation="reference")
    rows = lambda x: x.reshape(-1, x.shape[-1]).T  # noqa: E731
    d_weight = skinny_matmul(rows(d_logits), rows(hidden), implementation="reference")
    return d_hidden.astype(hidden.dtype), d_weight.astype(weight.dtype)
