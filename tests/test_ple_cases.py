"""Rows of the case list on n-gram hashing: constants, ends of sequence, 64 bits, context."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.config import Config
from qwen4jax.decode.prefill import logits_of, prefill_chunk
from qwen4jax.forward_pass import forward
from qwen4jax.hf_fields import ConfigError
from qwen4jax.pallas.ple import ngram_rows
from qwen4jax.pallas.ple.cases import SMALL_HASH
from qwen4jax.state import take_slots
from tests.oracle import ngram_rows as exact_rows
from tests.test_config import RAW
from tests.tiny import (
    ROWS,
    T0,
    assert_close,
    assert_same_live,
    exact,
    feed_rows,
    live,
    new_state,
    prompt,
    t0,
)

REAL = Config.flash_next()
REAL_EOS = 248044


def rows_of(ids, hash=SMALL_HASH, eos=1):
    """Table rows of each of `ids` at the start of a document."""
    start = [eos] * (hash.ngram_size - 1)
    return np.asarray(ngram_rows(jnp.asarray([[*start, *ids]], jnp.int32), hash, eos=eos))[
        0
    ].tolist()


def real_rows(ids):
    return rows_of(ids, REAL.ngram_hash(0), REAL_EOS)


def test_constants_of_the_released_hash():
    """PLE-01: multipliers, primes, offsets and rows, which checkpoints hold as well."""
    hash = REAL.ngram_hash(0)
    assert hash.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert hash.head_sizes[0] == 20000003
    assert hash.head_sizes[-1] == 20000171
    assert len(hash.head_sizes) == 16
    assert sum(hash.head_sizes) == 320001446
    assert hash.rows == 320001536
    assert hash.head_offsets[-1] == 300001275
    small = T0.ngram_hash(0)
    assert small == SMALL_HASH
    assert small.multipliers == (112381549946653559, 107512210695146523, 55314113489879299)
    assert (small.head_sizes, small.head_offsets) == ((11, 13, 17, 19), (0, 11, 24, 41))
    assert small.rows == 60


def test_products_of_64_bits():
    """PLE-01: 32-bit products give ids in range, all of them wrong."""
    want = [6129193, 20484628, 57667260, 77728366, 86357215, 109234597, 123551585, 149309416]
    want += [172664702, 184433127, 201501905, 227445817, 243341740, 279238932, 284538191, 311036336]
    assert real_rows([100, 200, 300])[-1] == want
    hash = REAL.ngram_hash(0)
    short = [m & 0xFFFFFFFF for m in hash.multipliers]
    mixed = (300 * short[0] ^ 200 * short[1]) & 0xFFFFFFFF
    assert (mixed - 2**32) % hash.head_sizes[0] == 18946688


OF_THREE = (
    "1531522 26458325 48967948 72533165 95637132 116681687 138257734 140376286 "
    "167316121 196780774 201192701 239730030 244538402 269354175 284294431 319007479"
)
OF_ONE = (
    "768795 32189829 51641306 71063218 85886852 104959504 134316676 154856127 "
    "173280301 194832882 202840854 222492280 256138797 271010889 296240796 304432235"
)


@pytest.mark.parametrize(("ids", "want"), [([1000, 2000, 3000], OF_THREE), ([0], OF_ONE)])
def test_vectors_of_the_specification(ids, want):
    """PLE-01: the (token, previous, one before) of spec section 5.2 reads backwards here."""
    assert real_rows(ids[::-1])[-1] == [int(row) for row in want.split()]


def test_the_family_of_the_hash():
    """PLE-02: XOR of odd multiples, primes per head."""
    assert rows_of([5, 6, 7, 8]) == [
        [8, 17, 28, 58],
        [0, 22, 24, 51],
        [3, 23, 37, 50],
        [8, 22, 40, 41],
    ]


def test_nothing_crosses_an_end_of_sequence():
    """PLE-03: seen in the trigram heads of the first id after it only."""
    assert rows_of([5, 6, 1, 7])[-1] == [3, 23, 38, 51]
    without = rows_of([5, 6, 1, 7], eos=0)
    assert without[-1][3] == 56
    assert without[-1][:2] == [3, 23]
    got = real_rows([100, 200, REAL_EOS, 300])[-1]
    other = rows_of([100, 200, REAL_EOS, 300], REAL.ngram_hash(0), eos=0)[-1]
    assert got[:8] == other[:8]
    assert got[8:10] == [164417016, 186620958]
    assert other[8:10] == [164311697, 193843931]
    # the end itself still sees what it ends
    assert rows_of([5, 6, 1])[-1] != rows_of([1])[-1]


def test_the_first_end_of_sequence_resets():
    """PLE-04: of a list the first; the chat's end stops a reply and is an ordinary id here."""
    config = Config.flash_next(eos_token_id=(REAL_EOS, 248046))
    assert config.hash_eos_token_id == REAL_EOS
    assert REAL.hash_eos_token_id == REAL_EOS
    got = rows_of([100, 200, 248046, 300], config.ngram_hash(0), config.hash_eos_token_id)[-1]
    assert got[:2] == [6010874, 20034230]
    reset = rows_of([100, 200, 248046, 300], config.ngram_hash(0), 248046)[-1]
    assert got[8:] != reset[8:]
    text = Config.from_dict({"text_config": RAW | {"eos_token_id": 1}})
    assert text.hash_eos_token_id == 1
    for empty in ([], None):
        with pytest.raises(ConfigError, match=r"^eos_token_id: .* is not one or more ids"):
            Config.from_dict(RAW | {"eos_token_id": empty})


def test_the_choice_of_pad_has_no_effect():
    """PLE-05: [5, 6, 7] behind three pads of id 0 and of id 63, bit for bit, and like none."""
    found = []
    mask = np.array([[0, 0, 0, *[1] * 3, *[0] * 10]])
    for pad in (0, 63, 1):
        tokens = np.full((1, 16), pad)
        tokens[0, 3:6] = (5, 6, 7)
        found.append(np.asarray(forward(t0(), tokens, mask=mask)))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert_close(found[0][0, 3:6], exact(t0(), [5, 6, 7]))


def test_the_context_follows_the_slot():
    """PLE-07: rows in another order than their slots, and a row that is not there."""
    state, _ = feed_rows(t0(), new_state(), [[3, 4, 5], [30]])
    order = jnp.asarray([1, 0, ROWS])
    contexts = np.asarray(take_slots(state, order).ngram_ids)
    assert contexts[:2].tolist() == [[1, 30], [4, 5]]
    assert np.asarray(state.ngram_ids)[2:].tolist() == [[1, 1]] * 2
    kept = [live(state, slot) for slot in (2, 3)]
    tokens = np.zeros((3, 16), np.int32)
    tokens[:2, 0], tokens[2] = (31, 6), 63
    after, hidden = prefill_chunk(t0(), state, order, jnp.asarray(tokens), jnp.asarray([1, 1, 16]))
    logits = np.asarray(logits_of(t0(), hidden))
    assert_close(logits[0], exact(t0(), [30, 31])[-1])
    assert_close(logits[1], exact(t0(), [3, 4, 5, 6])[-1])
    for slot, before in zip((2, 3), kept, strict=True):
        assert_same_live(live(after, slot), before, tolerance=0)
    # then slot 0 alone
    assert np.asarray(take_slots(after, jnp.asarray([0])).ngram_ids).tolist() == [[5, 6]]


def test_prefill_and_decode_rows_do_not_share_context():
    """PLE-08: one id, four ids and one id in a step equal three steps of one row."""
    past = [prompt(7, 1), (), prompt(9, 2)]
    state, _ = feed_rows(t0(), new_state(), past)
    new = [[12], [13, 1, 14, 15], [16]]
    after, logits = feed_rows(t0(), state, new)
    for row, ids in enumerate(new):
        alone: list[Any] = [()] * ROWS
        alone[row] = ids
        single, found = feed_rows(t0(), state, alone)
        assert_close(logits[row], found[row])
        assert_same_live(live(after, row), live(single, row))
        want = exact(t0(), [*past[row], *ids])[len(past[row]) :]
        assert_close(logits[row], want)


OUT_OF_RANGE = [-1, 64, 2 * 248320, 2**31, 2**32 + 5, 2**63 - 1]


@pytest.mark.parametrize("id", OUT_OF_RANGE)
def test_ids_out_of_range_are_refused(id):
    """PLE-14: named by row and place before anything is computed; the next call works."""
    with pytest.raises(ValueError, match=rf"^tokens\[1, 2\]: id {id} is not in \[0, 64\)$"):
        forward(t0(), [[5, 6, 7], [5, 6, id]])


def test_the_hash_of_any_word_stays_in_the_table():
    """PLE-14: ids that got past the edge give no negative row and none past the table's end."""
    ids = [-1, 2 * 248320, 2**31 - 1, -(2**31), 5, 248319]
    rows = np.array(real_rows(ids))
    assert rows.min() >= 0
    assert rows.max() < REAL.ngram_hash(0).rows
    hash = REAL.ngram_hash(0)
    for head, (size, offset) in enumerate(zip(hash.head_sizes, hash.head_offsets, strict=True)):
        assert ((rows[:, head] >= offset) & (rows[:, head] < offset + size)).all()
    fine = [5, 248319, 0, 248318]
    np.testing.assert_array_equal(real_rows(fine), exact_rows(fine, hash, REAL_EOS))
