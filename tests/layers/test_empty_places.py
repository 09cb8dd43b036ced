"""Places without a token cost no expert of their own: idle slots, padding, rejected drafts."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax import span
from qwen4jax.model import step
from qwen4jax.span import make_span
from tests.tiny import ROWS, T0, assert_close, new_state, t0

PLACES = 4


@given(
    starts=st.lists(st.sampled_from([-1, 0, 7]), min_size=ROWS, max_size=ROWS),
    counts=st.lists(st.integers(0, PLACES), min_size=ROWS, max_size=ROWS),
)
def test_empty_places_are_spread_over_the_filled(starts: list[int], counts: list[int]):
    start, count = (jnp.asarray(x, jnp.int32) for x in (starts, counts))
    made = make_span(T0, new_state(), start, count, PLACES)
    got, there = np.asarray(made.filled), np.asarray(made.valid)
    own = np.arange(got.size).reshape(got.shape)
    if not there.any():
        assert (got == own).all()
        return
    assert (got[there] == own[there]).all()
    assert there.reshape(-1)[got].all()
    # of idle rows no live one stands for two more than another
    stands = np.bincount(got[:, 0] // PLACES, minlength=ROWS)[there.any(axis=1)]
    assert stands.max() - stands.min() <= 1


def test_no_expert_is_read_for_an_empty_place(monkeypatch: pytest.MonkeyPatch):
    """And what the tokens give stays as it is without that."""
    moe, chosen = importlib.import_module("qwen4jax.layers.moe"), []
    experts, filled, own = moe.experts, span._filled, jnp.arange(ROWS * PLACES)

    def noted(x: Any, ids: Any, *arrays: Any, **more: Any) -> Any:
        chosen.append(ids.reshape(ROWS, PLACES, -1))
        return experts(x, ids, *arrays, **more)

    monkeypatch.setattr(moe, "experts", noted)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, T0.vocab_size, (ROWS, PLACES)), jnp.int32)
    count = jnp.asarray([0, PLACES, 2, 0], jnp.int32)
    there = np.arange(PLACES) < np.asarray(count)[:, None]
    state = new_state().replace(length=jnp.full(ROWS, 5, jnp.int32))
    params = t0()

    def run(how: Any) -> tuple[list[np.ndarray], np.ndarray]:
        monkeypatch.setattr(span, "_filled", how)
        chosen.clear()

        def traced(state: Any) -> Any:
            _, pending = step(params, state, tokens, count, final=False)
            return tuple(chosen), pending.residual

        return jax.device_get(jax.jit(traced)(state))

    ids, residual = run(filled)
    alone, other = run(lambda *_: own.reshape(ROWS, PLACES))
    assert len(ids) == len(alone) == T0.num_hidden_layers
    rows = lambda ids: {tuple(row) for row in ids.tolist()}  # noqa: E731
    assert all(rows(one[~there]) <= rows(one[there]) for one in ids)
    assert not all(rows(one[~there]) <= rows(one[there]) for one in alone)
    assert_close(residual[there], other[there])


@pytest.mark.parametrize(
    ("rows", "places", "final", "given"),
    [
        (ROWS, 1, False, True),
        (ROWS, 1, True, True),
        (1, PLACES, True, True),
        # nothing is empty where one slot speculates, or has one place
        (1, PLACES, False, False),
        (1, 1, True, False),
    ],
)
def test_where_places_can_be_empty(
    monkeypatch: pytest.MonkeyPatch, rows: int, places: int, final: bool, given: bool
):
    decoder, seen = importlib.import_module("qwen4jax.layers.decoder"), []
    moe = decoder.moe

    def noted(params: Any, config: Any, x: Any, counter: Any, filled: Any, **more: Any) -> Any:
        seen.append(filled is not None)
        return moe(params, config, x, counter, filled, **more)

    monkeypatch.setattr(decoder, "moe", noted)
    params = t0()
    tokens, count = jnp.zeros((rows, places), jnp.int32), jnp.ones(rows, jnp.int32)
    residual = lambda s: step(params, s, tokens, count, final=final)[1].residual  # noqa: E731
    jax.eval_shape(residual, new_state(slots=rows))
    assert seen == [given] * T0.num_hidden_layers
