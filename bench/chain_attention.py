"""Chains of Qwen Sparse Attention that `bench.chains` times: selection, attention behind it."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from bench import check
from bench.chain_links import PLACES, Chain, normal
from bench.timing import COLD, ROOM
from bench.traffic import BYTES
from qwen4jax.config import Config
from qwen4jax.pallas import index_score, index_topk
from qwen4jax.pallas import sparse_attention as attention
from qwen4jax.pallas.index_topk.select import select

# tokens of a page
PAGE = 64
Judged = list[tuple[jax.Array, jax.Array, jax.Array]]


def _indexed(config: Config, requests: int, tokens: int) -> tuple[Any, Any]:
    """(what all layers share of `requests` slots of `tokens` tokens; a layer's arrays by key)."""
    ratio = config.indexer_compress_ratio
    pages = requests * tokens // PAGE

    def shared(key: jax.Array) -> dict[str, jax.Array]:
        last = tokens - PLACES + jnp.arange(PLACES)
        index = jnp.broadcast_to(last, (requests, PLACES)).astype(jnp.int32)
        table = jax.random.permutation(key, pages).reshape(requests, -1).astype(jnp.int32)
        return dict(page_table=table, index=index, complete=(index + 1) // ratio)

    @jax.jit
    def layer(key: jax.Array) -> dict[str, jax.Array]:
        a, b = jax.random.split(key)
        query = (requests, PLACES, config.indexer_n_heads, config.indexer_head_dim)
        keys = (pages, PAGE // ratio, config.indexer_head_dim)
        return dict(index_query=normal(a, query), index_key=normal(b, keys))

    return shared, layer


def _choose(config: Config, own: dict[str, jax.Array], span: dict[str, jax.Array]) -> jax.Array:
    return select(
        own["index_query"],
        own["index_key"],
        span["page_table"],
        span["complete"],
        span["index"],
        blocks=config.index_blocks,
        ratio=config.indexer_compress_ratio,
    )


def _score_bytes(own: dict[str, jax.Array], span: dict[str, jax.Array], out: Any) -> float:
    names = dict(query=own["index_query"], index_key=own["index_key"])
    return BYTES["index_score"](names | span, out)


def wrong_rows(
    config: Config, own: dict[str, jax.Array], span: dict[str, jax.Array], selected: jax.Array
) -> jax.Array:
    """Queries whose selection is not one of the best, int32.

    Scores of two implementations differ in the last bits, so a block may be left out for one that
    scores as much but for float32's rounding.
    """
    ratio = config.indexer_compress_ratio
    query, keys = check.widen((own["index_query"], own["index_key"]))
    seen = span["page_table"], span["complete"]
    scores: Any = index_score.reference.index_score(query, keys, *seen)
    rows, places, blocks = scores.shape
    row, place = jnp.ogrid[:rows, :places]
    # one place more for entries that select nothing
    to = jnp.where(selected >= 0, selected, blocks * ratio)
    times = jnp.zeros((rows, places, blocks * ratio + 1), jnp.int32)
    times = times.at[row[..., None], place[..., None], to].add(1)[..., :-1]
    times = times.reshape(rows, places, blocks, ratio)
    complete = jnp.arange(blocks) < span["complete"][..., None]
    chosen = complete & jnp.all(times == 1, axis=-1)
    token = jnp.arange(blocks * ratio).reshape(blocks, ratio)
    tail = ~complete[..., None] & (token <= span["index"][..., None, None])
    right = jnp.all(times == (chosen[..., None] | tail), axis=(2, 3))
    right &= jnp.sum(chosen, axis=-1) == jnp.minimum(config.index_blocks, span["complete"])
    least = jnp.min(jnp.where(chosen, scores, jnp.inf), axis=-1)
    missed = jnp.max(jnp.where(complete & ~chosen, scores, -jnp.inf), axis=-1)
    return jnp.sum(~(right & (least >= missed - 1e-5 * jnp.abs(missed)))).astype(jnp.int32)


def selection(config: Config, requests: int, tokens: int) -> Chain:
    """Scoring and selection for four queries of each request."""
    shared, layer = _indexed(config, requests, tokens)
    nbytes = 2 * requests * tokens * config.indexer_head_dim / config.indexer_compress_ratio

    def draw(key: jax.Array, links: int, passes: int) -> tuple[Any, Any]:
        first, *keys = jax.random.split(key, 1 + links)
        room = [
            jnp.zeros((requests, PLACES, config.selected_tokens), jnp.int32)
            for _ in range(links * passes)
        ]
        return room, (shared(first), tuple(map(layer, keys)))

    one = jax.jit(functools.partial(_choose, config))

    def run(carry: Any, fixed: Any, passes: int) -> Any:
        del carry
        (span, layers), results = fixed, []
        for own in layers * passes:
            own, results[-1:] = jax.lax.optimization_barrier((own, results[-1:]))
            results.append(one(own, span))
        return results

    def judge(arrays: dict[str, Any], got: Any) -> Judged:
        span, (own,) = arrays["fixed"]
        return [(jnp.float32(0), jnp.float32(0), wrong_rows(config, own, span, got[0]))]

    return Chain(
        name="index_topk.select",
        case=f"{requests}_rows_{tokens // 1024}k",
        rows=requests * PLACES,
        # whose keys outgrow the cache
        links=max(4, math.ceil(COLD / nbytes)),
        passes=1,
        operations=(index_score.IMPLEMENTATIONS, index_topk.IMPLEMENTATIONS),
        draw=draw,
        run=run,
        nbytes=lambda carry, fixed: sum(_score_bytes(o, fixed[0], carry[0]) for o in fixed[1]),
        judge=judge,
    )


def sparse(config: Config, requests: int, tokens: int) -> Chain:
    """Scoring, selection and attention for four queries of each request, layer after layer.

    A layer's output is the next one's gate.
    """
    shared, index_layer = _indexed(config, requests, tokens)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    channels = config.head_dim
    queries = (requests, PLACES, heads, channels)
    pool = (requests * tokens // PAGE, PAGE, kv_heads, channels)

    @jax.jit
    def caches(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        return dict(query=normal(a, queries), key=normal(b, pool), value=normal(c, pool))

    def draw(key: jax.Array, links: int, passes: int) -> tuple[Any, Any]:
        del passes
        first, second, *keys = jax.random.split(key, 2 + 2 * links)
        layers = [index_layer(a) | caches(b) for a, b in zip(keys[::2], keys[1::2], strict=True)]
        carry = (
            normal(second, queries),
            jnp.zeros((requests, PLACES, config.selected_tokens), jnp.int32),
        )
        return carry, (shared(first), tuple(layers))

    @jax.jit
    def one(gate: jax.Array, own: dict[str, jax.Array], span: dict[str, jax.Array]) -> Any:
        selected = _choose(config, own, span)
        given = own["query"], gate, own["key"], own["value"], selected, span["page_table"]
        return attention.sparse_attention(*given).reshape(gate.shape), selected

    def run(carry: Any, fixed: Any, passes: int) -> Any:
        span, layers = fixed
        for own in layers * passes:
            own, carry = jax.lax.optimization_barrier((own, carry))
            carry = one(carry[0], own, span)
        return carry

    def judge(arrays: dict[str, Any], got: Any) -> Judged:
        (gate, _), (span, (own,)) = arrays["carry"], arrays["fixed"]
        query, gate, key, value = check.widen((own["query"], gate, own["key"], own["value"]))
        reference = attention.reference.sparse_attention
        want = reference(query, gate, key, value, got[1], span["page_table"])
        norm, largest, others = check.compare(got[0].reshape(want.shape), want)
        return [(norm, largest, others + wrong_rows(config, own, span, got[1]))]

    def nbytes(carry: Any, fixed: Any) -> float:
        (gate, selected), (span, layers) = carry, fixed
        given = layers[-1] | span | dict(gate=gate, slots=selected)
        # every layer's queries choose apart, as the last one's
        each = BYTES["sparse_attention"](given, gate) + _score_bytes(layers[-1], span, None)
        return len(layers) * each

    return Chain(
        name="sparse_attention.chain",
        case=f"{requests}_rows_{tokens // 1024}k",
        rows=requests * PLACES,
        links=max(2, min(12, int(ROOM / (4 * tokens * requests * kv_heads * channels)))),
        passes=2,
        operations=(
            index_score.IMPLEMENTATIONS,
            index_topk.IMPLEMENTATIONS,
            attention.IMPLEMENTATIONS,
        ),
        draw=draw,
        run=run,
        nbytes=nbytes,
        judge=judge,
    )
