"""The selection against a stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax.pallas import registry
from qwen4jax.pallas.cases import normal
from qwen4jax.pallas.index_topk import IMPLEMENTATIONS, index_topk, select
from qwen4jax.pallas.index_topk.cases import CASES
from tests import oracle
from tests.pallas.calls import call, over_cases, runs_here

# Mosaic's kernel takes only rows of whole lines, which the cases have
OF_ANY_ROWS = [name for name in IMPLEMENTATIONS if not name.startswith("mosaic")]
NUM_01 = [c for c in CASES if c.name.startswith(("bin_of", "concentrated"))]


def assert_selects(got, scores, index, blocks, ratio):
    got, scores = np.asarray(got), np.asarray(scores)
    assert got.dtype == np.int32
    assert got.shape == (*index.shape, blocks * ratio + ratio - 1)
    for at in np.ndindex(index.shape):
        want = oracle.selected_tokens(scores[at], int(index[at]), blocks, ratio)
        row = got[at]
        assert (row >= -1).all()
        kept = row[row >= 0]
        assert len(set(kept.tolist())) == len(kept), "a token is selected twice"
        np.testing.assert_array_equal(np.sort(kept), want)


@over_cases(CASES, "index_topk", IMPLEMENTATIONS)
def test_selects_the_best_and_the_tail(case, implementation):
    """NUM-02: higher score first, then the lower block; the open block always."""
    inputs = case.inputs()
    got = call(index_topk, inputs, implementation)
    index = np.asarray(inputs["index"])
    assert_selects(got, inputs["scores"], index, inputs["blocks"], inputs["ratio"])


@pytest.mark.parametrize("case", NUM_01, ids=str)
@pytest.mark.parametrize("implementation", OF_ANY_ROWS)
def test_concentrated_scores_stay_exact_and_equal(case, implementation):
    """NUM-01: no candidate is dropped however many share a bin; 20 repeats, equal rows alike."""
    inputs = case.inputs()
    run = jax.jit(
        lambda s, i: index_topk(
            s, i, blocks=inputs["blocks"], ratio=inputs["ratio"], implementation=implementation
        )
    )
    with runs_here(implementation):
        first = np.asarray(run(inputs["scores"], inputs["index"]))
        # programs of the interpreter run one after the other, so that repeats show little
        for _ in range(19 if implementation == "reference" else 1):
            again = np.asarray(run(inputs["scores"], inputs["index"]))
            np.testing.assert_array_equal(again, first)
    scores = np.asarray(inputs["scores"])[:, 0]
    for row, chosen in enumerate(first[:, 0]):
        want = oracle.choose_blocks(scores[row], 512)
        dropped = np.setdiff1d(want, chosen[chosen >= 0] // 4)
        assert len(dropped) == 0
        np.testing.assert_array_equal(np.unique(chosen[chosen >= 0] // 4), want)
    if "concentrated" in case.name:
        assert (scores == scores[0]).all()
        assert (first == first[0]).all()


@pytest.mark.parametrize("implementation", OF_ANY_ROWS)
def test_the_sign_of_zero_breaks_no_tie(implementation):
    """NUM-02: -0.0 and +0.0 tie, so the lower block wins whatever its sign."""
    for zeros in ([0.0, -0.0, 0.0, -0.0, 0.0], [-0.0, 0.0, -0.0, 0.0, -0.0]):
        scores = jnp.asarray([[zeros]], jnp.float32)
        inputs = dict(scores=scores, index=jnp.asarray([[19]]), blocks=2, ratio=4)
        got = np.asarray(call(index_topk, inputs, implementation))[0, 0]
        assert sorted(got[got >= 0].tolist()) == list(range(8))


@pytest.mark.parametrize("implementation", OF_ANY_ROWS)
@given(
    levels=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    index=st.integers(-1, 34),
    signs=st.integers(0, 255),
)
def test_any_small_row(implementation, levels, index, signs):
    sign = np.where([(signs >> i) & 1 for i in range(8)], -1.0, 1.0)
    # zeros of either sign among the levels
    values = np.where(np.array(levels) == 0, 0.0 * sign, levels).astype(np.float32)
    values[max(0, (index + 1) // 4) :] = -np.inf
    inputs = dict(
        scores=jnp.asarray(values[None, None]), index=jnp.asarray([[index]]), blocks=3, ratio=4
    )
    got = _select(inputs["scores"], inputs["index"], implementation)
    assert_selects(got, inputs["scores"], np.array([[index]]), 3, 4)


@jax.jit
def _reference(scores, index):
    return index_topk(scores, index, blocks=3, ratio=4, implementation="reference")


def _select(scores, index, implementation):
    if implementation == "reference":
        return _reference(scores, index)
    with runs_here(implementation):
        return index_topk(scores, index, blocks=3, ratio=4, implementation=implementation)


# the others differ in the kernel only, which sees single rows
@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    ("workspace", "tiles"),
    # a place of 2 requests is 192 bytes: all 53, tiles of whole loads of keys, and smaller ones
    [(1 << 28, 0), (53 * 192, 0), (52 * 192, 2), (20 * 192, 4), (5 * 192, 11), (1, 53)],
)
def test_a_chunk_in_tiles_is_the_same(monkeypatch, implementation, workspace, tiles):
    """Rows are independent: the workspace changes neither choice nor order."""
    rng = np.random.default_rng(3)
    count = np.array([53, 30])
    index = np.where(np.arange(53) < count[:, None], np.arange(53) + np.array([[2], [40]]), -1)
    given = dict(
        query=normal(rng, (2, 53, 4, 8)),
        index_key=normal(rng, (8, 6, 8)),
        page_table=jnp.asarray(rng.permutation(8).reshape(2, 4), jnp.int32),
        complete=jnp.asarray((index + 1) // 4, jnp.int32),
        index=jnp.asarray(index, jnp.int32),
    )
    run = jax.jit(lambda given: select.select(**given, blocks=5, ratio=4))
    with runs_here(implementation), registry.using(implementation):
        want = np.asarray(run(given))
        monkeypatch.setattr(select, "WORKSPACE", workspace)
        jax.clear_caches()
        loops = str(jax.make_jaxpr(run)(given)).count("scan[")
        assert loops == (tiles > 0)
        np.testing.assert_array_equal(np.asarray(run(given)), want)
    if tiles:
        tile = select._tile(2, 53, 24)
        assert -(-53 // tile) == tiles
