"""The dense projection against NumPy float64."""

from qwen4jax.pallas.skinny_matmul import (
    IMPLEMENTATIONS,
    PROJECTIONS,
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
