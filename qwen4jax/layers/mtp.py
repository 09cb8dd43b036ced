"""The draft head: one sparse-attention layer over a residual and the token that followed it."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.layers.decoder import decoder_layer
from qwen4jax.layers.gated_residual import Residual, read_final
from qwen4jax.numerics import rms_norm
from qwen4jax.pallas.skinny_matmul import skinny_matmul
from qwen4jax.params import MultiTokenPrediction
from qwen4jax.span import Span
from qwen4jax.state import AttentionCache


class DraftRows(struct.PyTreeNode):
    """Rows of the draft head.

    Attributes:
        hidden: output-head input, which predicts the token after the one that was fed.
        residual: streams after the layer, which the next chained step takes.
        selected: tokens attended to.
        cache: of the head.
    """

    hidden: Float[Array, "B T D"]
    residual: Float[Array, "B T R D"]
    selected: Int[Array, "B T M"]
    cache: AttentionCache


def draft_rows(
    params: MultiTokenPrediction,
    config: Config,
    embedded: Float[Array, "B T D"],
    residual: Float[Array, "B T R D"],
    cache: AttentionCache,
    span: Span,
    *,
    selected: Int[Array, "B T M"] | None = None,
    capture: Capture,
) -> DraftRows:
    """Row `i` pairs the residual of token `i` with the embedding of token `i + 1`, at place `i`.

    Args:
        params: of the head.
        config: of the model.
        embedded: main model's embeddings of the following tokens.
        residual: streams after the last layer (or after this head's, in a chained step).
        cache: of the head.
        span: places of the rows.
        selected: given selection, see `attention`.
        capture: of internals.

    Source: spec section 9.1. The norm before `fc_hidden` spans all streams together.
    """
    eps = config.rms_norm_eps
    with jax.named_scope("mtp_input"):
        token = skinny_matmul(
            rms_norm(embedded, params.pre_fc_norm_embedding, eps), params.fc_embedding
        )
        flat = residual.reshape(*residual.shape[:2], -1)
        normed = rms_norm(flat, params.pre_fc_norm_hidden, eps).reshape(residual.shape)
        hidden = skinny_matmul(normed, params.fc_hidden)
        both = token.astype(jnp.float32)[:, :, None] + hidden.astype(jnp.float32)
    after, cache, chosen = decoder_layer(
        params.layers[0],
        config,
        Residual(both.astype(residual.dtype)),
        cache,
        span,
        final=True,
        selected=selected,
        capture=capture.scope("mtp"),
    )
    assert chosen is not None
    hidden, streams = read_final(params.hyper_connection_mixer, config, after)
    return DraftRows(hidden=hidden, residual=streams, selected=chosen, cache=cache)
