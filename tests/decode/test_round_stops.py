"""Rows that end inside a burst, at the end of their length, or do not end although drafted."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qwen4jax.decode.options import Sampling
from qwen4jax.decode.prefill import logits_of
from qwen4jax.decode.stopping import FinishReason
from tests.decode.planted import (
    CAPACITY,
    SLOTS,
    VOCAB,
    Play,
    Request,
    assert_same_live,
    controls_of,
    fed,
    plain,
    random_prompt,
    t0,
)

STOP, LENGTH, NONE = FinishReason.STOP, FinishReason.LENGTH, FinishReason.NONE
FIRST = 8  # tokens of a planted row that all differ, so that a stop id occurs once


def request(seed: int, length: int = 0, **options: Any) -> Request:
    options = dict(temperature=1.3, max_new_tokens=24, seed=seed) | options
    return Request(random_prompt(length or 6 + seed % 9, seed), Sampling(**options))


@functools.cache
def planted() -> tuple[list[int], list[list[int]]]:
    """Seeds of rows whose first tokens all differ, and their output."""
    known = plain(tuple(request(seed) for seed in range(SLOTS)))
    seeds = [seed for seed, ids in enumerate(known) if len(set(ids[:FIRST])) == FIRST]
    return seeds, [known[seed] for seed in seeds]


def absent(ids: Sequence[int]) -> int:
    """An id that a row never gives."""
    return min(set(range(VOCAB)) - set(ids))


def rows_stopping_at(places: Sequence[int], **options: Any) -> tuple[list[Request], Any]:
    """Rows with a stop id at a place of their output, and what they would give without it."""
    seeds, known = planted()
    rows = []
    for i, place in enumerate(places):
        stops = (absent(known[i]), known[i][place])
        rows.append(request(seeds[i], stop_ids=stops if i % 2 else stops[::-1], **options))
    return rows, known[: len(places)]


def test_a_row_ends_at_the_first_stop_id_of_a_burst():
    """SPC-15: at accepted index 0, 1, 2 of 3 drafts and as the bonus, both stop ids.

    Nothing is given after it, and the state is that of a run that never saw more.
    """
    # the first token comes from `begin`
    places = [1, 2, 3, 4] * 2
    requests, known = rows_stopping_at(places)
    play = Play(t0("share"), 3, requests)
    play.plant_known(known, [3] * len(places))
    burst = play.round()
    assert burst.count[: len(places)].tolist() == places
    assert play.ids == [ids[: at + 1] for ids, at in zip(known, places, strict=True)]
    assert play.reasons == [STOP] * len(places)
    assert not np.asarray(play.active).any()
    undrafted = Play(t0("share"), 3, requests, done=[ids[:-1] for ids in play.ids])
    assert undrafted.reasons == play.reasons
    assert_same_live(play.state, undrafted.state, range(len(places)))


def test_both_end_of_sequence_ids_of_a_model_end_a_row():
    """SPC-15: a list of ids, each ending the row whose burst has it first."""
    seeds, known = planted()
    pair = known[0][2], known[1][3]
    requests = [request(seeds[0]), request(seeds[1]), request(seeds[2], ignore_eos=True)]
    play = Play(t0("share"), 3, requests, eos_ids=pair)
    play.plant_known(known[:3], [3, 3, 3])
    play.round()

    def cut(ids: list[int]) -> list[int]:
        return ids[: 1 + min(i for i, token in enumerate(ids) if token in pair)]

    assert play.ids[:2] == [cut(known[0]), cut(known[1])]
    assert play.ids[2] == known[2][:5]
    assert play.reasons == [STOP, STOP, NONE]


def test_the_earliest_event_of_a_burst_ends_the_row():
    """SPC-16: room for 5 of 6 accepted tokens, and a stop at index 3, 4 and 5 of the burst."""
    places = [4, 5, 6]
    requests, known = rows_stopping_at(places, max_new_tokens=6)
    play = Play(t0("share_frozen"), 5, requests)
    play.plant_known(known, [5] * 3)
    burst = play.round()
    assert burst.accepted[:3].tolist() == [5] * 3
    assert burst.count[:3].tolist() == [4, 5, 5]
    assert play.ids == [known[0][:5], known[1][:6], known[2][:6]]
    assert play.reasons == [STOP, STOP, LENGTH]


@pytest.mark.parametrize("at", range(3))
def test_a_drafted_stop_id_is_verified(at: int):
    """SPC-17: the draft says the stop id, the target something else: the row goes on."""
    _, known = planted()
    rows = range(len(known))
    stops = [absent(ids) for ids in known]
    requests = [request(planted()[0][i], stop_ids=(stops[i],)) for i in rows]
    play = Play(t0("share"), 3, requests)
    play.plant_known(known, [3] * len(known))
    drafts = np.asarray(play.state.drafts)[: len(known)].copy()
    drafts[:, at] = stops
    play.plant(drafts.tolist())
    burst = play.round()
    assert burst.accepted[: len(known)].tolist() == [at] * len(known)
    assert not burst.finished.any()
    assert play.finish() == known
    assert set(play.reasons) == {LENGTH}


def test_a_chat_goes_on_from_the_state_of_a_stopped_row():
    """SPC-19: a stop at index 1 of 3, then the pending token and the next turn are fed."""
    requests, known = rows_stopping_at([2, 2, 3, 1])
    count = len(requests)
    play = Play(t0("share"), 3, requests)
    play.plant_known(known, [3] * count)
    play.round()
    assert play.reasons == [STOP] * count
    lengths = [len(r.prompt) + len(ids) - 1 for r, ids in zip(requests, play.ids, strict=True)]
    assert np.asarray(play.state.length)[:count].tolist() == lengths
    turns = [random_prompt(3 + i, seed=90 + i) for i in range(count)]
    hidden = play.feed({i: [play.ids[i][-1], *turns[i]] for i in range(count)})
    longer = [
        Request((*r.prompt, *ids, *turn), request(70).sampling)
        for r, ids, turn in zip(requests, play.ids, turns, strict=True)
    ]
    fresh = Play(t0("share"), 3, longer)
    play.ids = [[] for _ in range(count)]
    play.begin(hidden, controls_of(longer), range(count))
    assert play.ids == fresh.ids
    assert_same_live(play.state, fresh.state, range(count))
    _, of_prompts = fed(t0(), 3, [r.prompt for r in longer])
    got, want = (np.asarray(logits_of(t0(), h))[:count] for h in (hidden, of_prompts))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert play.finish() == fresh.finish() == plain(tuple(longer))


@pytest.mark.parametrize("limit", [32, CAPACITY])
@pytest.mark.parametrize("accepted", [0, 3, None])
def test_rows_end_at_the_longest_length(limit: int, accepted: int | None):
    """SPC-20: drafts may not reach past it, whether rejected, accepted, or the head's own.

    32 is a limit of the controls, the other one that of the pages too.
    """
    lengths = [limit - back for back in (4, 2, 1, 5, 6, 7)]
    requests = tuple(request(i, n, max_new_tokens=8) for i, n in enumerate(lengths))
    known = Play(t0(), 0, requests, max_length=limit).finish()
    assert [len(ids) for ids in known] == [4, 2, 1, 5, 6, 7]
    play = Play(t0("share"), 3, requests, max_length=limit)

    def plant(play: Play):
        if accepted is not None:
            play.plant_known(known, [accepted] * len(known))
        drafts = np.asarray(play.state.drafts)
        assert ((drafts >= 0) & (drafts < VOCAB)).all()

    assert play.finish(plant) == known
    assert set(play.reasons) == {LENGTH}
    assert int(np.asarray(play.state.length).max()) == limit - 1
    done = [ids[:-1] for ids in play.ids]
    undrafted = Play(t0("share"), 3, requests, done=done, max_length=limit)
    # a row that ended with its first token keeps the drafts that were planted
    assert_same_live(play.state, undrafted.state, range(len(known)), drafts=False)
