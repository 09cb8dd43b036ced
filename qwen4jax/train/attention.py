"""Sparse attention over whole sequences: dense products under the mask of the hard selection.

Inference gathers what a query selected; a derivative of that would scatter. Here every score is
formed and those not selected are left out of the softmax, which is the same function. The block
mask comes from the same scores, with the same ties, as `index_score` and `index_topk`.

The selection has no derivative. The indexer learns by imitation, as in DeepSeek-V3.2 ("lightning
indexer", DeepSeek-AI 2025, section 2.1): the Kullback-Leibler divergence from the share of dense
attention that falls on each block, summed over heads and normed, to the softmax of the block
scores. Neither the attention nor the indexer's input sees a gradient of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from qwen4jax.config import Config
from qwen4jax.numerics import EXACT, rms_norm, rotate
from qwen4jax.pallas.skinny_matmul import skinny_matmul
from qwen4jax.params import Indexer, SparseAttention
from qwen4jax.span import rope_table

# queries whose scores are held at a time; each tile forms only the scores up to its end
_TILE, _TILES = 1024, 2
# every so many queries are compared with dense attention: coprime with the ratio, so that queries
# at every place of a block take part
_STRIDE = 5
# finite: a difference of two infinities is none
_HIDDEN = -1e30


class Table(struct.PyTreeNode):
    """Rotary tables of all places and of the first place of each block, float32."""

    cos: Float[Array, "T F"]
    sin: Float[Array, "T F"]
    block_cos: Float[Array, "N F"]
    block_sin: Float[Array, "N F"]


class Imitation(struct.PyTreeNode):
    """How close an indexer is to dense attention, sums over queries with a complete block.

    Attributes:
        divergence: from dense attention's block mass to the indexer's softmax, nats.
        queries: number of queries in that sum.
        captured: share of the block mass that lies in selected blocks.
        overlap: share of dense attention's `index_blocks` heaviest blocks that are selected.
        contested: number of queries in the last two sums, those that see more blocks than they may
            select.
    """

    divergence: Float[Array, ""]
    queries: Float[Array, ""]
    captured: Float[Array, ""]
    overlap: Float[Array, ""]
    contested: Float[Array, ""]


class Drafted(struct.PyTreeNode):
    """Keys and values of the draft head's rows, and what each row selected.

    Attributes:
        key: of the rows that stay, from the main model's residual.
        value: likewise.
        keep: blocks that each of those rows selected.
        own_keys: keys of the chained steps so far, first step first.
        own_values: likewise.
    """

    key: Float[Array, "B T K C"]
    value: Float[Array, "B T K C"]
    keep: Bool[Array, "B T N"]
    own_keys: tuple[Float[Array, "B T K C"], ...] = ()
    own_values: tuple[Float[Array, "B T K C"], ...] = ()


def make_table(config: Config, places: int) -> Table:
    """Tables of text from place 0."""
    position = jnp.broadcast_to(jnp.arange(places)[:, None], (places, 3))
    ratio = config.indexer_compress_ratio
    blocks = position[: places // ratio * ratio : ratio]
    return Table(*rope_table(config, position), *rope_table(config, blocks))


def attention(
    params: SparseAttention,
    config: Config,
    x: Float[Array, "B T D"],
    table: Table,
    *,
    dense: Bool[Array, ""],
) -> tuple[Float[Array, "B T D"], Drafted, Imitation]:
    """One attention sublayer over sequences from their first token.

    Args:
        params: of the sublayer.
        config: of the model.
        x: sublayer input.
        table: from `make_table`.
        dense: attend to everything before a query, whatever the indexer says.
    """
    query, gate, key, value = _projected(params, config, x, table)
    fixed = jax.lax.stop_gradient
    index_query, index_key = index_vectors(params.indexer, config, fixed(x), table)
    mixed, keeps, imitations = [], [], []
    ratio = config.indexer_compress_ratio
    for first, last in _tiles(x.shape[1]):
        here, seen = slice(first, last), last // ratio
        keep = _selection(fixed(index_query[:, here]), fixed(index_key[:, :seen]), first, config)
        mask = _visible(keep, last, first, 0, ratio, dense)
        mixed.append(masked_attention(query[:, here], key[:, :last], value[:, :last], mask)[0])
        keeps.append(jnp.pad(keep, ((0, 0), (0, 0), (0, index_key.shape[1] - seen))))
        imitations.append(
            _imitation(
                fixed(query[:, first:last:_STRIDE]),
                fixed(key[:, :last]),
                index_query[:, first:last:_STRIDE],
                index_key[:, :seen],
                keep[:, ::_STRIDE],
                first,
                config,
            )
        )
    imitation: Any = jax.tree.map(lambda *x: sum(x), *imitations)
    out = _output(params, jnp.concatenate(mixed, axis=1), gate, x.dtype)
    return out, Drafted(key, value, jnp.concatenate(keeps, axis=1)), imitation


def chained_attention(
    params: SparseAttention,
    config: Config,
    x: Float[Array, "B T D"],
    table: Table,
    rows: Drafted,
    *,
    dense: Bool[Array, ""],
) -> tuple[Float[Array, "B T D"], Drafted]:
    """The draft head's attention in a chained step, for a chain from every row at once.

    After `n` chained steps before it, row `r` belongs to the chain that began at row `r - n - 1`:
    it attends to what that row selected, among the rows that stay, and to the chain's own rows up
    to itself (index sharing with the rows drafted since appended, spec section 9.5).
    """
    query, gate, key, value = _projected(params, config, x, table)
    rows = rows.replace(own_keys=(*rows.own_keys, key), own_values=(*rows.own_values, value))
    lag = len(rows.own_keys)
    # an earlier chained row of the same chain stands as many places back as steps ago
    own_key, own_value = (
        jnp.stack([shifted(y, lag - 1 - m) for m, y in enumerate(own)], axis=2)
        for own in (rows.own_keys, rows.own_values)
    )
    keep = shifted(rows.keep, lag)
    mixed = []
    ratio = config.indexer_compress_ratio
    for first, last in _tiles(x.shape[1]):
        here, seen = slice(first, last), last // ratio
        mask = _visible(keep[:, here, :seen], last, first, lag, ratio, dense)
        out, size = masked_attention(query[:, here], rows.key[:, :last], rows.value[:, :last], mask)
        mixed.append(_with_own(query[:, here], out, size, own_key[:, here], own_value[:, here]))
    return _output(params, jnp.concatenate(mixed, axis=1), gate, x.dtype), rows


@jax.custom_vjp
def masked_attention(
    query: Float[Array, "B t H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B t S"],
) -> tuple[Float[Array, "B t H C"], Float[Array, "B t H"]]:
    """Attention where `mask` is true, in float32, and the log of the sum of its exponentials.

    The derivative is written out because it decides the time of a step: what is kept for it is the
    weights in the dtype of the values, and no layout of the scores is ever turned.
    """
    return _attend(query, key, value, mask)[0]


def _attend(query, key, value, mask):
    grouped = _grouped(query, key.shape[2])
    scores = _dot("bkgtc,bskc->bkgts", grouped, key) * query.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, _HIDDEN)
    top = jnp.max(scores, axis=-1, keepdims=True)
    size = top + jnp.log(jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True))
    weights = jnp.exp(scores - size).astype(value.dtype)
    out = _dot("bkgts,bskc->bkgtc", weights, value)
    return (_ungrouped(out), _ungrouped(size)[..., 0]), weights


def _attend_forward(query, key, value, mask):
    (out, size), weights = _attend(query, key, value, mask)
    return (out, size), (query, key, value, weights, out)


def _attend_backward(kept, cotangents):
    query, key, value, weights, out = kept
    d_out, d_size = cotangents
    # as softmax's derivative, with what reaches the normaliser by itself
    shift = jnp.sum(d_out * out, axis=-1) - d_size
    kv_heads = key.shape[2]
    d_out = _grouped(d_out.astype(value.dtype), kv_heads)
    d_value = _dot("bkgts,bkgtc->bskc", weights, d_out)
    d_weights = _dot("bkgtc,bskc->bkgts", d_out, value)
    shift = _grouped(shift[..., None], kv_heads)
    d_scores = weights.astype(jnp.float32) * (d_weights - shift) * query.shape[-1] ** -0.5
    d_scores = d_scores.astype(query.dtype)
    d_query = _ungrouped(_dot("bkgts,bskc->bkgtc", d_scores, key))
    d_key = _dot("bkgts,bkgtc->bskc", d_scores, _grouped(query, kv_heads))
    return (
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
    )


masked_attention.defvjp(_attend_forward, _attend_backward)


def _with_own(query, out, size, own_key, own_value):
    """Attention of a chained row with the chain's own rows [B, t, m, K, C] added to it."""
    kv_heads = own_key.shape[3]
    grouped = query.reshape(*query.shape[:2], kv_heads, -1, query.shape[-1])
    own = _dot("btkgc,btmkc->btkgm", grouped, own_key) * query.shape[-1] ** -0.5
    own = own.reshape(*query.shape[:3], -1)
    total = jnp.logaddexp(size, jax.nn.logsumexp(own, axis=-1))[..., None]
    weights = jnp.exp(own - total).reshape(*grouped.shape[:4], -1)
    added = _dot("btkgm,btmkc->btkgc", weights.astype(own_value.dtype), own_value)
    return out * jnp.exp(size[..., None] - total) + added.reshape(out.shape)


def shifted(x: Float[Array, "B T *c"], places: int) -> Float[Array, "B T *c"]:
    """Row `r` of the result is row `r - places`; zeros where there is none."""
    pad = [(0, 0), (places, 0)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pad)[:, : x.shape[1]]


def index_vectors(
    params: Indexer, config: Config, x: Float[Array, "B T D"], table: Table
) -> tuple[Float[Array, "B T H C"], Float[Array, "B N C"]]:
    """Queries of the indexer, and the compressed keys of the complete blocks."""
    heads, channels = config.indexer_n_heads, config.indexer_head_dim
    ratio, eps = config.indexer_compress_ratio, config.rms_norm_eps
    index_qk = skinny_matmul(x, params.index_qk_proj, implementation="reference")
    query = index_qk[..., :-channels].reshape(*x.shape[:2], heads, channels)
    query = rotate(rms_norm(query, params.q_layernorm, eps), table.cos, table.sin)
    blocks = x.shape[1] // ratio
    raw = index_qk[:, : blocks * ratio, -channels:].astype(jnp.float32)
    pooled = jnp.mean(raw.reshape(x.shape[0], blocks, ratio, channels), axis=2).astype(x.dtype)
    pooled = rms_norm(pooled, params.k_layernorm, eps)[:, :, None]
    return query, rotate(pooled, table.block_cos, table.block_sin)[:, :, 0]


def best_blocks(scores: Float[Array, "*rows N"], count: int) -> Bool[Array, "*rows N"]:
    """Which blocks have the `count` highest scores, the lower block among equals.

    Scores are at least 0, or negative where there is no block; those are never chosen. No sort:
    the bits of the smallest chosen score are found from the highest down.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    many = lambda found: jnp.sum(found, axis=-1, keepdims=True, dtype=jnp.int32)  # noqa: E731

    def narrow(i, least):
        tried = least | (1 << (30 - i))
        return jnp.where(many(bits >= tried) >= count, tried, least)

    least = jax.lax.fori_loop(0, 31, narrow, jnp.zeros((*bits.shape[:-1], 1), jnp.int32))
    above, equal = bits > least, bits == least
    missing = count - many(above)
    place = jnp.arange(bits.shape[-1])
    steps = (bits.shape[-1]).bit_length()

    def extend(i, end):
        tried = end | (1 << (steps - 1 - i))
        return jnp.where(many(equal & (place < tried)) <= missing, tried, end)

    end = jax.lax.fori_loop(0, steps, extend, jnp.zeros_like(least))
    return above | (equal & (place < end))


def _projected(params, config, x, table):
    """Query, gate [B, T, H, C], key and value [B, T, K, C], normed and rotated."""
    heads, channels, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    matmul = functools.partial(skinny_matmul, implementation="reference")
    query_gate = matmul(x, params.q_proj, params.q_proj_bias)
    query_gate = query_gate.reshape(*x.shape[:2], heads, 2, channels)
    kv_shape = (*x.shape[:2], config.num_key_value_heads, channels)
    key = matmul(x, params.k_proj, params.k_proj_bias).reshape(kv_shape)
    value = matmul(x, params.v_proj, params.v_proj_bias).reshape(kv_shape)
    query = rotate(rms_norm(query_gate[:, :, :, 0], params.q_norm, eps), table.cos, table.sin)
    key = rotate(rms_norm(key, params.k_norm, eps), table.cos, table.sin)
    return query, query_gate[:, :, :, 1], key, value


def _output(params, mixed, gate, dtype):
    gated = mixed.reshape(gate.shape) * jax.nn.sigmoid(gate.astype(jnp.float32))
    flat = gated.astype(dtype).reshape(*gate.shape[:2], -1)
    return skinny_matmul(flat, params.o_proj, params.o_proj_bias, implementation="reference")


def _dot(equation, x, y):
    precision = EXACT if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def _tiles(places):
    size = max(_TILE, -(-places // _TILES))
    return [(first, min(first + size, places)) for first in range(0, places, size)]


def _grouped(x, kv_heads):
    """[B, t, H, C] as [B, K, G, t, C], so that all products of a key head are one."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]), 1, 3)


def _ungrouped(x):
    return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def _visible(keep, places, first, lag, ratio, dense):
    """Which of `places` keys each query of a tile attends to, [B, t, places]."""
    base = first + jnp.arange(keep.shape[1]) - lag
    complete = (base + 1) // ratio
    key = jnp.arange(places)
    causal = key <= base[:, None]
    tail = causal & (key >= complete[:, None] * ratio)
    members = jnp.repeat(keep, ratio, axis=-1)
    members = jnp.pad(members, ((0, 0), (0, 0), (0, places - members.shape[-1])))
    return (members | tail | dense) & causal


def _index_scores(query, key):
    """As `index_score`, of keys side by side and without leaving any out."""
    dots = _dot("bthc,bnc->bthn", query, key)
    return jnp.sum(jnp.maximum(dots, 0), axis=2) * query.shape[-1] ** -0.5


def _selection(query, key, first, config):
    """Blocks that the queries from `first` on select."""
    place = first + jnp.arange(query.shape[1])
    there = jnp.arange(key.shape[1]) < ((place + 1) // config.indexer_compress_ratio)[:, None]
    scores = jnp.where(there, _index_scores(query, key), -1.0)
    return best_blocks(scores, config.index_blocks) & there


def _imitation(query, key, index_query, index_key, keep, first, config):
    """Dense attention's block mass against the indexer's scores and selection.

    Args:
        query: every `_STRIDE`-th query from `first` on.
        key: of all tokens up to the tile's end.
        index_query: of the same queries.
        index_key: of the blocks up to there.
        keep: what the same queries selected.
        first: index of the first query.
        config: of the model.
    """
    ratio, blocks, count = config.indexer_compress_ratio, config.index_blocks, index_key.shape[1]
    place = first + _STRIDE * jnp.arange(query.shape[1])
    there = jnp.arange(count) < ((place + 1) // ratio)[:, None]
    scores = _dot("bkgtc,bskc->bkgts", _grouped(query, key.shape[2]), key)
    scores = scores * query.shape[-1] ** -0.5
    causal = jnp.arange(key.shape[1]) <= place[:, None]
    dense = jax.nn.softmax(jnp.where(causal, scores, _HIDDEN), axis=-1)
    mass = jnp.sum(dense, axis=(1, 2))[..., : count * ratio]
    mass = jnp.sum(mass.reshape(*mass.shape[:2], count, ratio), axis=-1)
    mass = jnp.where(there, mass, 0.0)
    mass = mass / jnp.maximum(jnp.sum(mass, axis=-1, keepdims=True), 1e-20)

    index = jnp.where(there, _index_scores(index_query, index_key), _HIDDEN)
    log_ratio = jnp.log(jnp.maximum(mass, 1e-20)) - jax.nn.log_softmax(index, axis=-1)
    divergence = jnp.sum(jnp.where(there, mass * log_ratio, 0.0), axis=-1)
    number = jnp.float32(query.shape[0])
    contested = (place + 1) // ratio > blocks
    best = best_blocks(jnp.where(there, mass, -1.0), blocks)
    overlap = jnp.sum(best & keep, axis=-1) / blocks
    captured = jnp.sum(jnp.where(keep, mass, 0.0), axis=-1)
    return Imitation(
        divergence=jnp.sum(divergence),
        queries=number * jnp.sum(place + 1 >= ratio),
        captured=jnp.sum(jnp.where(contested, captured, 0.0)),
        overlap=jnp.sum(jnp.where(contested, overlap, 0.0)),
        contested=number * jnp.sum(contested),
    )
