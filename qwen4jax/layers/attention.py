"""Qwen Sparse Attention: gated grouped-query attention over tokens that an indexer selects."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.pallas.compress_and_store import compress, prepare, store
from qwen4jax.pallas.index_score import index_score
from qwen4jax.pallas.index_topk import index_topk
from qwen4jax.pallas.skinny_matmul import projections, skinny_matmul
from qwen4jax.pallas.sparse_attention import sparse_attention
from qwen4jax.params import Indexer, SparseAttention
from qwen4jax.span import Span, physical
from qwen4jax.state import AttentionCache


def attention(
    params: SparseAttention,
    config: Config,
    x: Float[Array, "B T D"],
    cache: AttentionCache,
    span: Span,
    *,
    selected: Int[Array, "B T M"] | None = None,
    capture: Capture,
) -> tuple[Float[Array, "B T D"], AttentionCache, Int[Array, "B T M"]]:
    """One attention sublayer; writes the span's keys and reads what each token selects.

    Args:
        params: of the sublayer.
        config: of the model.
        x: sublayer input.
        cache: of the layer.
        span: places of the tokens.
        selected: tokens to attend to (-1: none) instead of asking the indexer; index keys are
            stored all the same.
        capture: of internals.

    Returns:
        The output, the cache, and the indices of the tokens attended to.
    """
    heads, channels = config.num_attention_heads, config.head_dim
    eps = config.rms_norm_eps
    index_qk_proj = params.indexer.index_qk_proj
    if selected is not None:
        # with the tokens given, the query rows of the projection are not read
        index_qk_proj = index_qk_proj[config.indexer_n_heads * config.indexer_head_dim :]
    with jax.named_scope("attention_projections"):
        query_gate, key, value, index_qk = projections(
            x,
            (params.q_proj, params.k_proj, params.v_proj, index_qk_proj),
            (params.q_proj_bias, params.k_proj_bias, params.v_proj_bias, None),
        )
    cache, selected = _select(params.indexer, config, index_qk, cache, span, selected)
    capture("indexer.selected", selected)
    query_gate = query_gate.reshape(*x.shape[:2], heads, 2, channels)
    key = key.reshape(*x.shape[:2], config.num_key_value_heads, channels)
    value = value.reshape(key.shape)
    with jax.named_scope("compress_and_store"):
        query = prepare(query_gate[:, :, :, 0], params.q_norm, span, eps=eps)
        cache = store(cache, prepare(key, params.k_norm, span, eps=eps), value, span)
    with jax.named_scope("sparse_attention"):
        slots = physical(span.page_table, selected, cache.key.shape[1])
        gate = query_gate[:, :, :, 1]
        mixed = sparse_attention(query, gate, cache.key, cache.value, slots)
    with jax.named_scope("attention_projections"):
        return skinny_matmul(mixed, params.o_proj, params.o_proj_bias), cache, selected


def _select(
    params: Indexer,
    config: Config,
    index_qk: Float[Array, "B T QK"],
    cache: AttentionCache,
    span: Span,
    selected: Int[Array, "B T M"] | None,
) -> tuple[AttentionCache, Int[Array, "B T M"]]:
    """Stores the span's index keys, last in `index_qk`; chooses tokens unless they are given."""
    channels, ratio, eps = (
        config.indexer_head_dim,
        config.indexer_compress_ratio,
        config.rms_norm_eps,
    )
    with jax.named_scope("compress_and_store"):
        raw_key = index_qk[..., -channels:]
        cache = compress(cache, raw_key, params.k_layernorm, span, ratio=ratio, eps=eps)
        if selected is not None:
            return cache, selected
        query = index_qk[..., :-channels].reshape(*index_qk.shape[:2], -1, channels)
        query = prepare(query, params.q_layernorm, span, eps=eps)
    with jax.named_scope("index_score"):
        scores = index_score(query, cache.index_key, span.page_table, span.complete)
    with jax.named_scope("index_topk"):
        chosen = index_topk(scores, span.index, blocks=config.index_blocks, ratio=ratio)
    return cache, chosen


class FrozenSelection(struct.PyTreeNode):
    """A selection that later draft steps reuse (index sharing, spec section 9.5).

    Attributes:
        selected: tokens that the last accepted row attended to, -1 where there is none.
        length: tokens that existed when it was made.
    """

    selected: Int[Array, "B M"]
    length: Int[Array, " B"]

    def at_step(self, step: int, *, append: bool) -> Int[Array, "B 1 M2"]:
        """The tokens of the `step`-th draft row after it (from 1).

        Args:
            step: static.
            append: add the tokens drafted since, the row's own included.
        """
        if not append:
            return self.selected[:, None]
        drafted = self.length[:, None] + jnp.arange(step)
        return jnp.concatenate([self.selected, drafted], axis=1)[:, None]
