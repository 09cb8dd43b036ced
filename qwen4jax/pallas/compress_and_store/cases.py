"""Cases of norm, rotation and cache writes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.config import SPARSE, Config
from qwen4jax.pallas.cases import BF16, E4M3, F32, Case, integers, normal
from qwen4jax.pallas.compress_and_store import Gains
from qwen4jax.span import Span, make_span
from qwen4jax.state import AttentionCache, abstract_state

_ONE_LAYER = dict(
    num_hidden_layers=1, layer_types=(SPARSE,), ple_layer_ids=(), mtp_num_hidden_layers=0
)
SMALL = Config.tiny(**_ONE_LAYER)
RELEASED = Config.flash_next(**_ONE_LAYER)


def _span(rng, config, start, count, places, *, page_size, images, holes) -> tuple[Span, int]:
    """Rows at `start` on shuffled pages, with their rotary history; and the number of pages."""
    rows = len(start)
    length = max(s + places for s in start) + page_size
    state = abstract_state(config, slots=rows, max_length=length, page_size=page_size)
    pages = state.page_table.size
    table = rng.permutation(pages).reshape(state.page_table.shape)
    if holes:
        table[:, holes:] = -1
    given = dict(
        page_table=table,
        rope_ring=rng.integers(0, 500, state.rope_ring.shape),
        rope_delta=rng.integers(-3, 4, rows) if images else np.zeros(rows),
    )

    @jax.jit
    def span(given, start, count, positions):
        # of the rest of the state only shapes are read
        return make_span(config, state.replace(**given), start, count, places, positions)

    positions = integers(rng.integers(0, 500, (rows, places, 3))) if images else None
    return span(jax.tree.map(integers, given), integers(start), integers(count), positions), pages


def _cache(rng, config, pages, page_size, span, dtype, kv_dtype) -> AttentionCache:
    """A cache of NaN but for the ring's rows of tokens before the span."""
    ring = 8
    rows = span.start.shape[0]
    kept = normal(rng, (rows, ring, config.indexer_head_dim), dtype)
    live = jnp.arange(ring) < span.start[:, None]
    kv = (pages, page_size, config.num_key_value_heads, config.head_dim)
    blocks = page_size // config.indexer_compress_ratio
    return AttentionCache(
        key=jnp.full(kv, jnp.nan, kv_dtype or dtype),
        value=jnp.full(kv, jnp.nan, kv_dtype or dtype),
        index_key=jnp.full((pages, blocks, config.indexer_head_dim), jnp.nan, dtype),
        ring=jnp.where(live[..., None], kept, jnp.nan),
    )


def _case(
    function,
    name,
    start,
    count,
    places,
    dtype=F32,
    *,
    config=SMALL,
    page_size=8,
    kv_dtype=None,
    images=False,
    holes=0,
    index_queries=True,
    device_only=False,
):
    """One function over rows that begin at `start` and have `count` of `places` tokens."""
    width = {"prepare": config.head_dim, "compress": config.indexer_head_dim}

    def build(rng):
        span, pages = _span(
            rng, config, start, count, places, page_size=page_size, images=images, holes=holes
        )
        at = (len(start), places)
        given: dict[str, Any] = dict(span=span)
        if function == "prepare_and_store":
            cache = _cache(rng, config, pages, page_size, span, dtype, kv_dtype)
            return given | dict(cache=cache) | _projected(rng, config, span, dtype, index_queries)
        if function != "store":
            norm = normal(rng, (width[function],), dtype, 0.2)
            given |= dict(norm=norm, eps=config.rms_norm_eps)
        if function == "prepare":
            return given | dict(
                x=normal(rng, (*at, config.num_attention_heads, config.head_dim), dtype)
            )
        given["cache"] = _cache(rng, config, pages, page_size, span, dtype, kv_dtype)
        # places behind the tokens hold anything
        there = span.valid
        if function == "store":
            kv = (*at, config.num_key_value_heads, config.head_dim)
            return given | {
                part: jnp.where(there[..., None, None], normal(rng, kv, dtype), jnp.nan)
                for part in ("key", "value")
            }
        raw = normal(rng, (*at, config.indexer_head_dim), dtype)
        return given | dict(
            raw_key=jnp.where(there[..., None], raw, jnp.nan), ratio=config.indexer_compress_ratio
        )

    return Case(function, name, build, device_only)


def _projected(rng, config, span, dtype, index_queries) -> dict[str, Any]:
    """A layer's projections, NaN where there is no token, and its norms."""
    width, index_width = config.head_dim, config.indexer_head_dim
    at = span.index.shape

    def rows(*shape):
        there = span.valid.reshape(*at, *(1,) * len(shape))
        return jnp.where(there, normal(rng, (*at, *shape), dtype), jnp.nan)

    gain = lambda channels: normal(rng, (channels,), dtype, 0.2)  # noqa: E731
    return dict(
        query_gate=rows(config.num_attention_heads, 2, width),
        key=rows(config.num_key_value_heads, width),
        value=rows(config.num_key_value_heads, width),
        index_qk=rows(index_queries * config.indexer_n_heads + 1, index_width),
        gains=Gains(gain(width), gain(width), gain(index_width), gain(index_width)),
        ratio=config.indexer_compress_ratio,
        eps=config.rms_norm_eps,
    )


def _released(function, name, start, count, places, **more):
    return _case(
        function,
        f"released_{name}",
        start,
        count,
        places,
        BF16,
        config=RELEASED,
        page_size=64,
        device_only=True,
        **more,
    )


CASES = (
    _case("prepare", "float32", (0, 5), (4, 4), 4),
    _case("prepare", "three_axes", (3,), (5,), 5, images=True),
    _case("prepare", "far_positions", (4000,), (3,), 3),
    _case("prepare", "bfloat16", (0, 5), (4, 2), 4, BF16),
    _case("prepare", "places_63", (1,), (63,), 63),
    _case("store", "float32", (0, 5, 7), (4, 4, 1), 4),
    _case("store", "some_or_no_tokens", (0, 5, 7), (0, 3, 1), 4),
    _case("store", "before_the_first", (-1, -1), (1, 4), 4),
    _case("store", "pages_not_assigned", (6, 0), (7, 7), 7, holes=1),
    _case("store", "bfloat16_to_e4m3", (0, 5), (4, 2), 4, BF16, kv_dtype=E4M3),
    _case("store", "page_of_one_block", (0, 5), (9, 2), 9, page_size=4),
    _case("store", "places_63", (3,), (63,), 63),
    _case("compress", "every_offset", (0, 1, 2, 3, 4, 5, 6, 7), (8,) * 8, 8),
    _case("compress", "one_token", (0, 2, 3, 7, 6, 11), (1, 1, 1, 1, 0, 1), 1),
    _case("compress", "some_or_no_tokens", (0, 5, 7, 2), (0, 3, 1, 4), 6),
    _case("compress", "before_the_first", (-1, -1, -1), (0, 1, 5), 5),
    _case("compress", "longer_than_the_ring", (3, 0), (21, 13), 21),
    _case("compress", "three_axes_across_the_start", (3, 6), (5, 2), 5, images=True),
    _case("compress", "pages_not_assigned", (6, 0), (7, 7), 7, holes=1),
    _case("compress", "page_of_one_block", (3, 5), (9, 3), 9, page_size=4),
    _case("compress", "bfloat16", (0, 5, 3), (4, 2, 5), 5, BF16),
    _case("prepare_and_store", "every_offset", (0, 1, 2, 3, 4, 5, 6, 7), (8,) * 8, 8),
    _case("prepare_and_store", "one_token", (0, 2, 3, 7, 6, 11), (1, 1, 1, 1, 0, 1), 1),
    _case("prepare_and_store", "some_or_no_tokens", (0, 5, 7, 2), (0, 3, 1, 4), 6, BF16),
    _case("prepare_and_store", "before_the_first", (-1, -1, -1), (0, 1, 5), 5),
    _case("prepare_and_store", "longer_than_the_ring", (3, 0), (21, 13), 21),
    _case("prepare_and_store", "three_axes", (3, 6), (5, 2), 5, images=True),
    _case("prepare_and_store", "pages_not_assigned", (6, 0), (7, 7), 7, holes=1),
    _case("prepare_and_store", "bfloat16_to_e4m3", (0, 5), (4, 2), 4, BF16, kv_dtype=E4M3),
    _case("prepare_and_store", "index_key_only", (0, 5, 3), (4, 2, 4), 4, index_queries=False),
    _case("prepare_and_store", "places_63", (3,), (63,), 63),
    # blocks of several programs, of which the last has few; spans that end early, or do not begin
    _case("prepare_and_store", "places_135", (6, 0, 3, 2), (135, 128, 70, 0), 135, BF16),
    _case("prepare_and_store", "places_150_across_pages", (1, 5), (150, 3), 150, holes=14),
    *(
        _released("prepare_and_store", f"{rows}_rows", tuple(range(1000, 1000 + rows)), at, 4)
        for rows in (1, 8, 32)
        for at in ((4,) * rows,)
    ),
    _released("prepare_and_store", "4_rows_e4m3", (1000,) * 4, (4,) * 4, 4, kv_dtype=E4M3),
    *(
        _released(function, f"{rows}_rows", tuple(range(1000, 1000 + rows)), (4,) * rows, 4)
        for function in ("prepare", "store", "compress")
        for rows in (1, 8, 32)
    ),
    *(
        _released(function, "chunk", (1001,), (2048,), 2048)
        for function in ("prepare", "store", "compress", "prepare_and_store")
    ),
    _released("prepare_and_store", "8192_tokens", (5,), (8192,), 8192),
)
