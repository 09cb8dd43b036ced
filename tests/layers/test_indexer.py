"""The indexer's arithmetic by itself: which pairs turn, and by which position."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from qwen4jax.pallas.compress_and_store import compress, prepare
from qwen4jax.pallas.index_score import index_score
from qwen4jax.span import make_span
from qwen4jax.state import init_state
from tests.tiny import T0

POSITIONS = (0, 4, 8, 400)


def interleaved(x, angles):
    """Pairs (2i, 2i + 1), as another model's indexer has them."""
    out = x.copy()
    for i, angle in enumerate(angles):
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        out[..., 2 * i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., 2 * i + 1] = b * np.cos(angle) + a * np.sin(angle)
    return out


def half_split(x, angles):
    out, pairs = x.copy(), len(angles)
    for i, angle in enumerate(angles):
        a, b = x[..., i], x[..., i + pairs]
        out[..., i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., i + pairs] = b * np.cos(angle) + a * np.sin(angle)
    return out


def test_pairs_and_block_position():
    """NUM-05: half-split pairs of 4 in 16 channels; a block turns at its first token, after its
    mean and norm. Other pairs, or the block's middle or end, are far off.
    """
    rng = np.random.default_rng(5)
    raw, query = rng.standard_normal((4, 4, 16)), rng.standard_normal((4, 4, 2, 16))
    q_norm, k_norm = 0.2 * rng.standard_normal((2, 16))
    state: Any = init_state(T0, slots=4, max_length=404, page_size=4)
    start = jnp.asarray(POSITIONS)
    span = make_span(T0, state, start, jnp.full(4, 4), 4)
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    cache = compress(state.layers[3], f32(raw), f32(k_norm), span, ratio=4, eps=1e-6)
    queries = prepare(f32(query), f32(q_norm), span, eps=1e-6)
    scores = np.asarray(index_score(queries, cache.index_key, span.page_table, span.complete))

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + weight)

    frequency = 10000.0 ** (-np.arange(2) / 2)

    def by_definition(turn=half_split, shift=0.0):
        found = []
        for row, position in enumerate(POSITIONS):
            key = turn(norm(raw[row].mean(0), k_norm), (position + shift) * frequency)
            # the block's last token sees it
            q = turn(norm(query[row, 3], q_norm), (position + 3) * frequency)
            found.append(np.maximum(q @ key, 0).sum() / 4)
        return np.array(found)

    got = np.array([scores[row, 3, position // 4] for row, position in enumerate(POSITIONS)])
    np.testing.assert_allclose(got, by_definition(), atol=2e-5)
    for other in (by_definition(interleaved), by_definition(shift=3), by_definition(shift=1.5)):
        assert np.abs(got - other).max() > 1e-2
    unpooled = norm(raw, k_norm).mean(1)
    assert np.abs(unpooled - norm(raw.mean(1), k_norm)).max() > 1e-2
