"""The state's own operations, and what a row's result must not depend on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax.decode.prefill import prefill
from qwen4jax.state import (
    MAX_DRAFT,
    abstract_state,
    assign_pages,
    init_state,
    put_slots,
    reset_slots,
    ring_size,
    take_slots,
)
from tests import tiny
from tests.tiny import (
    ROWS,
    T0,
    T0_BF16,
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

LENGTHS = (29, 3, 16, 11)


def prompts():
    return [prompt(n, seed=5) for n in LENGTHS]


def chunked(ids):
    return split(ids, [16, 13]) if len(ids) > 16 else [ids]


def test_rows_equal_plain_in_company():
    """Each row of a ragged batch is what it is alone."""
    state, logits = feed_pieces(t0(), new_state(), [chunked(ids) for ids in prompts()])
    for row, ids in enumerate(prompts()):
        assert_close(logits[row], plain(t0(), ids), what=f"row {row}")
        alone, _ = feed_pieces(t0(), new_state(), [chunked(ids)])
        assert_same_live(live(state, row), live(alone, 0))


def test_a_row_does_not_see_the_other_rows():
    """Bit for bit: other rows may change in every way, padding included."""
    ids = prompts()
    state, logits = feed_pieces(t0(), new_state(), [chunked(i) for i in ids])
    others = [ids[0], prompt(13, 8), (), prompt(2, 9)]
    pieces = [chunked(i) for i in others]
    other_state, other_logits = feed_pieces(t0(), new_state(), pieces)
    np.testing.assert_array_equal(logits[0], other_logits[0])
    assert_same_live(live(state, 0), live(other_state, 0), tolerance=0)


@given(st.permutations(range(ROWS)))
def test_permuting_rows_permutes_results(order):
    ids = prompts()
    state, logits = feed_pieces(t0(), new_state(), [chunked(i) for i in ids])
    permuted, found = feed_pieces(t0(), new_state(), [chunked(ids[i]) for i in order])
    for row, source in enumerate(order):
        assert_close(found[row], logits[source])
        assert_same_live(live(permuted, row), live(state, source))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_the_pool_held_before_is_never_read(value):
    """NUM-09, PAD-10: unwritten keys, values, index keys and rings hold NaN or infinities."""
    fresh = new_state()
    filled: Any = reset_slots(T0, poison(fresh, value), jnp.arange(ROWS))
    assert not np.isfinite(np.asarray(filled.layers[3].key)).any()
    ids = prompts()
    state, want = feed_pieces(t0(), fresh, [chunked(i) for i in ids])
    filled, found = feed_pieces(t0(), filled, [chunked(i) for i in ids])
    for row in range(ROWS):
        np.testing.assert_array_equal(found[row], want[row])
        assert_same_live(live(filled, row), live(state, row), tolerance=0)


def test_the_slot_does_not_matter():
    """The same prompts in other slots, next to tenants that stay as they are."""
    ids = [prompt(n, seed=5).tolist() for n in (29, 7)]
    results = []
    for slots in ((0, 1), (3, 2), (2, 0)):
        state, _ = feed_rows(t0(), new_state(), prompts()[1:2] * ROWS)
        tenant = next(s for s in range(ROWS) if s not in slots)
        before = live(state, tenant)
        state = reset_slots(T0, state, jnp.asarray(slots))
        state, hidden = prefill(t0(), state, ids, slots, chunk=16)
        assert_same_live(live(state, tenant), before, tolerance=0)
        results.append((np.asarray(hidden), [live(state, s) for s in slots]))
    for hidden, rows in results[1:]:
        np.testing.assert_array_equal(hidden, results[0][0])
        for got, want in zip(rows, results[0][1], strict=True):
            assert_same_live(got, want, tolerance=0)


@pytest.mark.parametrize("page_size", [4, 8, 64])
def test_pages_anywhere_equal_pages_in_order(page_size):
    """Shuffled pages with holes between them, in a pool twice as large, of three page sizes."""
    pages = 2 * ROWS * 64 // page_size
    state = init_state(
        T0, **(tiny.SIZES | dict(page_size=page_size, pages=pages)), contiguous=False
    )
    assert (np.asarray(state.page_table) == -1).all()
    per_slot = 64 // page_size
    free = np.random.default_rng(page_size).permutation(pages)
    for slot, ids in enumerate(prompts()):
        # only as many as the prompt needs
        needed = -(-len(ids) // page_size)
        own = np.full(per_slot, -1)
        own[:needed], free = free[:needed], free[needed:]
        state = assign_pages(state, slot, jnp.asarray(own, jnp.int32))
    state = reset_slots(T0, poison(state, np.nan), jnp.arange(ROWS))
    state, found = feed_pieces(t0(), state, [chunked(i) for i in prompts()])
    compact, want = feed_pieces(t0(), new_state(), [chunked(i) for i in prompts()])
    for row in range(ROWS):
        assert_close(found[row], want[row])
        assert_same_live(live(state, row), live(compact, row))


def filled_state() -> Any:
    """Every leaf different in every slot."""
    rng = np.random.default_rng(0)
    state = new_state()

    def fill(x):
        values = rng.standard_normal(x.shape) * 9
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(fill, state).replace(page_table=state.page_table)


def slot_leaves(state, slot):
    """The arrays of one slot, without the pages."""
    return [np.asarray(x) for x in jax.tree.leaves(take_slots(state, jnp.asarray([slot])))]


def assert_same_tree(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_take_then_put_changes_nothing():
    state = filled_state()
    slots = jnp.asarray([2, 0])
    assert_same_tree(put_slots(state, slots, take_slots(state, slots)), state)


def test_take_orders_slots_and_put_fills_them():
    state = filled_state()
    rows: Any = take_slots(state, jnp.asarray([3, 1]))
    np.testing.assert_array_equal(rows.length, np.asarray(state.length)[[3, 1]])
    np.testing.assert_array_equal(rows.layers[3].ring, np.asarray(state.layers[3].ring)[[3, 1]])
    np.testing.assert_array_equal(rows.layers[3].key, state.layers[3].key)
    moved = put_slots(state, jnp.asarray([0, 2]), rows)
    for source, target in ((3, 0), (1, 2), (1, 1), (3, 3)):
        for got, want in zip(slot_leaves(moved, target), slot_leaves(state, source), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("absent", [[1, ROWS], [ROWS + 7, 1], [ROWS, ROWS + 1]])
def test_rows_that_are_not_there_are_dropped(absent):
    """PAD-08: several rows may be absent at once; no slot but those named changes."""
    state = filled_state()
    slots = jnp.asarray(absent)
    rows = jax.tree.map(lambda x: x + 1, take_slots(state, slots))
    after = put_slots(state, slots, rows)
    for slot in range(ROWS):
        same = slot not in absent
        pairs = zip(slot_leaves(after, slot)[:8], slot_leaves(state, slot)[:8], strict=True)
        for got, want in pairs:
            np.testing.assert_array_equal(got, want if same else want + 1)


def test_reset_empties_the_named_slots_only():
    state = filled_state()
    after: Any = reset_slots(T0, state, jnp.asarray([1, 3]))
    fresh = new_state()
    np.testing.assert_array_equal(after.page_table, state.page_table)
    np.testing.assert_array_equal(after.layers[3].key, state.layers[3].key)
    np.testing.assert_array_equal(after.mtp.index_key, state.mtp.index_key)
    pages_of = (".key", ".value", ".index_key")
    for slot in range(ROWS):
        source = fresh if slot in (1, 3) else state
        names = jax.tree_util.tree_flatten_with_path(take_slots(source, jnp.asarray([slot])))[0]
        for (path, want), got in zip(names, slot_leaves(after, slot), strict=True):
            if str(path[-1]) not in pages_of:
                np.testing.assert_array_equal(got, np.asarray(want), err_msg=str(path))


def test_an_empty_state():
    state = new_state()
    assert (state.slots, state.page_size, state.capacity) == (ROWS, 8, 64)
    np.testing.assert_array_equal(state.page_table, np.arange(32).reshape(4, 8))
    np.testing.assert_array_equal(state.ngram_ids, np.ones((4, 2)))
    np.testing.assert_array_equal(state.token, -1)
    np.testing.assert_array_equal(state.length, 0)
    shapes = abstract_state(T0, **tiny.SIZES)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_dtypes_of_a_state():
    """The stored dtype everywhere but in the recurrent matrices, which stay float32."""
    state: Any = abstract_state(T0_BF16, **tiny.SIZES, kv_dtype="float8_e4m3fn")
    assert state.layers[0].recurrent.dtype == jnp.float32
    assert state.layers[0].conv.dtype == jnp.bfloat16
    assert state.layers[3].key.dtype == jnp.float8_e4m3fn
    assert state.layers[3].index_key.dtype == jnp.bfloat16
    assert state.mtp.value.dtype == jnp.float8_e4m3fn
    assert state.ple[0].shape == (ROWS, 9, 128)
    assert state.length.dtype == jnp.int32


def test_a_state_without_draft_head():
    sizes: dict[str, Any] = tiny.SIZES | dict(drafts=0)
    state = abstract_state(T0.replace(mtp_num_hidden_layers=0), **sizes)
    assert state.mtp is None
    assert state.drafts.shape == (ROWS, 0)


@given(st.integers(1, 16), st.integers(0, MAX_DRAFT))
def test_the_ring_outlives_rejected_drafts(ratio, drafts):
    """Rejected rows past the accepted one never reach the open block's committed keys."""
    ring = ring_size(ratio, drafts)
    assert ring % ratio == 0
    for length in range(3 * ring):
        open_block = range(length - length % ratio, length)
        # a round feeds the pending token and the drafts; at least the pending one stays
        rejected = range(length + 1, length + 1 + drafts)
        assert not {i % ring for i in open_block} & {i % ring for i in rejected}


def test_slots_get_pages_that_exist():
    """A table past the pool's end would drop writes and clamp reads without a word."""
    with pytest.raises(ValueError, match=r"^pages: 31 are too few for 4 slots of 8; contiguous="):
        new_state(pages=31)
    assert new_state(pages=32).layers[3].key.shape[0] == 32
    assert (np.asarray(new_state(pages=31, contiguous=False).page_table) == -1).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 6),
        ("page_size", 0),
        ("page_size", -4),
        ("slots", 0),
        ("drafts", -1),
        ("drafts", MAX_DRAFT + 1),
        ("max_length", 0),
        ("max_length", 4097),
    ],
)
def test_a_bad_size_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field}: {value} is"):
        abstract_state(T0, **(tiny.SIZES | {field: value}))
