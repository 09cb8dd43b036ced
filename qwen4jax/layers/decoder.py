"""One decoder layer: n-gram embedding, attention of either kind, experts, each into the streams."""

from typing import Any

from jaxtyping import Array, Int

from qwen4jax.config import Config
from qwen4jax.layers.attention import attention
from qwen4jax.layers.capture import Capture
from qwen4jax.layers.delta_net import delta_net
from qwen4jax.layers.gated_residual import Residual, read
from qwen4jax.layers.moe import moe
from qwen4jax.params import Layer
from qwen4jax.span import Span


def decoder_layer(
    params: Layer,
    config: Config,
    residual: Residual,
    cache: Any,
    span: Span,
    *,
    final: bool,
    selected: Int[Array, "B T M"] | None = None,
    capture: Capture,
) -> tuple[Residual, Any, Int[Array, "B T M"] | None]:
    """The two sublayers of one layer (its n-gram embedding is the model's to add).

    Args:
        params: of the layer.
        config: of the model.
        residual: streams, with the output of the sublayer before.
        cache: the layer's `AttentionCache` or `DeltaNetState`.
        span: places of the tokens.
        final: the tokens in the span stay. Otherwise a linear layer returns factors.
        selected: given selection of a sparse layer, see `attention`.
        capture: of internals.

    Returns:
        The streams with the experts' output pending, the new cache (or factors), and what a sparse
        layer selected.
    """
    attn, mlp = capture.scope("attn"), capture.scope("mlp")
    x, inject, residual = read(params.attn_hyper_connection, config, residual, capture=attn)
    if params.self_attn is not None:
        y, cache, selected = attention(
            params.self_attn, config, x, cache, span, selected=selected, capture=capture
        )
    else:
        assert params.linear_attn is not None
        y, cache = delta_net(params.linear_attn, config, x, cache, span.count if final else None)
    residual = residual._replace(pending=(inject, y))
    x, inject, residual = read(params.mlp_hyper_connection, config, residual, capture=mlp)
    # a slot that speculates alone has a token in every place, but for the end of its pages or run
    some_empty = len(span.count) > 1 or (final and span.index.size > 1)
    filled = span.filled if some_empty else None
    y, counter = moe(params.mlp, config, x, residual.counter, filled, capture=capture)
    residual = Residual(residual.streams, (inject, y), counter)
    if capture.wants("residual"):
        capture("residual", residual.settled())
    return residual, cache, selected
