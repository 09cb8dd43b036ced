"""Rows of the case list on long context: edges of the range, and a small model with a long one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.config import LINEAR, SPARSE
from qwen4jax.decode.prefill import decode_token, feed, logits_of, prefill, prefill_chunk
from qwen4jax.forward_pass import forward
from qwen4jax.layers.capture import Capture
from qwen4jax.model import head
from qwen4jax.span import rope_table
from qwen4jax.state import abstract_state, assign_pages, init_state, reset_slots
from tests import tiny
from tests.oracle import Oracle
from tests.tiny import (
    ROWS,
    T0,
    assert_close,
    assert_same_live,
    exact,
    feed_pieces,
    feed_rows,
    live,
    new_state,
    poison,
    prompt,
    random_params,
    split,
    t0,
)

# two layers, a budget of 64 tokens, positions to 32768
LONG = T0.replace(
    num_hidden_layers=2,
    layer_types=(LINEAR, SPARSE),
    ple_layer_ids=(1,),
    indexer_budget=64,
    max_position_embeddings=32768,
    mtp_num_hidden_layers=0,
)
RELEASED_RANGE = T0.replace(max_position_embeddings=262144)
CHUNK = 512


@functools.cache
def long_params():
    return random_params(LONG, seed=5)


def long_state(length=25_088):
    return init_state(LONG, slots=1, max_length=length, drafts=0)


@pytest.mark.parametrize("length", [262143, 262144, 262145])
def test_the_trained_range_ends_somewhere(length):
    """LNG-01: a slot of 262,144 tokens may be asked for, one of 262,145 is refused by name."""
    if length <= 262144:
        state = abstract_state(RELEASED_RANGE, slots=1, max_length=length)
        assert state.capacity == 262144
    else:
        with pytest.raises(ValueError, match=r"^max_length: 262145 is not in 1\.\.262144"):
            abstract_state(RELEASED_RANGE, slots=1, max_length=length)
        with pytest.raises(ValueError, match=r"^tokens: 262145 positions are over max_position"):
            forward(random_params(RELEASED_RANGE), np.zeros((1, length), np.int32))


def compilations(jitted: Any) -> int:
    return jitted._cache_size()


def edge_state(length, page_size=64):
    config = T0.replace(max_position_embeddings=length)
    params = t0().replace(config=config)
    return params, new_state(config, max_length=length, page_size=page_size)


@pytest.mark.parametrize(
    ("fed", "more", "fits"), [(63, 1, True), (64, 0, True), (63, 2, False), (64, 1, False)]
)
def test_one_past_the_end_is_refused(fed, more, fits):
    """LNG-02: of 64 places 63 and 1 are served and 64 and none; one more is refused, unfed."""
    params, state = edge_state(64)
    ids = prompt(66).tolist()
    state, hidden = prefill(params, state, [ids[:fed]], [0], chunk=64)
    assert int(state.length[0]) == fed
    if not more:
        assert_close(logits_of(params, hidden)[0], exact(params, ids[:fed])[-1])
    elif fits:
        state, hidden = prefill(params, state, [ids[fed : fed + more]], [0], chunk=64)
        assert_close(logits_of(params, hidden)[0], exact(params, ids[: fed + more])[-1])
    else:
        message = rf"^prompts\[0\]: {more} tokens after {fed} do not fit a slot of 64$"
        with pytest.raises(ValueError, match=message):
            prefill(params, state, [ids[fed : fed + more]], [0], chunk=64)
        assert int(state.length[0]) == fed


def test_pages_do_not_stretch_the_range():
    """LNG-04: 16 positions in pages that have room for 64; 14 ids and 8 more do not fit."""
    params, state = edge_state(16)
    assert state.capacity == 64
    ids = prompt(22).tolist()
    with pytest.raises(ValueError, match=r"^prompts\[0\]: 22 tokens after 0 do not fit .* of 16$"):
        prefill(params, state, [ids], [0], chunk=64)
    with pytest.raises(ValueError, match=r"^max_length: 22 is not in 1\.\.16"):
        abstract_state(params.config, slots=1, max_length=22)
    with pytest.raises(ValueError, match=r"22 positions are over max_position_embeddings=16$"):
        forward(params, [ids])
    # angles come from no table that could be too short
    positions = jnp.arange(16)[:, None].repeat(3, axis=1)
    for got, want in zip(
        rope_table(params.config, positions), rope_table(T0, positions), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_a_long_prompt_with_and_without_jit():
    """LNG-05: 25,000 ids with four markers, then 64 steps; ids and state equal."""
    params = long_params()
    ids = prompt(25_000, vocab=60)
    marks = [2_000, 9_001, 16_002, 24_003]
    ids[marks] = [60, 61, 62, 63]
    state, hidden = prefill(params, long_state(), [ids.tolist()], [0], chunk=CHUNK)
    last = np.asarray(logits_of(params, hidden))[0]
    one, active = jnp.ones(1, jnp.int32), jnp.asarray([True])

    eager_state, token, expected, chosen = state, int(last.argmax()), [], None
    with jax.disable_jit():
        for _ in range(64):
            taps = Capture(("layer01.indexer.selected",))
            now = jnp.asarray([[token]])
            eager_state, out = feed(params, eager_state, now, one, capture=taps)
            token = int(head(params, out)[0, 0].argmax())
            expected.append(token)
            (chosen,) = taps.values.values()
    kept = np.asarray(chosen)[0, 0]
    # the last query is token 25,063: its own block is complete, so there is no tail
    assert (kept >= 0).sum() == 64
    assert kept.max() <= 25_063
    # the selection is of the whole range, not of its end or its beginning
    assert kept.min() < 8_000
    assert np.unique(kept[kept >= 0] // 4_000).size >= 4

    # the two states share arrays, which a jitted step takes over
    want = live(eager_state, 0)
    token, found = int(last.argmax()), []
    for _ in range(64):
        state, logits = decode_token(params, state, jnp.asarray([token]), active)
        token = int(logits[0].argmax())
        found.append(token)
    assert found == expected
    assert_same_live(live(state, 0), want)


def test_a_chunk_edge_at_8192():
    """CHK-13: 8,193 ids, chunks on and off: the two arms decide, not what they say."""
    params = long_params()
    ids = prompt(8_193, seed=13).tolist()
    arms = []
    for chunk in (CHUNK, 8_193):
        state, hidden = prefill(params, long_state(8_256), [ids], [0], chunk=chunk)
        logits = np.asarray(logits_of(params, hidden))[0]
        found, tokens = [logits], []
        for _ in range(8):
            tokens.append(int(found[-1].argmax()))
            now, active = jnp.asarray([tokens[-1]]), jnp.asarray([True])
            state, logits = decode_token(params, state, now, active)
            found.append(np.asarray(logits)[0])
        arms.append((np.stack(found), tokens))
    assert_close(arms[0][0], arms[1][0])
    assert arms[0][1] == arms[1][1]


def test_lengths_around_a_chunk():
    """LNG-10: chunk - 1 to chunk + 512 take one compiled path, sparse in every one of them."""
    params = long_params()
    lengths = [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 511, CHUNK + 512]
    ids = prompt(lengths[-1], seed=10).tolist()
    want = Oracle(params).logits(ids)
    dense = Oracle(params, dense=True).logits(ids)
    compiled = []
    for length in lengths:
        _, hidden = prefill(params, long_state(), [ids[:length]], [0])
        got = np.asarray(logits_of(params, hidden))[0]
        assert_close(got, want[length - 1], 2e-5, f"{length} ids")
        assert got.argmax() == want[length - 1].argmax()
        assert np.abs(got - dense[length - 1]).max() > 1e-3
        compiled.append(compilations(prefill_chunk))
    assert len(set(compiled)) == 1


def test_a_cache_with_holes():
    """LNG-07: 96 tokens in three slots, the middle third freed and filled again in other pages."""
    state = init_state(T0, **tiny.SIZES, contiguous=False)

    def pages(*numbers):
        return jnp.asarray([*numbers, *[-1] * (8 - len(numbers))], jnp.int32)

    tenants = [prompt(32, seed=70 + slot) for slot in range(3)]
    for slot in range(3):
        state = assign_pages(state, slot, pages(*range(4 * slot, 4 * slot + 4)))
    state = reset_slots(T0, poison(state, np.nan), jnp.arange(ROWS))
    state, _ = feed_pieces(t0(), state, [split(ids, [16, 16]) for ids in tenants])
    # the middle third goes; its pages come back out of order, with new ones between them
    state = assign_pages(reset_slots(T0, state, jnp.asarray([1])), 1, pages(6, 20, 4, 31, 7))
    new = prompt(31, seed=79)
    state, (_, found) = feed_pieces(t0(), state, [[], split(new, [16, 15])])
    assert_close(found, exact(t0(), new))
    compact, _ = feed_pieces(t0(), new_state(), [split(new, [16, 15])])
    ids = list(new)
    # over the edge of a page, of a block and of the table's hole
    for _ in range(6):
        ids.append(int(found[-1].argmax()))
        state, (_, found) = feed_rows(t0(), state, [(), ids[-1:]], width=1)
        compact, _ = feed_rows(t0(), compact, [ids[-1:]], width=1)
        assert_close(found[-1], exact(t0(), ids)[-1])
        assert_same_live(live(state, 1), live(compact, 0))
    for slot in (0, 2):
        alone, _ = feed_pieces(t0(), new_state(), [split(tenants[slot], [16, 16])])
        assert_same_live(live(state, slot), live(alone, 0))
