"""Padding, batches and ragged rows: nothing of a neighbour or of a pad reaches a row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.prefill import decode_token, prefill_chunk
from qwen4jax.forward_pass import forward
from qwen4jax.model import step
from qwen4jax.span import make_span
from qwen4jax.state import assign_pages, init_state, reset_slots, take_slots
from tests import tiny
from tests.planted_index import at_block, edit_cache, plant, planted_queries
from tests.tiny import (
    ROWS,
    T0,
    assert_close,
    assert_plain,
    assert_same_live,
    exact,
    feed_pieces,
    feed_rows,
    greedy,
    live,
    new_state,
    poison,
    prompt,
    split,
    t0,
)


def padded(rows, width, pad=0):
    """Rows of (left pads, ids) in `width` places, and their mask."""
    tokens, mask = np.full((len(rows), width), pad), np.zeros((len(rows), width), int)
    for row, (left, ids) in enumerate(rows):
        tokens[row, left : left + len(ids)] = ids
        mask[row, left : left + len(ids)] = 1
    return tokens, mask


@pytest.mark.parametrize("pad", [0, 1])
def test_left_pads_do_not_leak(pad):
    """PAD-01: [5, 6, 7] behind any number of pads, alone and beside a row of 15."""
    ids, other = [5, 6, 7], prompt(15)
    want = np.asarray(forward(t0(), [ids]))[0]
    assert_close(want, exact(t0(), ids))
    for left in (0, 1, 2, 3, 4, 9, 12):
        tokens, mask = padded([(left, ids)], 16, pad)
        alone = np.asarray(forward(t0(), tokens, mask=mask))
        assert_close(alone[0, left : left + 3], want, what=f"{left} pads")
        tokens, mask = padded([(left, ids), (1, other)], 16, pad)
        both = np.asarray(forward(t0(), tokens, mask=mask))
        assert_close(both[0, left : left + 3], want, what=f"{left} pads in company")
        assert_close(both[1, 1:], exact(t0(), other))
        assert not both[mask == 0].any()


def test_pads_are_no_candidates_of_the_selection():
    """PAD-02: a row behind 24 pads, with a pad embedding of 100 times the size."""
    params = t0().replace(embed_tokens=t0().embed_tokens.at[0].mul(100.0))
    a, b = prompt(40, seed=1), prompt(16, seed=2)
    tokens, mask = padded([(0, a), (24, b)], tiny.LONG)
    name = "layer03.indexer.selected"
    logits, captured = forward(params, tokens, mask=mask, capture=(name,))
    assert_close(logits[0, :40], exact(params, a))
    assert_close(logits[1, 24:40], exact(params, b))
    selected = np.asarray(captured[name])[1, :16]
    for query, row in enumerate(selected):
        assert row.max() <= query
    # the last of 16 tokens has four complete blocks, of which it takes two
    assert len(set((selected[15][selected[15] >= 0] // 4).tolist())) == 2


@pytest.mark.parametrize("lengths", [(13, 37), (13, 13), (11, 12, 13)])
def test_each_row_has_its_own_past(lengths):
    """PAD-04: a decode step behind unequal pasts, and behind equal ones, which would hide it."""
    ids = [prompt(n, seed=10 + i) for i, n in enumerate(lengths)]
    _, tokens, logits = greedy(t0(), new_state(), ids, 2)
    for row in range(len(lengths)):
        assert_plain(t0(), ids[row], tokens[row], logits[row])


def test_each_row_attends_to_its_own_selection():
    """PAD-05: row b prefers block b + 1; other blocks' values do not move it, permuted or not."""
    params = planted_queries(t0())
    ids = [prompt(20, seed=20 + row) for row in range(ROWS)]
    state, _ = feed_pieces(params, new_state(), [split(i, [16]) for i in ids])
    state = plant(state, {row: [row + 1] for row in range(ROWS)})

    def last(state, rows=tuple(range(ROWS))):
        return np.stack(feed_rows(params, state, [[9 + r] for r in rows], width=1)[1])

    want = last(state)
    for block in range(5):
        value = np.array(state.layers[3].value)
        for row in range(ROWS):
            page, half = at_block(state, row, block)
            value[page, 4 * half : 4 * half + 4] += 3
        moved = np.abs(last(edit_cache(state, value=jnp.asarray(value))) - want).max(axis=(1, 2))
        for row in range(ROWS):
            # of the four blocks that tie at zero the lowest is taken beside the planted one
            chosen = block in (0, row + 1)
            assert (moved[row] > 1e-3) == chosen, f"row {row}, block {block}: {moved[row]}"
            assert chosen or moved[row] == 0
    order = jnp.asarray([2, 0, 3, 1])
    permuted = last(take_slots(state, order), rows=order.tolist())
    assert_close(permuted, want[np.asarray(order)])


def test_a_row_leaves_and_its_slot_is_taken():
    """PAD-07: row 1 of three stops at step 2; the others run on, then a new prompt comes."""
    ids = [prompt(n, seed=30) for n in (20, 30, 40)]
    state, found = feed_pieces(t0(), new_state(), [split(i, [16] * 2) for i in ids])
    tokens = [[int(logits[-1].argmax())] for logits in found]
    logits = [[row[-1]] for row in found]
    for number in range(12):
        active = jnp.asarray([True, number < 2, True, False])
        now = jnp.asarray([row[-1] for row in tokens] + [0])
        state, values = decode_token(t0(), state, now, active)
        for row in np.flatnonzero(np.asarray(active)):
            logits[row].append(np.asarray(values[row]))
            tokens[row].append(int(values[row].argmax()))
    for row in range(3):
        assert len(tokens[row]) == (3 if row == 1 else 13)
        assert_plain(t0(), ids[row], tokens[row], np.stack(logits[row]))
    kept = [live(state, row) for row in (0, 2)]
    state = reset_slots(T0, state, jnp.asarray([1]))
    new = prompt(13, seed=31)
    state, (_, values) = feed_rows(t0(), state, [(), new])
    assert_close(values, exact(t0(), new))
    for row, before in zip((0, 2), kept, strict=True):
        assert_same_live(live(state, row), before, tolerance=0)


def test_two_hundred_requests_through_eight_slots():
    """PAD-08: requests of 1 to 8 tokens come and go; rows that are not there share one number."""
    slots, absent = 8, 8
    rng = np.random.default_rng(8)
    waiting = [(prompt(int(rng.integers(1, 17)), seed=100 + i), i % 8 + 1) for i in range(200)]
    state = new_state(slots=slots, max_length=24)
    running: dict[int, dict] = {}
    done = []
    while waiting or running:
        free = [s for s in range(slots) if s not in running]
        while waiting and free:
            batch = [(free.pop(), *waiting.pop()) for _ in range(min(2, len(free), len(waiting)))]
            where, tokens, count = np.full(2, absent), np.zeros((2, 16), np.int32), np.zeros(2, int)
            for row, (slot, ids, _) in enumerate(batch):
                where[row], count[row] = slot, len(ids)
                tokens[row, : len(ids)] = ids
            real = where[where != absent]
            assert len(set(real.tolist())) == len(real)
            # the real rows come first or last by turns
            order = np.argsort(where) if len(done) % 2 else np.argsort(-where)
            where, tokens, count = (
                jnp.asarray(x[order], jnp.int32) for x in (where, tokens, count)
            )
            state = reset_slots(T0, state, where)
            state, hidden = prefill_chunk(t0(), state, where, tokens, count)
            logits = np.asarray(hidden @ t0().lm_head.T)
            for row, slot in enumerate(np.asarray(where)):
                if slot != absent:
                    _, ids, most = next(b for b in batch if b[0] == slot)
                    running[int(slot)] = dict(ids=ids, most=most, logits=[logits[row]])
        now, active = np.zeros(slots, np.int32), np.zeros(slots, bool)
        for slot, request in list(running.items()):
            request.setdefault("tokens", []).append(int(request["logits"][-1].argmax()))
            if len(request["tokens"]) == request["most"]:
                done.append(running.pop(slot))
            else:
                now[slot], active[slot] = request["tokens"][-1], True
        if active.any():
            state, logits = decode_token(t0(), state, jnp.asarray(now), jnp.asarray(active))
            for slot in np.flatnonzero(active):
                running[int(slot)]["logits"].append(np.asarray(logits[slot]))
    assert len(done) == 200
    for request in done:
        # among so many tokens one has an n-gram score near 0, where the root of its gate
        # multiplies rounding errors by hundreds: one-shot logits are off by 3e-5 there too
        logits = np.stack(request["logits"])
        assert_plain(t0(), request["ids"], request["tokens"], logits, tolerance=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_without_pages_write_nowhere(value):
    """PAD-10: three of four rows have neither tokens nor pages, in a pool of NaN."""
    ids = prompt(30, seed=40)
    state = init_state(T0, **tiny.SIZES, contiguous=False)
    state = assign_pages(state, 0, jnp.asarray([9, 2, 31, 0, -1, -1, -1, -1], jnp.int32))
    state = reset_slots(T0, poison(state, value), jnp.arange(ROWS))
    after, (logits,) = feed_pieces(t0(), state, [split(ids, [16])])
    assert_close(logits, exact(t0(), ids))
    own = np.isin(np.arange(32), [9, 2, 31, 0])
    for part in ("key", "value", "index_key"):
        for cache in (after.layers[3], after.mtp):
            assert not np.isfinite(np.asarray(getattr(cache, part))[~own]).any()


def test_pads_of_a_verify_step_have_no_place():
    """PAD-11: two rows of 3 tokens at 20 and an empty row: 6 pads, and no byte of theirs."""
    ids = [prompt(20, seed=50 + row) for row in range(2)]
    state, _ = feed_pieces(t0(), new_state(), [split(i, [16]) for i in ids])
    state: Any = take_slots(state, jnp.arange(3))
    count = jnp.asarray([3, 3, 0])
    span = make_span(T0, state, state.length, count, 4)
    pads = ~np.asarray(span.valid)
    assert pads.sum() == 6
    cache = state.layers[3]
    np.testing.assert_array_equal(np.asarray(span.index)[pads], -1)
    np.testing.assert_array_equal(np.asarray(span.slot)[pads], cache.key.shape[0] * 8)
    np.testing.assert_array_equal(np.asarray(span.complete)[pads], 0)
    np.testing.assert_array_equal(np.asarray(span.ring)[pads], cache.ring.shape[1])
    np.testing.assert_array_equal(np.asarray(span.index)[~pads], [20, 21, 22] * 2)

    # ids behind the tokens may be anything
    fed = jnp.asarray([[7, 8, 9, 60], [10, 11, 12, 61], [62, 62, 62, 62]])
    verify: Any = jax.jit(lambda s, t, c: step(t0(), s, t, c, final=False)[0])
    after = verify(state, fed, count)
    changed = np.asarray(after.layers[3].key != cache.key).any(axis=(2, 3))
    own = np.zeros_like(changed)
    for row in range(2):
        for index in (20, 21, 22):
            own[int(state.page_table[row, index // 8]), index % 8] = True
    np.testing.assert_array_equal(changed, own)
    ring = np.asarray(after.layers[3].ring != cache.ring).any(axis=2)
    own = np.zeros_like(ring)
    own[:2, [i % ring.shape[1] for i in (20, 21, 22)]] = True
    np.testing.assert_array_equal(ring, own)
    np.testing.assert_array_equal(after.layers[3].index_key, cache.index_key)
    np.testing.assert_array_equal(after.length, state.length)


def test_twenty_tokens_of_a_ragged_batch():
    """PAD-13: lengths 3 and 19; the mask holds in every step, not in the first alone."""
    ids = [prompt(3, seed=60), prompt(19, seed=61)]
    _, tokens, logits = greedy(t0(), new_state(), ids, 20)
    for row in range(2):
        assert len(tokens[row]) == 20
        assert_plain(t0(), ids[row], tokens[row], logits[row])
