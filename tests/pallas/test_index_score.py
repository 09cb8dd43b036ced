"""Block scores against NumPy float64."""

import importlib
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.pallas.cases import BF16, normal
from qwen4jax.pallas.index_score import IMPLEMENTATIONS, index_score
from qwen4jax.pallas.index_score.cases import CASES
from tests.pallas.calls import assert_matches, call, f64, over_cases


def scores64(query, index_key, page_table, complete) -> np.ndarray:
    query, keys, table = f64(query), f64(index_key), np.asarray(page_table)
    rows, per_page = len(query), keys.shape[1]
    out = np.full((*complete.shape, table.shape[1] * per_page), -np.inf)
    for r in range(rows):
        for t, seen in enumerate(np.asarray(complete)[r]):
            for b in range(seen):
                key = keys[table[r, b // per_page], b % per_page]
                out[r, t, b] = np.maximum(query[r, t] @ key, 0).sum() / np.sqrt(len(key))
    return out


@over_cases(CASES, "index_score", IMPLEMENTATIONS)
def test_matches_float64(case, implementation):
    inputs = case.inputs()
    got = call(index_score, inputs, implementation)
    want = scores64(**inputs)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(np.asarray(got)), np.isneginf(want))
    finite = np.where(np.isneginf(want), 0, want)
    assert_matches(jnp.where(jnp.isneginf(got), 0, got), finite)


def top(scores, k):
    return set(np.argsort(-np.asarray(scores, np.float64), kind="stable")[:k].tolist())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_scores_stay_float32(implementation, dtype):
    """NUM-07: the factor does not change a choice in float32; rounding the scores would."""
    if implementation == "mosaic_hopper" and dtype != BF16:
        pytest.skip("takes bfloat16")
    rng = np.random.default_rng(7)
    inputs = dict(
        query=normal(rng, (1, 8, 4, 32), dtype),
        index_key=normal(rng, (32, 16, 32), dtype),
        page_table=jnp.arange(32, dtype=jnp.int32)[None],
        complete=jnp.full((1, 8), 512, jnp.int32),
    )
    got = np.asarray(call(index_score, inputs, implementation))[0]
    exact = scores64(**inputs)[0]
    rounded = np.asarray(jnp.asarray(got).astype(BF16), np.float32)
    assert got.dtype == np.float32
    for scores, want in zip(got, exact, strict=True):
        assert top(scores, 64) == top(want, 64)
        assert top(scores * np.float32(np.sqrt(32)), 64) == top(scores, 64)
    told_apart = [top(r, 64) != top(want, 64) for r, want in zip(rounded, exact, strict=True)]
    assert any(told_apart), "the case does not tell the dtypes apart"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_seen_may_hold_anything(implementation, value):
    """NUM-09: unwritten pages and blocks, and the page that an empty table entry falls on."""
    name = "pages_not_assigned"
    if implementation == "mosaic_hopper":
        if not np.isnan(value):
            pytest.skip("NumPy multiplies in the simulator, and warns of infinities")
        name = "bfloat16_tiles"
    case = next(c for c in CASES if c.name == name)
    inputs = case.inputs()
    zeros = inputs | {"index_key": jnp.nan_to_num(inputs["index_key"], nan=0.0)}
    filled = inputs | {"index_key": jnp.nan_to_num(inputs["index_key"], nan=value)}
    want = np.asarray(call(index_score, zeros, implementation))
    np.testing.assert_array_equal(np.asarray(call(index_score, filled, implementation)), want)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *itertools.product(("blocks_1000", "rows_at_different_lengths"), ("reference", "triton")),
        ("bfloat16", "mosaic_hopper"),
    ],
)
def test_best_of_groups(name, implementation):
    """The last group may be short; a group of nothing seen is -inf."""
    inputs = next(c for c in CASES if c.name == name).inputs() | {"group": 16}
    scores, best = (np.asarray(x) for x in call(index_score, inputs, implementation))
    spare = [(0, 0), (0, 0), (0, -scores.shape[-1] % 16)]
    groups = np.pad(scores, spare, constant_values=-np.inf).reshape(*scores.shape[:2], -1, 16)
    np.testing.assert_array_equal(best, groups.max(-1))


def test_a_program_of_several_tiles_gives_the_same(monkeypatch):
    """What many requests take, in a case of one."""
    kernels = importlib.import_module("qwen4jax.pallas.index_score.triton_kernels")
    inputs = next(c for c in CASES if c.name == "blocks_1000").inputs()
    one = np.asarray(call(index_score, inputs, "triton"))
    monkeypatch.setattr(kernels, "_MANY", 0)
    np.testing.assert_array_equal(np.asarray(call(index_score, inputs, "triton")), one)
