"""Attention to selected tokens against NumPy float64."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.pallas.cases import E4M3, normal
from qwen4jax.pallas.sparse_attention import IMPLEMENTATIONS, sparse_attention
from qwen4jax.pallas.sparse_attention.cases import CASES
from tests import oracle
from tests.pallas.calls import assert_matches, call, f64, over_cases, runs_here


def attention64(query, gate, key, value, slots, page_table=None) -> np.ndarray:
    query, gate, slots = f64(query), f64(gate), np.asarray(slots)
    if page_table is not None:
        page = np.take_along_axis(np.asarray(page_table)[:, None], slots // key.shape[1], axis=-1)
        there = (slots >= 0) & (page >= 0)
        slots = np.where(there, page * key.shape[1] + slots % key.shape[1], -1)
    key, value = (f64(x).reshape(-1, *x.shape[2:]) for x in (key, value))
    out = np.zeros((*query.shape[:2], query.shape[2] * query.shape[3]))
    for at in np.ndindex(query.shape[:2]):
        chosen = slots[at][slots[at] >= 0]
        out[at] = oracle.attend(query[at], gate[at], key[chosen], value[chosen])
    return out


def of_case(name, implementation) -> dict[str, Any]:
    """The inputs of a case; for Mosaic, which takes wide heads, of one query of another."""
    name = "channels_64" if implementation == "mosaic_hopper" else name
    return next(c for c in CASES if c.name == name).inputs()


def run(inputs, implementation) -> Any:
    """A call, with a table of all pages in order for the implementation that wants one."""
    if implementation == "triton_together" and "page_table" not in inputs:
        table = jnp.arange(inputs["key"].shape[0], dtype=jnp.int32)
        table = jnp.broadcast_to(table, (inputs["query"].shape[0], len(table)))
        inputs = inputs | dict(page_table=table)
    return call(sparse_attention, inputs, implementation)


@over_cases(CASES, "sparse_attention", IMPLEMENTATIONS)
def test_matches_float64(case, implementation):
    """Unselected places of the pool are NaN: they have no weight at all (NUM-09)."""
    inputs = case.inputs()
    got = call(sparse_attention, inputs, implementation)
    want = attention64(**inputs)
    assert got.dtype == inputs["query"].dtype
    assert np.isfinite(f64(got)).all()
    # scores in the thousands move weights by 1e-7 of themselves
    share = 2e-4 if case.name == "large_scores" else 3e-6
    assert_matches(got, want, share=share)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_query_that_selects_nothing_gets_zeros(implementation, value):
    """NUM-08, NUM-09: the sentinel -1 is clamped to a place, whose content must not be read."""
    inputs = of_case("nothing_selected", implementation)
    if implementation == "mosaic_hopper":
        if not np.isnan(value):
            pytest.skip("NumPy multiplies in the simulator, and warns of infinities")
        inputs["slots"] = jnp.full_like(inputs["slots"], -1)
    inputs |= {name: jnp.full_like(inputs[name], value) for name in ("key", "value")}
    got = np.asarray(run(inputs, implementation))
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_place_an_empty_entry_falls_on_is_not_read(implementation):
    """NUM-08: changing place 0 of the pool changes no query that did not select it."""
    inputs = of_case("gaps_among_the_selected", implementation)
    inputs["slots"] = jnp.where(inputs["slots"] == 0, -1, inputs["slots"])
    want = np.asarray(run(inputs, implementation))
    for name in ("key", "value"):
        inputs[name] = inputs[name].at[0, 0].set(1e30)
    np.testing.assert_array_equal(np.asarray(run(inputs, implementation)), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_places_past_two_gigabytes(implementation):
    """LNG-08: the last page of a pool of over 2**31 bytes gives what the first one gives.

    Only the two pages are ever touched, so the pool costs address space and no memory.
    """
    if implementation == "mosaic_hopper":
        pytest.skip("the simulator copies its arguments")
    channels, size = 256, 64
    pages = 2**31 // (size * channels) + 8
    rng = np.random.default_rng(0)
    nbytes = pages * size * channels
    assert nbytes > 2**31
    # aligned as XLA wants it, so that the pages become an array without a copy
    raw = np.zeros(nbytes + 64, np.uint8)
    pool = raw[-raw.ctypes.data % 64 :][:nbytes].view(E4M3).reshape(pages, size, 1, channels)
    pool[0] = pool[-1] = np.asarray(normal(rng, (size, 1, channels), E4M3))
    pools = [jax.device_put(pool, may_alias=True)] * 2
    query, gate = (normal(rng, (1, 1, 2, channels)) for _ in range(2))
    attend: Any = functools.partial(sparse_attention, implementation=implementation)
    if implementation == "reference":
        # the interpreter reads the pool where it is unless it is called back from a program
        attend = jax.jit(attend)
    local = np.array([[[3, -1, 0, 63, 17]]])
    found = []
    for page in (0, pages - 1):
        if implementation == "triton_together":
            where = (local, np.array([[page]]))
        else:
            where = (np.where(local >= 0, local + page * size, -1),)
        with runs_here(implementation):
            found.append(attend(query, gate, *pools, *(jnp.asarray(x, jnp.int32) for x in where)))
    first, last = found
    assert np.abs(np.asarray(first)).max() > 0.01
    np.testing.assert_array_equal(np.asarray(last), np.asarray(first))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_selected_token_of_nan_makes_nan(implementation):
    """A NaN hidden state ends as NaN also where keys and values are kept in e4m3."""
    inputs = of_case("gaps_among_the_selected", implementation)
    pages, size, heads, _ = inputs["key"].shape
    channels = 128 if implementation == "mosaic_hopper" else 16
    shape = (pages, size, heads, channels)
    for name in ("query", "gate"):
        inputs[name] = jnp.ones((*inputs[name].shape[:3], channels), jnp.bfloat16)
    spoiled = inputs["slots"][0, 0].max()
    for name in ("key", "value"):
        kept = jnp.ones(shape).at[spoiled // size, spoiled % size].set(jnp.nan)
        inputs[name] = kept.astype(jnp.float8_e4m3fn)
    got = f64(run(inputs, implementation))
    assert np.isnan(got[0, 0]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_of_e4m3_are_exact(implementation):
    """Each of them, subnormals too, is the value of the only token that is selected."""
    bits = np.arange(256, dtype=np.uint8)
    # but NaN
    bits = np.where(bits & 0x7F == 0x7F, 0, bits).reshape(1, 1, 1, 256)
    bits = np.repeat(bits, 8, axis=1)
    value = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e4m3fn)
    none = jnp.zeros((1, 1, 2, 256), jnp.bfloat16)
    slots = jnp.zeros((1, 1, 1), jnp.int32)
    inputs = dict(query=none, gate=none, key=value, value=value, slots=slots)
    got = f64(run(inputs, implementation)).reshape(2, 256)
    np.testing.assert_array_equal(got, np.broadcast_to(f64(value)[0, 0] / 2, (2, 256)))


@pytest.mark.parametrize("name", ["chunk_of_a_prompt", "gaps_among_the_selected", "e4m3_cache"])
def test_many_queries_look_where_their_selection_ends(monkeypatch, name):
    """What a long chunk takes, in a case of few queries: tiles of nothing are not gone through."""
    kernels = importlib.import_module("qwen4jax.pallas.sparse_attention.triton_kernels")
    inputs = next(c for c in CASES if c.name == name).inputs()
    for constant, value in dict(PARTS=(), E4M3_PARTS=(), _TILE=16, _MANY=0).items():
        monkeypatch.setattr(kernels, constant, value)
    ends, call_kernel = [], kernels.triton_call

    def seen(*arrays: Any, **more: Any) -> Any:
        ends.append(more["ENDS"])
        return call_kernel(*arrays, **more)

    monkeypatch.setattr(kernels, "triton_call", seen)
    inputs["slots"] = jnp.pad(inputs["slots"], ((0, 0), (0, 0), (0, 40)), constant_values=-1)
    got = call(sparse_attention, inputs, "triton")
    assert ends == [True]
    assert_matches(got, attention64(**inputs), share=3e-6)


def test_a_long_selection_is_in_parts_however_many_queries_there_are(monkeypatch):
    """A part's list lies in shared memory."""
    kernels = importlib.import_module("qwen4jax.pallas.sparse_attention.triton_kernels")
    monkeypatch.setattr(kernels, "E4M3_PARTS", ())
    monkeypatch.setattr(kernels, "_LONGEST", 40)
    grids, call_kernel = [], kernels.triton_call

    def seen(*arrays: Any, **more: Any) -> Any:
        grids.append(more["grid"])
        return call_kernel(*arrays, **more)

    monkeypatch.setattr(kernels, "triton_call", seen)
    inputs = next(c for c in CASES if c.name == "splits_e4m3").inputs()
    got = call(sparse_attention, inputs, "triton")
    assert grids == [(2, 2)]
    assert_matches(got, attention64(**inputs), share=3e-6)


@pytest.mark.parametrize("size", [2.0**-130, 2.0**-60, 2.0**20])
def test_queries_of_any_size_read_e4m3(size):
    """They become float16, whose range is a fraction of theirs; subnormal ones count as 0."""
    inputs = next(c for c in CASES if c.name == "e4m3_cache").inputs()
    inputs["query"] = (inputs["query"].astype(jnp.float32) * size).astype(jnp.bfloat16)
    got = call(sparse_attention, inputs, "triton")
    assert_matches(got, attention64(**inputs), share=3e-6)
