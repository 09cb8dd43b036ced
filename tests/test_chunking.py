"""A prompt fed in pieces leaves the logits and the state of a prompt fed at once."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax.pallas.ple import ngram_rows
from qwen4jax.state import reset_slots
from tests import tiny
from tests.tiny import (
    ROWS,
    T0,
    assert_close,
    assert_same_live,
    feed_pieces,
    feed_rows,
    live,
    new_state,
    plain,
    poison,
    prompt,
    split,
    t0,
)


def one_shot(ids):
    """Logits and live state of one prompt alone, in one step."""
    state, (logits,) = feed_rows(t0(), new_state(), [ids], width=tiny.LONG)
    assert_close(logits, plain(t0(), ids))
    return logits, live(state, 0)


def assert_splits_equal(ids, splits):
    want_logits, want = one_shot(ids)
    for at in range(0, len(splits), ROWS):
        some = splits[at : at + ROWS]
        state, logits = feed_pieces(t0(), new_state(), [split(ids, sizes) for sizes in some])
        for row, sizes in enumerate(some):
            assert_close(logits[row], want_logits, what=f"logits of {sizes}")
            assert_same_live(live(state, row), want)


def test_twelve_ids_in_every_way():
    """CHK-01: any split equals one shot in logits, conv, matrices, ids, n-gram conv and rings."""
    splits = [[12], [6, 6], [1] * 12, [3, 9], [9, 3], [11, 1], [2, 1, 4, 5], [4, 4, 4]]
    splits += [[cut, 12 - cut] for cut in range(1, 12)]
    assert_splits_equal(prompt(12), splits)


def test_a_first_piece_shorter_than_the_histories():
    """CHK-03: one, two or three ids first, and pieces that never reach the nine of the n-grams."""
    assert_splits_equal(
        prompt(29, seed=3), [[1, 14], [2, 13], [3, 12], [1, 1, 1, 13], [5] * 6, [8] * 4]
    )


@given(st.lists(st.integers(1, 16), min_size=1, max_size=12), st.integers(0, 99))
def test_any_chunking_equals_one_shot(sizes, seed):
    """CHK-01: as a law, to the end of what fits one shot."""
    ids = prompt(min(sum(sizes), tiny.LONG), seed)
    assert_splits_equal(ids, [sizes])


def test_the_state_after_a_piece_is_that_of_its_tokens():
    """CHK-01: so a state can be kept anywhere, not only at the end."""
    ids = prompt(21, seed=4)
    state = new_state()
    for start, end in ((0, 5), (5, 6), (6, 16), (16, 21)):
        state, _ = feed_rows(t0(), state, [ids[start:end]])
        assert_same_live(live(state, 0), one_shot(ids[:end])[1])


def test_a_chunk_of_nothing_but_padding():
    """CHK-02: the padding is left out of every chunk, the second included.

    Left pads of 0 and 7 in chunks of 4: row 1 has no token in the first, one in the second.
    """
    a, b = prompt(16, seed=1), prompt(9, seed=2)
    pieces = [split(a, [4, 4, 4, 4]), [(), *split(b, [1, 4, 4])]]
    state, logits = feed_pieces(t0(), new_state(), pieces)
    for row, ids in enumerate((a, b)):
        want, state_of_ids = one_shot(ids)
        assert_close(logits[row], want)
        assert_same_live(live(state, row), state_of_ids)


@pytest.mark.parametrize("fed", [0, 5])
def test_no_tokens_change_no_bit(fed):
    """CHK-02: an all-pad chunk leaves a row as it is, whatever stands in its places."""
    state = new_state()
    if fed:
        state, _ = feed_rows(t0(), state, [prompt(fed)])
    tokens = jnp.full((ROWS, tiny.WIDTH), 63, jnp.int32)
    after, _ = tiny.run(t0(), state, tokens, jnp.zeros(ROWS, jnp.int32))
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_the_first_ids_hash_behind_ends_of_sequence():
    """CHK-03: [5, 6] in a fresh slot; zeros in the place of the end of sequence fail."""
    fresh = new_state().ngram_ids[:1]

    def rows(history):
        ids = jnp.concatenate([history, jnp.asarray([[5, 6]], jnp.int32)], axis=1)
        return np.asarray(ngram_rows(ids, T0.ngram_hash(0), eos=1))[0].tolist()

    assert rows(fresh) == [[8, 17, 28, 58], [0, 22, 24, 51]]
    assert rows(jnp.zeros_like(fresh)) == [[0, 11, 36, 56], [0, 22, 37, 54]]


@pytest.mark.parametrize("left", [None, np.nan, np.inf])
@pytest.mark.parametrize("width", [tiny.WIDTH, 1])
def test_a_new_tenant_finds_nothing(left, width):
    """CHK-09: [5, 6, 7] after 40 other ids, or in a slot full of NaN, by chunk and by token."""
    state, _ = feed_pieces(t0(), new_state(), [split(prompt(40), [16, 16, 8])])
    if left is not None:
        state = poison(state, left)
    state = reset_slots(T0, state, jnp.arange(ROWS))
    ids = [5, 6, 7]
    pieces = split(ids, [width] * 3)
    state, (logits,) = feed_pieces(t0(), state, [pieces], width)
    want, after = one_shot(ids)
    assert_close(logits, want)
    assert_same_live(live(state, 0), after)


CONTINUE = """
from tests.test_chunking import eight_more_steps, restored, saved

state = restored("state.npz")
saved("restored.npz", state)
saved("after.npz", eight_more_steps(state))
"""


def saved(file, tree):
    np.savez(file, *(np.asarray(x) for x in jax.tree.leaves(tree)))


def restored(file):
    leaves = [jnp.asarray(x) for x in np.load(file).values()]
    return jax.tree.unflatten(jax.tree.structure(new_state()), leaves)


def eight_more_steps(state):
    """The state, the ids and the logits after eight greedy tokens."""
    tokens, found = [9], []
    for _ in range(8):
        state, (logits,) = feed_rows(t0(), state, [tokens[-1:]], width=1)
        tokens.append(int(logits[0].argmax()))
        found.append(logits[0])
    return state, np.array(tokens), np.stack(found)


def assert_same_bits(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_saved_state_goes_on_in_another_process(tmp_path: Path):
    """CHK-11: saved after 13 ids as bytes; every leaf bit-equal there, and 8 tokens later.

    Another process compiles another program (XLA's choices depend on the call stack it is told
    of), so its floats are held to rounding and the bits to the same program.
    """
    state, _ = feed_rows(t0(), new_state(), [prompt(13)])
    saved(tmp_path / "state.npz", state)
    subprocess.run(
        [sys.executable, "-W", "error", "-c", CONTINUE],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"},
    )
    assert_same_bits(list(np.load(tmp_path / "restored.npz").values()), state)
    want = eight_more_steps(state)
    assert_same_bits(eight_more_steps(restored(tmp_path / "state.npz")), want)
    found = np.load(tmp_path / "after.npz").values()
    for got, value in zip(found, jax.tree.leaves(want), strict=True):
        if np.issubdtype(value.dtype, np.integer):
            np.testing.assert_array_equal(got, value)
        else:
            assert_close(got, value)
