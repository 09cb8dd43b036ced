"""Qwen Sparse Attention: gated grouped-query attention over tokens that an indexer selects."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.pallas.compress_and_store import Gains, prepare_and_store
from qwen4jax.pallas.index_topk.select import select
from qwen4jax.pallas.skinny_matmul import projections, skinny_matmul
from qwen4jax.pallas.sparse_attention import sparse_attention
from qwen4jax.params import SparseAttention
from qwen4jax.span import Span
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
    heads = lambda y, *shape: y.reshape(*x.shape[:2], *shape)  # noqa: E731
    channels, indexer = config.head_dim, params.indexer
    with jax.named_scope("compress_and_store"):
        cache, query, gate, index_query = prepare_and_store(
            cache,
            heads(query_gate, config.num_attention_heads, 2, channels),
            heads(key, config.num_key_value_heads, channels),
            heads(value, config.num_key_value_heads, channels),
            heads(index_qk, -1, config.indexer_head_dim),
            Gains(params.q_norm, params.k_norm, indexer.q_layernorm, indexer.k_layernorm),
            span,
            ratio=config.indexer_compress_ratio,
            eps=config.rms_norm_eps,
        )
    if selected is None:
        selected = select(
            index_query,
            cache.index_key,
            span.page_table,
            span.complete,
            span.index,
            blocks=config.index_blocks,
            ratio=config.indexer_compress_ratio,
        )
    capture("indexer.selected", selected)
    with jax.named_scope("sparse_attention"):
        mixed = sparse_attention(query, gate, cache.key, cache.value, selected, span.page_table)
    with jax.named_scope("attention_projections"):
        return skinny_matmul(mixed, params.o_proj, params.o_proj_bias), cache, selected


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
