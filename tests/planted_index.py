"""Indexers whose choice is known beforehand: queries and compressed keys along one channel.

A query is +-u in every head's channel 5, which is not rotated; one head points along u and one
against it, so every query scores a key along u and no query scores a key across it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.decode.prefill import feed
from qwen4jax.layers.capture import Capture
from qwen4jax.model import head
from qwen4jax.params import Params
from qwen4jax.state import DecodeState

LAYER, WIDTH, CHANNEL = 3, 16, 5


def with_indexer(params: Params, weight: Any) -> Params:
    """T0's parameters with another `index_qk_proj`."""
    layers = list(params.layers)
    attention: Any = layers[LAYER].self_attn
    indexer = dataclasses.replace(attention.indexer, index_qk_proj=jnp.asarray(weight))
    attention = dataclasses.replace(attention, indexer=indexer)
    layers[LAYER] = dataclasses.replace(layers[LAYER], self_attn=attention)
    return dataclasses.replace(params, layers=tuple(layers))


def planted_queries(params: Params) -> Params:
    """Queries of +-u, and keys across u in channels that are not rotated."""
    attention: Any = params.layers[LAYER].self_attn
    weight = np.array(attention.indexer.index_qk_proj)
    direction = weight[0].copy()
    weight[: 2 * WIDTH] = 0
    weight[CHANNEL], weight[WIDTH + CHANNEL] = direction, -direction
    weight[2 * WIDTH + CHANNEL] = 0
    return with_indexer(params, weight)


def edit_cache(state: DecodeState, **changes: Any) -> Any:
    """The state with other arrays in T0's only sparse layer."""
    layers = list(state.layers)
    layers[LAYER] = dataclasses.replace(layers[LAYER], **changes)
    return dataclasses.replace(state, layers=tuple(layers))


def at_block(state: DecodeState, row: int, block: int) -> tuple[int, int]:
    """(page, block in it) of one row's block, of pages of two blocks."""
    return int(state.page_table[row, block // 2]), block % 2


def plant(state: DecodeState, blocks: dict[int, list[int]]) -> Any:
    """Keys of u in the given blocks of each row; all others score exactly 0."""
    cache: Any = state.layers[LAYER]
    keys = np.array(cache.index_key)
    keys[..., CHANNEL] = 0
    for row, chosen in blocks.items():
        for block in chosen:
            keys[(*at_block(state, row, block), CHANNEL)] = 1
    return edit_cache(state, index_key=jnp.asarray(keys))


@jax.jit
def select(params: Params, state: DecodeState, tokens: Any) -> Any:
    """One token for every row: the state, the logits, and what the sparse layer selected."""
    taps = Capture(("layer03.indexer.selected",))
    count = jnp.ones(tokens.shape[0], jnp.int32)
    state, hidden = feed(params, state, tokens[:, None], count, capture=taps)
    (selected,) = taps.values.values()
    return state, head(params, hidden)[:, 0], selected[:, 0]


def tokens_of(selected: Any) -> list[int]:
    """The selected tokens of one query, in order."""
    row = np.asarray(selected)
    return sorted(row[row >= 0].tolist())
