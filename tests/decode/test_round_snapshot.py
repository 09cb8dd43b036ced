"""A burst that is cut afterwards: restored from before its round, and fed what stays."""

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.snapshot import restore, restore_and_replay, take_snapshot
from tests.decode.planted import (
    CAPACITY,
    CHUNK,
    SLOTS,
    Play,
    Request,
    assert_same_live,
    controls_of,
    drawn,
    plain,
    random_prompt,
    t0,
)

ROWS = tuple(Request(random_prompt(6 + i % 9, seed=i), drawn(i)) for i in range(SLOTS))
EVERY = jnp.arange(SLOTS)


def rounds(play: Play, known: list[list[int]], number: int) -> None:
    for _ in range(number):
        play.plant_known(known, [3] * SLOTS)
        play.round()


@pytest.mark.parametrize("number", [1, 2], ids=["a burst late", "two bursts late"])
def test_a_row_cut_inside_a_burst_goes_on_as_if_it_had_ended_there(number: int):
    """Every place of the burst, at every phase of the position modulo 4.

    The state is that of a run that never drafted, and so is what is sampled next.
    """
    known = plain(ROWS)
    play = Play(t0("share"), 3, ROWS)
    rounds(play, known, 1)
    snapshot = take_snapshot(play.state, EVERY)
    before = [len(ids) for ids in play.ids]
    rounds(play, known, number)
    assert [len(ids) for ids in play.ids] == [n + 4 * number for n in before]
    # the pending token and up to all tokens of the bursts but the last
    stay = [n + i // 4 % (4 * number) for i, n in enumerate(before)]
    kept = [ids[n - 1 : end] for ids, n, end in zip(known, before, stay, strict=True)]
    play.state, hidden = restore_and_replay(t0(), play.state, snapshot, kept, chunk=CHUNK)
    done = [ids[:end] for ids, end in zip(known, stay, strict=True)]
    undrafted = Play(t0("share"), 3, ROWS, done=done)
    play.ids = [list(ids) for ids in done]
    play.begin(hidden, controls_of(ROWS, done), range(SLOTS))
    assert play.ids == undrafted.ids == [k[: end + 1] for k, end in zip(known, stay, strict=True)]
    assert_same_live(play.state, undrafted.state)
    assert play.finish() == known


def test_other_rows_keep_what_they_have():
    """Two slots go back and run again; the others do not notice."""
    known = plain(ROWS)
    play, other = Play(t0("share"), 3, ROWS), Play(t0("share"), 3, ROWS)
    rounds(play, known, 1)
    chosen = [3, 8]
    snapshot = take_snapshot(play.state, jnp.asarray(chosen))
    given = [len(ids) for ids in play.ids]
    rounds(play, known, 1)
    play.state = restore(play.state, snapshot)
    rounds(other, known, 1)
    assert_same_live(play.state, other.state, chosen)
    # they may run on from there
    for slot in chosen:
        del play.ids[slot][given[slot] :]
    play.controls = controls_of(ROWS, play.ids)
    rounds(other, known, 1)
    rest = [i for i in range(SLOTS) if i not in chosen]
    assert_same_live(play.state, other.state, rest)
    assert play.finish() == other.finish() == known


def test_tokens_that_cannot_be_kept_are_named_before_anything_changes():
    play = Play(t0("share"), 3, ROWS)
    snapshot = take_snapshot(play.state, jnp.asarray([0, 1]))
    first, second = play.ids[0][0], play.ids[1][0]
    for kept, message in (
        ([[first], [second + 1]], r"kept\[1\]: does not begin with the pending token"),
        ([[], [second]], r"kept\[0\]: does not begin with the pending token"),
        ([[first], [second] * CAPACITY], rf"kept\[1\]: {CAPACITY} tokens after 7 do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            restore_and_replay(t0(), play.state, snapshot, kept)
    # not donated
    assert np.asarray(play.state.length).tolist() == [len(r.prompt) for r in ROWS]
