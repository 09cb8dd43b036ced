"""The dense projection against NumPy float64."""

import jax.numpy as jnp
import numpy as np

from qwen4jax.pallas.skinny_matmul import (
    ARGMAX,
    IMPLEMENTATIONS,
    PROJECTIONS,
    argmax,
    projections,
    skinny_matmul,
)
from qwen4jax.pallas.skinny_matmul.cases import CASES
from qwen4jax.quant import dequantize
from tests.pallas.calls import assert_matches, call, f64, over_cases


@over_cases(CASES, "skinny_matmul", IMPLEMENTATIONS)
def test_matches_float64(case, implementation):
    inputs = case.inputs()
    got = call(skinny_matmul, inputs, implementation)
    want = f64(inputs["x"]) @ f64(dequantize(inputs["w"])).T
    if inputs["bias"] is not None:
        want = want + f64(inputs["bias"])
    assert got.dtype == inputs.get("out_dtype", inputs["x"].dtype)
    assert_matches(got, want)


@over_cases(CASES, "skinny_matmul", IMPLEMENTATIONS)
def test_a_row_is_the_same_in_other_company(case, implementation):
    """Reversed rows give reversed results, but for the order of their sums."""
    inputs = case.inputs()
    if inputs["x"].ndim != 2:
        inputs["x"] = inputs["x"].reshape(-1, inputs["x"].shape[-1])
    forth = f64(call(skinny_matmul, inputs, implementation))
    back = call(skinny_matmul, inputs | {"x": inputs["x"][::-1]}, implementation)[::-1]
    assert_matches(back, forth, steps=2.0)


@over_cases(CASES, "projections", PROJECTIONS)
def test_several_match_float64(case, implementation):
    inputs = case.inputs()
    results = call(projections, inputs, implementation)
    dtypes = inputs["out_dtypes"] or [inputs["x"].dtype] * len(inputs["weights"])
    biases = inputs.get("biases") or [None] * len(dtypes)
    for got, w, bias, dtype in zip(results, inputs["weights"], biases, dtypes, strict=True):
        assert got.dtype == dtype
        added = 0 if bias is None else f64(bias)
        assert_matches(got, f64(inputs["x"]) @ f64(dequantize(w)).T + added)


@over_cases(CASES, "argmax", ARGMAX)
def test_the_largest_is_the_first_of_the_largest(case, implementation):
    """Ids where `jnp.argmax` finds them in the logits, and a row's infinities and NaNs noticed."""
    inputs = case.inputs()
    # the kernel's own sums, so that what is equal there is equal here
    own = "reference" if implementation == "separate" else implementation
    logits = call(skinny_matmul, inputs | dict(bias=None, out_dtype=jnp.float32), own)
    ids, finite = call(argmax, inputs, implementation)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(finite, np.isfinite(logits).all(axis=-1))


def test_argmax_takes_the_lowest_of_equal_ids():
    case = next(c for c in CASES if c.function == "argmax" and c.name == "ties")
    ids, _ = call(argmax, case.inputs(), "triton")
    assert ids.tolist() == [17, 3, 70, 0]


def test_argmax_notices_what_is_not_finite():
    case = next(c for c in CASES if c.function == "argmax" and c.name == "not_finite")
    ids, finite = call(argmax, case.inputs(), "triton")
    assert ids[:4].tolist() == [40, 0, 77, 0]
    assert finite.tolist() == [False, False, False, False, True]
