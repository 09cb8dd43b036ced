"""The round against plain decoding: the same tokens, and every state rolled back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.options import Sampling
from qwen4jax.decode.stopping import FinishReason
from qwen4jax.pallas.ple import ngram_rows
from qwen4jax.span import make_span
from qwen4jax.state import init_state, ring_size
from tests.decode.planted import (
    GREEDY,
    SLOTS,
    VOCAB,
    Play,
    Request,
    assert_same_live,
    drawn,
    golden,
    golden_prompts,
    plain,
    random_prompt,
    t0,
)

# drafts per round and how later draft steps select; one compiled program each
PROGRAMS = [(1, "fresh"), (3, "share"), (3, "fresh"), (5, "share_frozen")]


def of_planted(i: int) -> Request:
    """Every accepted count at every phase, greedy and drawn, sparse from 12 tokens on."""
    length = 5 + i // 6 % 4 + 4 * (i % 3)
    return Request(random_prompt(length, seed=i), GREEDY if i % 3 == 0 else drawn(i))


PLANTED = tuple(of_planted(i) for i in range(SLOTS))
FIXED = Sampling(temperature=0, max_new_tokens=16, ignore_eos=True)


def table_rows(history: list[int], token: int) -> list[int]:
    """Rows of the n-gram table that `token` reads after `history`."""
    config = t0().config
    ids = jnp.asarray([[*history, token]])
    return ngram_rows(ids, config.ngram_hash(0), eos=config.hash_eos_token_id)[0, -1].tolist()


@pytest.mark.parametrize(("drafts", "share"), [(0, "fresh"), *PROGRAMS])
def test_greedy_ids_are_those_of_plain_decoding(drafts: int, share):
    """On every golden prompt, all in one batch, with the draft head's own drafts."""
    play = Play(t0(share), drafts, [Request(prompt, FIXED) for prompt in golden_prompts()])
    assert play.finish() == [golden()[f"p{i}.greedy"].tolist() for i in range(len(play.ids))]
    assert set(play.reasons) == {FinishReason.LENGTH}


@pytest.mark.parametrize(("drafts", "share"), PROGRAMS)
def test_planted_drafts_leave_the_state_of_a_run_without_drafts(drafts: int, share):
    """SPC-01, SPC-04, SPC-05, SPC-23: every accepted count at every position modulo 4.

    Rows of one batch accept differently. After each round all live state equals that of a prefill
    of exactly the committed ids: hashes, convolutions, recurrent states, rings, keys, draft head;
    and so do the drafts made of it.
    """
    known, params = plain(PLANTED), t0(share)
    play = Play(params, drafts, PLANTED)
    seen = set()
    for number in range(drafts + 1):
        wrong = [(i + number) % (drafts + 1) for i in range(SLOTS)]
        phase = np.asarray(play.state.length) % 4
        play.plant_known(known, wrong)
        burst = play.round()
        assert burst.accepted.tolist() == wrong
        assert burst.count.tolist() == [n + 1 for n in wrong]
        assert play.ids == [k[: len(ids)] for k, ids in zip(known, play.ids, strict=True)]
        seen |= set(zip(wrong, phase.tolist(), strict=True))
        reference = Play(params, drafts, PLANTED, done=[ids[:-1] for ids in play.ids])
        assert reference.ids == play.ids
        assert_same_live(play.state, reference.state)
        counts = play.controls.output_counts, reference.controls.output_counts
        np.testing.assert_array_equal(*counts)
    assert seen == {(n, p) for n in range(drafts + 1) for p in range(4)}


@pytest.mark.parametrize(("drafts", "share"), [(0, "fresh"), *PROGRAMS])
def test_ids_depend_on_seed_and_prompt_alone(drafts: int, share):
    """In any position of the batch, with any companions, whatever is drafted."""
    known, rng = plain(PLANTED), np.random.default_rng(drafts)
    order = rng.permutation(SLOTS)
    of_order = [known[i] for i in order]

    def plant(play: Play):
        """Of each row a true continuation, one with an error, noise, or the head's own drafts."""
        own = np.asarray(play.state.drafts).tolist()
        play.plant_known(of_order, rng.integers(0, drafts + 1, SLOTS).tolist())
        true = np.asarray(play.state.drafts).tolist()
        noise = rng.integers(0, VOCAB, (SLOTS, drafts)).tolist()
        choice = rng.integers(0, 4, SLOTS)
        options = (true, true, noise, own)
        play.plant([options[choice[i]][i] for i in range(SLOTS)])

    play = Play(t0(share), drafts, [PLANTED[i] for i in order])
    assert play.finish(plant) == of_order


@pytest.mark.parametrize(("drafts", "share"), [(0, "fresh"), *PROGRAMS])
def test_ids_do_not_depend_on_companions(drafts: int, share):
    """A request alone, and beside longer ones, gives what it gave in a full batch."""
    known, i = plain(PLANTED), 4
    assert Play(t0(share), drafts, [PLANTED[i]]).finish() == [known[i]]
    others = [Request(prompt, drawn(50)) for prompt in golden_prompts()[10:]]
    play = Play(t0(share), drafts, [*others, PLANTED[i]])
    assert play.finish()[-1] == known[i]


def test_after_a_reject_the_next_id_hashes_with_committed_ids():
    """SPC-01: history [6, 7], 9 committed and 3 drafted: 4 hashes with (9, 7), not with (3, 9)."""
    play = Play(t0("share"), 3, [Request((6, 7))])
    play.state = play.state.replace(token=play.state.token.at[0].set(9))
    play.plant([(3, 10, 11)])
    assert play.round().accepted[0] == 0
    history = np.asarray(play.state.ngram_ids[0]).tolist()
    assert history == [7, 9]
    assert table_rows(history, 4) == table_rows([6, 7, 9], 4) != table_rows([9, 3], 4)


def test_after_a_rewind_the_next_id_hashes_with_its_history():
    """SPC-02: the literal rows of 8 after 5, 6, 7, whose drafts were rejected."""
    play = Play(t0("share"), 3, [Request((5, 6))])
    play.state = play.state.replace(token=play.state.token.at[0].set(7))
    # none of these follows
    play.plant([(0, 0, 0)])
    assert play.round().accepted[0] == 0
    history = np.asarray(play.state.ngram_ids[0]).tolist()
    assert table_rows(history, 8) == [8, 22, 40, 41]


@pytest.mark.parametrize("accepted", range(4))
def test_after_any_accept_the_next_id_hashes_with_its_history(accepted: int):
    """SPC-02: never with a history of end-of-sequence ids."""
    ids, eos = [*PLANTED[1].prompt, *plain(PLANTED)[1]], t0().config.hash_eos_token_id
    play = Play(t0("share"), 3, PLANTED)
    play.plant_known(plain(PLANTED), [accepted] * SLOTS)
    play.round()
    end = len(PLANTED[1].prompt) + 1 + accepted
    rows = table_rows(np.asarray(play.state.ngram_ids[1]).tolist(), ids[end])
    assert rows == table_rows(ids[:end], ids[end]) != table_rows([eos, eos], ids[end])


@pytest.mark.parametrize(
    ("ratio", "drafts", "size"), [(4, 0, 4), (4, 2, 8), (4, 6, 12), (8, 3, 16), (2, 1, 4)]
)
def test_a_ring_has_room_for_rejected_rows(ratio: int, drafts: int, size: int):
    """SPC-04."""
    assert ring_size(ratio, drafts) == size


def test_rows_of_a_round_miss_the_open_blocks_keys():
    """SPC-04: three drafts from any place of a block."""
    starts = range(8)
    state = init_state(t0().config, slots=8, max_length=16, page_size=8, drafts=3)
    make = jax.jit(make_span, static_argnums=(0, 4))
    span = make(t0().config, state, jnp.asarray(starts), jnp.full(8, 4), 4)
    size = state.rope_ring.shape[1]
    for start in starts:
        committed = {i % size for i in range(start // 4 * 4, start)}
        written = set(np.asarray(span.ring[start]).tolist())
        assert len(written) == 4
        assert not written & (committed | {size})
