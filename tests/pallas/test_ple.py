"""The n-gram embedding against Python's integers and NumPy float64."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax import quant
from qwen4jax.pallas.ple import EMBED, GATHER, MIX, ROWS, embed, gather, mix, ngram_rows
from qwen4jax.pallas.ple.cases import CASES, SMALL_HASH
from tests import oracle
from tests.pallas.calls import assert_matches, call, f64, over_cases


@over_cases(CASES, "ngram_rows", ROWS)
def test_rows_match_integers(case, implementation):
    inputs = case.inputs()
    got = np.asarray(call(ngram_rows, inputs, implementation))
    history = inputs["hash"].ngram_size - 1
    for row, ids in zip(got, np.asarray(inputs["ids"]), strict=True):
        want = oracle.ngram_rows(ids, inputs["hash"], inputs["eos"])[history:]
        np.testing.assert_array_equal(row, want)


@jax.jit
def _small_rows(ids):
    return ngram_rows(ids, SMALL_HASH, eos=1)


@given(st.lists(st.integers(0, 63), min_size=8, max_size=8))
def test_rows_of_any_ids(ids):
    got = np.asarray(_small_rows(jnp.asarray([ids], jnp.int32)))[0]
    np.testing.assert_array_equal(got, oracle.ngram_rows(ids, SMALL_HASH, 1)[2:])
    assert (got >= 0).all()
    assert (got < SMALL_HASH.rows).all()


def _values(table):
    """What a table stands for: an e4m3 row is `bf16(value) * bf16(scale)`, rounded once."""
    if not isinstance(table, quant.ScaledTable):
        return f64(table)
    values = f64(table.weight) * f64(table.weight_scale)
    return values.astype(ml_dtypes.bfloat16).astype(np.float64)


@over_cases(CASES, "gather", GATHER)
def test_gather_is_exact(case, implementation):
    """PLE-11."""
    inputs = case.inputs()
    got = call(gather, inputs, implementation)
    rows = np.asarray(inputs["rows"])
    want = _values(inputs["table"])[rows].reshape(*rows.shape[:-1], -1)
    assert got.dtype == inputs["dtype"]
    np.testing.assert_array_equal(f64(got), want)


@over_cases(CASES, "embed", EMBED)
def test_embed_gathers_the_hashed_rows(case, implementation):
    inputs = case.inputs()
    got = call(embed, inputs, implementation)
    history = inputs["hash"].ngram_size - 1
    assert got.dtype == inputs["dtype"]
    for row, ids in zip(f64(got), np.asarray(inputs["ids"]), strict=True):
        rows = np.array(oracle.ngram_rows(ids, inputs["hash"], inputs["eos"])[history:])
        want = _values(inputs["table"])[rows].reshape(len(rows), -1)
        np.testing.assert_array_equal(row, want)


@over_cases(CASES, "mix", MIX)
def test_mix_matches_float64(case, implementation):
    inputs = case.inputs()
    out, window = call(mix, inputs, implementation)
    history, dtype = inputs["history"], inputs["streams"].dtype
    length = history.shape[1]
    np.testing.assert_array_equal(f64(window[:, :length]), f64(history))
    assert out.dtype == dtype
    assert window.dtype == history.dtype
    share = 2.0**-6 if dtype == jnp.bfloat16 else 4e-6
    weights = {n: f64(inputs[n]) for n in ("norm_key", "norm_query", "norm_conv")}
    fixed = dict(taps=f64(inputs["conv1d"]), dilation=inputs["dilation"], eps=inputs["eps"])
    for row in range(len(history)):
        arrays = {n: f64(inputs[n][row]) for n in ("key", "value", "streams", "history")}
        want, normed = oracle.ple_mix(**arrays, **weights, **fixed)
        assert_matches(out[row], want, share=share)
        assert_matches(window[row, length:], normed, share=share)


def _impulse(length) -> dict[str, Any]:
    """Inputs whose normed value is 1 in channel 0 of token 0 and nothing afterwards."""
    value = np.zeros((1, length, 1), np.float32)
    value[0, 0] = 1
    taps = np.array([[1.0, 2.0, 4.0, 8.0]], np.float32)
    zeros = jnp.zeros
    return dict(
        key=zeros((1, length, 1, 1)),
        value=jnp.asarray(value),
        streams=zeros((1, length, 1, 1)),
        norm_key=zeros(1),
        norm_query=zeros(1),
        norm_conv=zeros(1),
        conv1d=jnp.asarray(taps),
        history=zeros((1, 9, 1)),
        dilation=3,
        eps=1e-12,
    )


@pytest.mark.parametrize("implementation", MIX)
def test_taps_are_three_apart(implementation):
    """PLE-10: an impulse comes back at distances 0, 3, 6 and 9 only, newest tap first."""
    inputs = _impulse(13)
    out = np.array(call(mix, inputs, implementation)[0]).reshape(-1)
    # the impulse itself passes half gated beside its convolution
    out[0] -= 0.5
    want = np.zeros(13)
    want[[0, 3, 6, 9]] = [oracle.silu(x) for x in (8.0, 4.0, 2.0, 1.0)]
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", MIX)
def test_one_token_at_a_time_sees_nine_back(implementation):
    """PLE-10: stepping with a history of nine equals the whole; one of three would not."""
    inputs = _impulse(13)
    whole = np.asarray(call(mix, inputs, implementation)[0]).reshape(-1)
    run = jax.jit(lambda arrays: mix(**arrays, dilation=3, eps=1e-12))
    history, found = inputs["history"], []
    for t in range(13):
        now = {k: v[:, t : t + 1] for k, v in inputs.items() if k in ("key", "value", "streams")}
        weights = {k: inputs[k] for k in ("norm_key", "norm_query", "norm_conv", "conv1d")}
        out, window = run(now | weights | {"history": history})
        history = window[:, 1:]
        found.append(float(out[0, 0, 0, 0]))
    np.testing.assert_allclose(found, whole, rtol=1e-6, atol=1e-7)
