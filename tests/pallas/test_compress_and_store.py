"""Norm, rotation and cache writes against NumPy float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.pallas.cases import BF16
from qwen4jax.pallas.compress_and_store import (
    COMPRESS,
    PREPARE,
    PREPARE_AND_STORE,
    STORE,
    compress,
    prepare,
    prepare_and_store,
    store,
)
from qwen4jax.pallas.compress_and_store.cases import CASES
from tests import oracle
from tests.pallas.calls import assert_matches, call, f64, over_cases


def rotate(x, cos, sin):
    """Half-split rotation of the leading channels of one head [C]."""
    pairs, out = len(cos), x.copy()
    out[:pairs] = x[:pairs] * cos - x[pairs : 2 * pairs] * sin
    out[pairs : 2 * pairs] = x[pairs : 2 * pairs] * cos + x[:pairs] * sin
    return out


def rounded(x, dtype):
    """Float64 values after one rounding to `dtype`."""
    return f64(jnp.asarray(x, jnp.float32).astype(dtype)) if dtype == BF16 else x


def tokens_of(span, row):
    """(place in the span, index in the request) of each token that is there."""
    start, count = int(span.start[row]), int(span.count[row])
    return [(t, start + t) for t in range(count) if start + t >= 0]


def place(table, index, per_page):
    """(page, place in it) of a token or block, or None where no page is assigned."""
    page = int(table[index // per_page]) if index // per_page < len(table) else -1
    return None if page < 0 else (page, index % per_page)


@over_cases(CASES, "prepare", PREPARE)
def test_prepare_matches_float64(case, implementation):
    inputs = case.inputs()
    got = call(prepare, inputs, implementation)
    span, x = inputs["span"], f64(inputs["x"])
    normed = oracle.rms(x, f64(inputs["norm"]), inputs["eps"])
    # the norm is rounded before the rotation
    want = rounded(normed, inputs["x"].dtype)
    for at in np.ndindex(x.shape[:3]):
        want[at] = rotate(want[at], f64(span.cos)[at[:2]], f64(span.sin)[at[:2]])
    assert got.dtype == inputs["x"].dtype
    assert_matches(got, want, share=2.0**-8 if got.dtype == BF16 else 2e-6)


@over_cases(CASES, "store", STORE)
def test_store_writes_the_tokens_and_nothing_else(case, implementation):
    """PAD-11: where there is no token or no page, no byte of the cache changes."""
    inputs = case.inputs()
    cache, span = inputs["cache"], inputs["span"]
    got = call(store, inputs, implementation)
    want = {part: np.array(getattr(cache, part)) for part in ("key", "value")}
    size, dtype = cache.key.shape[1], cache.key.dtype
    for row, table in enumerate(np.asarray(span.page_table)):
        for t, index in tokens_of(span, row):
            if (at := place(table, index, size)) is not None:
                for part, pages in want.items():
                    pages[at] = np.asarray(inputs[part][row, t].astype(dtype))
    for part, pages in want.items():
        np.testing.assert_array_equal(_bytes(getattr(got, part)), _bytes(pages))
    for part in ("index_key", "ring"):
        np.testing.assert_array_equal(_bytes(getattr(got, part)), _bytes(getattr(cache, part)))


@pytest.mark.parametrize("implementation", STORE)
def test_e4m3_pages_saturate(implementation):
    """Values past 448 would be cast to NaN, and one NaN spoils every query that selects it."""
    inputs = next(c for c in CASES if c.name == "bfloat16_to_e4m3").inputs()
    for part, value in (("key", 500.0), ("value", -1e6)):
        inputs[part] = inputs[part].at[0, 0].set(value)
    got = call(store, inputs, implementation)
    at = divmod(int(inputs["span"].slot[0, 0]), inputs["cache"].key.shape[1])
    np.testing.assert_array_equal(f64(got.key[at]), 448)
    np.testing.assert_array_equal(f64(got.value[at]), -448)


@over_cases(CASES, "compress", COMPRESS)
def test_compress_matches_float64(case, implementation):
    """Blocks that end in the span, members before it from the ring; the rest stays as it was."""
    inputs = case.inputs()
    cache, span, ratio = inputs["cache"], inputs["span"], inputs["ratio"]
    got = call(compress, inputs, implementation)
    raw, dtype = f64(inputs["raw_key"]), inputs["raw_key"].dtype
    blocks, ring = cache.index_key.shape[1], cache.ring.shape[1]
    written, want_ring = {}, np.array(cache.ring)
    for row, table in enumerate(np.asarray(span.page_table)):
        start = int(span.start[row])
        tokens = tokens_of(span, row)
        for _, index in tokens:
            if index % ratio < ratio - 1:
                continue
            block = index // ratio
            members = [
                raw[row, i - start] if i >= start else f64(cache.ring)[row, i % ring]
                for i in range(block * ratio, index + 1)
            ]
            pooled = rounded(np.mean(members, axis=0), dtype)
            normed = rounded(oracle.rms(pooled, f64(inputs["norm"]), inputs["eps"]), dtype)
            at = np.asarray(span.block)[row].tolist().index(block)
            key = rotate(normed, f64(span.block_cos)[row, at], f64(span.block_sin)[row, at])
            if (where := place(table, block, blocks)) is not None:
                written[where] = key
        for t, index in tokens[-ring:]:
            want_ring[row, index % ring] = np.asarray(inputs["raw_key"][row, t])
    keys = np.asarray(got.index_key)
    untouched = np.ones(keys.shape[:2], bool)
    for where, key in written.items():
        untouched[where] = False
        assert_matches(jnp.asarray(keys[where]), key, share=2.0**-7 if dtype == BF16 else 3e-6)
    np.testing.assert_array_equal(
        _bytes(keys[untouched]), _bytes(np.asarray(cache.index_key)[untouched])
    )
    np.testing.assert_array_equal(_bytes(got.ring), _bytes(want_ring))
    for part in ("key", "value"):
        np.testing.assert_array_equal(_bytes(getattr(got, part)), _bytes(getattr(cache, part)))


@pytest.mark.parametrize("implementation", COMPRESS)
def test_the_ring_is_read_before_it_is_written(implementation):
    """A span longer than the ring overwrites the members of the block that it closes."""
    case = next(c for c in CASES if c.name == "longer_than_the_ring")
    inputs = case.inputs()
    span, ring = inputs["span"], f64(inputs["cache"].ring)
    start = int(span.start[0])
    assert int(span.count[0]) > ring.shape[1]
    assert start % inputs["ratio"] > 0
    got = call(compress, inputs, implementation)
    plus = inputs["cache"].ring.at[0, (start - 1) % ring.shape[1]].add(1.0)
    cache = type(inputs["cache"])(
        inputs["cache"].key, inputs["cache"].value, inputs["cache"].index_key, plus
    )
    changed = call(compress, inputs | {"cache": cache}, implementation)
    page = int(span.page_table[0, 0])
    assert np.abs(f64(changed.index_key[page, 0]) - f64(got.index_key[page, 0])).max() > 1e-3


def _one_after_the_other(
    cache, query_gate, key, value, index_qk, gains, span, *, ratio, eps, implementation
):
    how = dict(eps=eps, implementation=implementation)
    query = prepare(query_gate[:, :, :, 0], gains.query, span, **how)
    index_query = prepare(index_qk[:, :, :-1], gains.index_query, span, **how)
    key = prepare(key, gains.key, span, **how)
    cache = store(cache, key, value, span, implementation=implementation)
    cache = compress(cache, index_qk[:, :, -1], gains.index_key, span, ratio=ratio, **how)
    return cache, query, query_gate[:, :, :, 1], index_query


@over_cases(CASES, "prepare_and_store", PREPARE_AND_STORE)
def test_all_at_once_is_one_after_the_other(case, implementation):
    """Queries, gates and every byte of the cache, also where nothing is written."""
    inputs = case.inputs()
    cache, query, gate, index_query = call(prepare_and_store, inputs, implementation)
    want = call(_one_after_the_other, inputs, "reference")
    share = 2.0**-7 if query.dtype == BF16 else 3e-6
    assert_matches(query, f64(want[1]), share=share)
    np.testing.assert_array_equal(_bytes(gate), _bytes(want[2]))
    assert_matches(index_query, f64(want[3]), share=share)
    # a difference of one rounding may become one of the next
    assert_matches(cache.key, f64(want[0].key), share=share, steps=2.0)
    assert_matches(cache.index_key, f64(want[0].index_key), share=share)
    for part in ("value", "ring"):
        np.testing.assert_array_equal(_bytes(getattr(cache, part)), _bytes(getattr(want[0], part)))


@pytest.mark.parametrize("implementation", PREPARE_AND_STORE)
def test_all_at_once_saturates_e4m3(implementation):
    """As `store` does, a NaN staying one."""
    inputs = next(c for c in CASES if str(c) == "prepare_and_store-bfloat16_to_e4m3").inputs()
    inputs["value"] = inputs["value"].at[0, 0].set(500.0).at[0, 1].set(-1e6).at[0, 2].set(jnp.nan)
    cache = call(prepare_and_store, inputs, implementation)[0]
    slot, size = np.asarray(inputs["span"].slot[0]), cache.value.shape[1]
    for token, value in enumerate((448, -448, np.nan)):
        np.testing.assert_array_equal(f64(cache.value[divmod(int(slot[token]), size)]), value)


def _bytes(x) -> np.ndarray:
    x = np.ascontiguousarray(np.asarray(x))
    return x.reshape(-1).view(np.uint8)
