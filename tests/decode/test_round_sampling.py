"""Options of sampling in every verified row of a burst."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode import round as decode_round
from qwen4jax.decode import sampling
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.sampling import sample, takes_the_largest
from qwen4jax.model import head, likeliest
from tests.decode.planted import (
    VOCAB,
    Play,
    Request,
    decoded,
    golden_prompts,
    most_probable,
    t0,
)

PROMPTS = golden_prompts()


def test_penalties_are_counted_inside_a_burst():
    """SMP-07: presence penalty 2 after [5, 5, 5], with drafts that all stand or fail somewhere."""

    def choose(logits: np.ndarray, so_far: list[int]) -> int:
        penalised = logits.copy()
        penalised[list(set(so_far))] -= 2
        return int(penalised.argmax())

    prompts = [(5, 5, 5), *PROMPTS[:7]]
    known, unpenalised = decoded(prompts, 16, choose), decoded(prompts, 16, most_probable)
    assert known != unpenalised
    sampling = Sampling(temperature=0, presence_penalty=2, max_new_tokens=16)
    requests = [Request(prompt, sampling) for prompt in prompts]
    for wrong in range(4):
        play = Play(t0("share"), 3, requests)

        def plant(play: Play, wrong: int = wrong):
            play.plant_known(known, [wrong] * len(known))

        assert play.finish(plant) == known
        assert play.bursts[0].accepted[: len(known)].tolist() == [wrong] * len(known)
    # drafts of a run without penalties: some are what the penalties forbid
    play = Play(t0("share"), 3, requests)
    assert play.finish(lambda p: p.plant_known(unpenalised, [3] * len(known))) == known


def test_greedy_ids_are_those_of_the_logits():
    """The mode in which nobody writes logits; every option that changes an id leaves it."""
    params = t0()
    hidden = jax.random.normal(jax.random.key(5), (4, 3, params.config.hidden_size))
    hidden = hidden.at[1, 2].set(jnp.inf)
    places = jnp.ones((4, 3), jnp.int32)
    controls = make_controls([Row(Sampling(temperature=0), 1)] * 4, 4, VOCAB)
    assert takes_the_largest(controls)
    of_logits = sample(head(params, hidden), places, places, controls, logprobs=False)
    ids, finite = likeliest(params, hidden)
    np.testing.assert_array_equal(finite, of_logits.finite)
    np.testing.assert_array_equal(ids[finite], of_logits.ids[finite])
    assert finite.sum() == 11
    for options in (
        dict(temperature=1),
        dict(presence_penalty=1),
        dict(logit_bias={3: 1}),
        dict(min_new_tokens=2, stop_ids=(1,)),
    ):
        row = Row(Sampling(**dict(temperature=0) | options), 1)
        assert not takes_the_largest(make_controls([row], 1, VOCAB)), options


@pytest.mark.parametrize("logprobs", [False, True])
def test_logits_are_written_only_where_they_are_read(monkeypatch, logprobs: bool):
    """A greedy call makes none, unless it asks for log-probabilities."""

    def unwanted(*_: Any, **__: Any):
        raise AssertionError("not for this mode")

    monkeypatch.setattr(decode_round, "likeliest" if logprobs else "head", unwanted)
    params, places = t0(), jnp.ones((2, 3), jnp.int32)
    hidden = jax.random.normal(jax.random.key(6), (2, 3, params.config.hidden_size))
    controls = make_controls([Row(Sampling(temperature=0), 1)] * 2, 2, VOCAB)
    running = jnp.ones(2, bool)
    got = decode_round._choose(params, hidden, places, places, controls, running, logprobs, 0)
    want = sample(head(params, hidden), places, places, controls, logprobs=False)
    np.testing.assert_array_equal(got.ids, want.ids)
    assert (got.logprobs is not None) == logprobs


def test_only_rows_that_are_drawn_from_are_truncated(monkeypatch):
    """A freed slot's top-p, or a greedy row's, would have the vocabulary sorted for nobody."""
    given: list[tuple[list[int], list[float]]] = []

    def truncate(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        given.append((top_k.tolist(), np.round(top_p, 6).tolist()))
        return scores

    monkeypatch.setattr(sampling, "truncate", truncate)
    params, places = t0(), jnp.ones((3, 1), jnp.int32)
    hidden = jax.random.normal(jax.random.key(6), (3, 1, params.config.hidden_size))
    rows = [Row(Sampling(temperature=t, top_k=7, top_p=0.5), 1) for t in (0.5, 0, 0.5)]
    controls = make_controls(rows, 3, VOCAB)
    running = jnp.asarray([True, True, False])
    decode_round._choose(params, hidden, places, places, controls, running, False, 0)
    assert given == [([7, 0, 0], [0.5, 1.0, 1.0])]


@pytest.mark.parametrize("options", [dict(top_k=1), dict(top_p=1e-6), dict(temperature=0)], ids=str)
def test_a_banned_id_is_never_given(options: dict[str, Any]):
    """SMP-05: a bias of -100 on the greedy id holds in every row, though it is what is drafted."""
    banned = [ids[0] for ids in decoded(PROMPTS, 1, most_probable)]
    requests = [
        Request(prompt, Sampling(logit_bias={token: -100}, max_new_tokens=16, **options))
        for prompt, token in zip(PROMPTS, banned, strict=True)
    ]
    known = decoded_without(banned)
    # the banned id is drafted at each place after true ones
    for at in range(3):
        play = Play(t0("share"), 3, requests)

        def plant(play: Play, at: int = at):
            play.plant_known(known, [3] * len(known))
            drafts = np.asarray(play.state.drafts)[: len(known)].copy()
            drafts[:, at] = banned
            play.plant(drafts.tolist())

        assert play.finish(plant) == known
        assert not any(token in ids for token, ids in zip(banned, play.ids, strict=True))
        assert play.bursts[0].accepted[: len(known)].tolist() == [at] * len(known)


def decoded_without(banned: list[int]) -> list[list[int]]:
    """The most probable tokens but for one of each row."""
    rows = iter(range(10**9))

    def choose(logits: np.ndarray, _: list[int]) -> int:
        allowed = logits.copy()
        allowed[banned[next(rows) % len(banned)]] -= 100
        return int(allowed.argmax())

    return decoded(PROMPTS, 16, choose)
