"""Rows beside each other: one that fails, one that is not there, one whose drafts are taken."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.options import Sampling
from qwen4jax.decode.prefill import decode_token, prefill_chunk
from qwen4jax.decode.round import begin_slots, run_round
from qwen4jax.decode.stopping import FinishReason, synthetic_accept
from qwen4jax.state import AttentionCache, reset_slots
from tests.decode.planted import (
    CHUNK,
    SLOTS,
    VOCAB,
    Play,
    Request,
    assert_same_live,
    controls_of,
    drawn,
    live,
    plain,
    random_prompt,
    t0,
)

ERROR, NONE = FinishReason.ERROR, FinishReason.NONE
ROWS = tuple(Request(random_prompt(5 + i, seed=i), drawn(i)) for i in range(SLOTS))


def spoiled(state: Any, slot: int) -> Any:
    """NaN in the recurrent state of the first layer."""
    first = state.layers[0]
    spoilt = first.replace(recurrent=first.recurrent.at[slot].set(jnp.nan))
    return state.replace(layers=(spoilt, *state.layers[1:]))


def test_a_row_without_finite_logits_ends_alone():
    """ERROR in its own row; the others go on as if it were not there, and its slot serves again."""
    known, bad = plain(ROWS), 5
    play = Play(t0("share"), 3, ROWS)
    play.plant_known(known, [i % 4 for i in range(SLOTS)])
    play.round()
    given = [len(ids) for ids in play.ids]
    play.state = spoiled(play.state, bad)
    play.plant_known(known, [(i + 1) % 4 for i in range(SLOTS)])
    burst = play.round()
    assert play.reasons == [ERROR if i == bad else NONE for i in range(SLOTS)]
    assert burst.count[bad] == 0
    others = [i for i in range(SLOTS) if i != bad]
    undrafted = Play(t0("share"), 3, ROWS, done=[ids[:-1] for ids in play.ids])
    assert_same_live(play.state, undrafted.state, others)
    play.finish()
    assert [play.ids[i] for i in others] == [known[i] for i in others]
    assert play.ids[bad] == known[bad][: given[bad]]

    # NaN is in the slot's pages too
    play.state = reset_slots(play.params.config, play.state, jnp.asarray([bad]))
    hidden = play.feed({bad: ROWS[0].prompt})
    play.ids[bad] = []
    play.begin(hidden, controls_of([ROWS[0]] * SLOTS), [bad])
    assert play.finish()[bad] == known[0]


def test_a_row_that_fails_inside_a_burst_keeps_a_sound_state():
    """The third of four verified tokens is NaN: what is given stands, and the state is of that.

    The delta rule multiplies all rows of a burst, so that NaN reaches the rows before it: they may
    fail too, and the row then ends without the tokens before.
    """
    few = ROWS[:6]
    known, rows = plain(few), range(len(few))
    # one row's third token is in no other burst
    bad = next(
        i
        for i in rows
        if known[i][2] not in known[i][:2]
        and not any(known[i][2] in known[j][:5] for j in rows if j != i)
    )
    play = Play(t0("share"), 3, few)
    play.plant_known(known, [3] * len(few))
    embedding = t0().embed_tokens.at[known[bad][2]].set(jnp.nan)
    play.params = play.params.replace(embed_tokens=embedding)
    burst = play.round()
    assert play.reasons == [ERROR if i == bad else NONE for i in rows]
    assert all(burst.count[i] == (4 if i != bad else min(burst.count[i], 2)) for i in rows)
    assert play.ids == [ids[: len(given)] for ids, given in zip(known, play.ids, strict=True)]
    undrafted = Play(t0("share"), 3, few, done=[ids[:-1] for ids in play.ids])
    ours, theirs = live(play.state, bad), live(undrafted.state, bad)
    # the draft head's last row has the token that fails, if that is the pending one
    for name in (name for name in theirs if not name.startswith("mtp")):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4, err_msg=name)
    # drafts aside: the token may be one of them
    others = [i for i in rows if i != bad]
    assert_same_live(play.state, undrafted.state, others, drafts=False)


def with_nan(state: Any, slots: np.ndarray) -> Any:
    """Every float that belongs to `slots`, their pages included, replaced by NaN."""
    pages = state.page_table[slots].reshape(-1)

    def spoil(x: Any, where: Any) -> Any:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return x.at[where].set(jnp.nan) if floating else x

    def attention(cache: AttentionCache) -> AttentionCache:
        return AttentionCache(
            key=spoil(cache.key, pages),
            value=spoil(cache.value, pages),
            index_key=spoil(cache.index_key, pages),
            ring=spoil(cache.ring, slots),
        )

    def layer(cache: Any) -> Any:
        if isinstance(cache, AttentionCache):
            return attention(cache)
        return jax.tree.map(lambda x: spoil(x, slots), cache)

    return state.replace(
        residual=spoil(state.residual, slots),
        layers=tuple(layer(cache) for cache in state.layers),
        ple=tuple(spoil(x, slots) for x in state.ple),
        mtp=attention(state.mtp),
    )


def bits(state: Any, slots: np.ndarray) -> list[np.ndarray]:
    """Every bit that belongs to `slots`."""
    pages = np.asarray(state.page_table)[slots].reshape(-1)
    count, table = state.layers[-1].key.shape[0], np.asarray(state.page_table)
    assert count == table.size
    leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
    return [x[pages if len(x) == count else slots].view(np.int32) for x in leaves]


@pytest.mark.parametrize("fill", [False, True], ids=["live", "nan"])
def test_rows_that_do_not_run_keep_every_bit(fill: bool):
    """In rounds, chunks, `begin` and plain decoding; the others run as if they were alone."""
    known = plain(ROWS)
    idle, running = np.arange(1, SLOTS, 2), np.arange(0, SLOTS, 2)
    play = Play(t0("share"), 3, ROWS)
    if fill:
        play.state = with_nan(play.state, idle)
    play.active = play.active & (jnp.arange(SLOTS) % 2 == 0)
    before = bits(play.state, idle)

    def unchanged() -> bool:
        return all(map(np.array_equal, before, bits(play.state, idle)))

    counts = np.asarray(play.controls.output_counts)[idle]
    for number in range(2):
        play.plant_known(known, [(i // 2 + number) % 4 for i in range(SLOTS)])
        # planting wrote into the idle rows too
        before = bits(play.state, idle)
        burst = play.round()
        assert not burst.count[idle].any()
        assert not burst.accepted[idle].any()
        assert not burst.finished[idle].any()
        assert unchanged()
    np.testing.assert_array_equal(np.asarray(play.controls.output_counts)[idle], counts)
    state, _ = decode_token(t0(), jax.tree.map(jnp.copy, play.state), play.state.token, play.active)
    assert all(map(np.array_equal, before, bits(state, idle)))
    play.finish()
    assert unchanged()
    assert [play.ids[i] for i in running] == [known[i] for i in running]


def test_rows_of_a_slot_number_past_the_last_are_dropped():
    """In `prefill_chunk` and `begin_slots`, whatever stands in them, where slots hold NaN."""
    play = Play(t0("share"), 3, ROWS[:2])
    everything = np.arange(SLOTS)
    play.state = with_nan(play.state, everything[4:])
    before = bits(play.state, everything)
    null = jnp.full(SLOTS, SLOTS, jnp.int32).at[3:].add(7)
    tokens, full = jnp.full((SLOTS, CHUNK), 9, jnp.int32), jnp.full(SLOTS, CHUNK, jnp.int32)
    state, hidden = prefill_chunk(t0(), play.state, null, tokens, full)
    assert all(map(np.array_equal, before, bits(state, everything)))
    counts = np.asarray(play.controls.output_counts)
    state, controls, burst = begin_slots(play.params, state, play.controls, hidden, null)
    assert all(map(np.array_equal, before, bits(state, everything)))
    np.testing.assert_array_equal(controls.output_counts, counts)
    assert not np.asarray(burst.count).any()
    assert not np.asarray(burst.finished).any()
    # one row of a chunk is there, that of the slot which a clipped number would hit
    last = SLOTS - 1
    slots = jnp.full(SLOTS, SLOTS, jnp.int32).at[1].set(last)
    row = jnp.zeros((SLOTS, CHUNK), jnp.int32).at[1, :5].set(jnp.asarray(ROWS[0].prompt))
    play.state = reset_slots(play.params.config, state, jnp.asarray([last]))
    state, hidden = prefill_chunk(t0(), play.state, slots, row, full.at[1].set(5))
    alone = Play(t0("share"), 3, ROWS[:1])
    state, _, burst = begin_slots(play.params, state, controls_of([ROWS[0]] * SLOTS), hidden, slots)
    assert int(burst.tokens[1, 0]) == alone.ids[0][0]
    assert_same_live(state, alone.state, [last], [0])


def test_synthetic_acceptance_takes_the_drafts_as_they_are():
    """The given number stands whatever was sampled, and the state is that of those tokens."""
    greedy = tuple(Request(r.prompt, Sampling(temperature=0, max_new_tokens=20)) for r in ROWS)
    play = Play(t0("share"), 3, greedy)
    emitted = [list(ids) for ids in play.ids]
    for number in range(3):
        drafts = np.random.default_rng(number).integers(2, VOCAB, (SLOTS, 3))
        play.plant(drafts.tolist())
        accepted = synthetic_accept(2.6, 5, number, jnp.arange(SLOTS), 3)
        assert set(np.asarray(accepted).tolist()) == {1, 2}
        play.state, play.controls, play.active, burst = run_round(
            play.params, play.state, play.controls, play.active, accepted
        )
        np.testing.assert_array_equal(burst.accepted, accepted)
        np.testing.assert_array_equal(burst.count, accepted + 1)
        for i, ids in enumerate(emitted):
            took = int(accepted[i])
            assert np.asarray(burst.tokens)[i, :took].tolist() == drafts[i, :took].tolist()
            ids += np.asarray(burst.tokens)[i, : took + 1].tolist()
        undrafted = Play(t0("share"), 3, greedy, done=[ids[:-1] for ids in emitted])
        assert undrafted.ids == emitted
        assert_same_live(play.state, undrafted.state)
