"""One decoder layer: n-gram embedding, attention of either kind, experts, each into the streams."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.layers.attention import attention
from qwen4jax.layers.capture import Capture
from qwen4jax.layers.delta_net import delta_net
from qwen4jax.layers.gated_residual import read
from qwen4jax.layers.moe import moe
from qwen4jax.pallas.gated_residual import update
from qwen4jax.params import Layer
from qwen4jax.span import Span


def decoder_layer(
    params: Layer,
    config: Config,
    streams: Float[Array, "B T R D"],
    cache: Any,
    span: Span,
    *,
    final: bool,
    selected: Int[Array, "B T M"] | None = None,
    capture: Capture,
) -> tuple[Float[Array, "B T R D"], Any, Int[Array, "B T M"] | None]:
    """The two sublayers of one layer (its n-gram embedding is the model's to add).

    Args:
        params: of the layer.
        config: of the model.
        streams: residual streams.
        cache: the layer's `AttentionCache` or `DeltaNetState`.
        span: places of the tokens.
        final: the tokens in the span stay. Otherwise a linear layer returns factors.
        selected: given selection of a sparse layer, see `attention`.
        capture: of internals.

    Returns:
        The streams, the new cache (or factors), and what a sparse layer selected.
    """
    x, inject = read(params.attn_hyper_connection, config, streams, capture=capture.scope("attn"))
    if params.self_attn is not None:
        y, cache, selected = attention(
            params.self_attn, config, x, cache, span, selected=selected, capture=capture
        )
    else:
        assert params.linear_attn is not None
        y, cache = delta_net(params.linear_attn, config, x, cache, span.count if final else None)
    streams = _inject(streams, inject, y)
    x, inject = read(params.mlp_hyper_connection, config, streams, capture=capture.scope("mlp"))
    y = moe(params.mlp, config, x, capture=capture)
    streams = _inject(streams, inject, y)
    capture("residual", streams)
    return streams, cache, selected


def _inject(
    streams: Float[Array, "B T R D"], inject: Float[Array, "B T R"], y: Float[Array, "B T D"]
) -> Float[Array, "B T R D"]:
    with jax.named_scope("gated_residual"):
        return update(streams, inject, y)
