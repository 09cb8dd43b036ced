"""Routing and routed experts against NumPy float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwen4jax import quant
from qwen4jax.pallas import counters
from qwen4jax.pallas.moe import EXPERTS, ROUTE, ROUTER, experts, route, router
from qwen4jax.pallas.moe.cases import CASES
from tests import oracle
from tests.pallas.calls import assert_matches, call, f64, over_cases

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def values(stored) -> np.ndarray:
    """The matrices that a stored form stands for, by its definition."""
    if isinstance(stored, quant.TiledNvfp4):
        # `tests/weights/test_arrange.py` has the order of tiles
        stored = stored.stored()
    if isinstance(stored, quant.Nvfp4):
        packed = np.asarray(stored.weight)
        code = np.stack([packed & 15, packed >> 4], axis=-1).reshape(stored.shape)
        sign = np.where(code & 8, -1.0, 1.0)
        scale = np.repeat(f64(stored.weight_scale), 16, axis=-1)
        return sign * E2M1[code & 7] * scale * f64(stored.weight_scale_2)[..., None, None]
    if isinstance(stored, quant.BlockFp8):
        out, scale = f64(stored.weight), f64(stored.weight_scale_inv)
        for i in range(scale.shape[-2]):
            for j in range(scale.shape[-1]):
                block = (..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                out[block] *= scale[..., i, j, None, None]
        return out
    return f64(stored)


@over_cases(CASES, "route", ROUTE)
def test_route_matches_float64(case, implementation):
    inputs = case.inputs()
    ids, weights = call(route, inputs, implementation)
    want_ids, want = oracle.route(f64(inputs["logits"]), inputs["k"], inputs["renormalize"])
    np.testing.assert_array_equal(np.asarray(ids), want_ids)
    assert weights.dtype == jnp.float32
    assert_matches(weights, want)


@over_cases(CASES, "router", ROUTER)
def test_router_matches_float64(case, implementation):
    inputs = case.inputs()
    (ids, weights, share), counter = call(router, inputs, implementation)
    x, gate, shared_gate = (f64(inputs[name]) for name in ("x", "gate", "shared_gate"))
    logits = (x @ gate.T).astype(inputs["x"].dtype).astype(float)
    # in the order of logits: far apart, shares are equal that logits are not
    want_ids = np.argsort(-logits, axis=-1, kind="stable")[:, : inputs["k"]]
    np.testing.assert_array_equal(np.asarray(ids), want_ids)
    _, want = oracle.route(logits, inputs["k"], inputs["renormalize"])
    assert weights.dtype == jnp.float32
    assert_matches(weights, want)
    np.testing.assert_array_equal(f64(share), x @ shared_gate.T)
    # what the next call begins with
    np.testing.assert_array_equal(np.asarray(counter), np.zeros(counters.LENGTH))


def test_a_router_keeps_a_rows_nan_to_that_row():
    inputs = next(c for c in CASES if str(c) == "router-two_groups").inputs()
    want, _ = call(router, inputs, "triton")
    spoilt = inputs | {"x": inputs["x"].at[8].set(jnp.nan)}
    got, counter = call(router, spoilt, "triton")
    others = np.arange(10) != 8
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
    # ids that index something, whatever they are
    np.testing.assert_array_equal(np.asarray(got.ids)[8], np.arange(inputs["k"]))
    assert np.isnan(np.asarray(got.weights)[8]).all()
    assert not np.asarray(counter).any()


@pytest.mark.parametrize("name", ["nvfp4_sorted", "bfloat16_sorted"])
def test_many_tokens_keep_a_rows_nan_to_that_row(name: str):
    """Of the first token, whose row the columns of pairs that are none get."""
    inputs = next(c for c in CASES if c.function == "experts" and c.name == name).inputs()
    want = call(experts, inputs, "triton_sorted")
    got = call(experts, inputs | {"x": inputs["x"].at[0].set(jnp.nan)}, "triton_sorted")
    assert np.isnan(f64(got)[0]).all()
    np.testing.assert_array_equal(f64(got)[1:], f64(want)[1:])


@pytest.mark.parametrize("name", ["bfloat16_tiles", "fp8_tiles", "shared_fp8_tiles_gathered"])
def test_columns_keep_a_rows_nan_to_that_row(name: str):
    inputs = next(c for c in CASES if c.function == "experts" and c.name == name).inputs()
    want = call(experts, inputs, "mosaic_hopper")
    got = call(experts, inputs | {"x": inputs["x"].at[0, 0].set(jnp.nan)}, "mosaic_hopper")
    assert np.isnan(f64(got)[0]).all()
    np.testing.assert_array_equal(f64(got)[1:], f64(want)[1:])


# NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000])
def test_ids_of_a_row_of_nan_index_an_expert(implementation: str, bits: int):
    logits = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    logits[1] = np.array(bits, np.uint32).view(np.float32)
    ids, weights = call(
        route, dict(logits=jnp.asarray(logits), k=4, renormalize=True), implementation
    )
    assert (np.asarray(ids) < 5).all()
    assert np.isnan(np.asarray(weights)[1]).all()
    assert np.isfinite(np.asarray(weights)[[0, 2]]).all()


@over_cases(CASES, "experts", EXPERTS)
def test_experts_match_float64(case, implementation):
    inputs = case.inputs()
    got = call(experts, inputs, implementation)
    dtype = inputs["x"].dtype
    gate_up, down = values(inputs["gate_up"]), values(inputs["down"])
    x, weights = f64(inputs["x"]), f64(inputs["weights"])
    want = np.zeros(x.shape)
    for t, chosen in enumerate(np.asarray(inputs["ids"])):
        for e, w in zip(chosen, weights[t], strict=True):
            want[t] += w * oracle.swiglu(x[t], gate_up[e, 0], gate_up[e, 1], down[e])
    shared = inputs.get("shared")
    if shared is not None:
        gate, up, own_down, logit = (f64(a) for a in shared)
        for t in range(len(x)):
            want[t] += oracle.sigmoid(logit[t]) * oracle.swiglu(x[t], gate, up, own_down)
    assert got.dtype == inputs.get("out_dtype", jnp.float32)
    # in bfloat16 the dequantised weights and the hidden values are rounded on the way
    assert_matches(got, want, share=4e-6 if dtype == jnp.float32 else 2.0**-7)


def test_hidden_values_are_rounded_to_the_activations_dtype():
    """Both paths, of few and of many tokens, hand the same bfloat16 values to the second matrix."""
    few = next(c for c in CASES if str(c) == "experts-bfloat16_few").inputs()
    many = {k: jnp.concatenate([few[k]] * 8) for k in ("x", "ids", "weights")}
    one = np.asarray(call(experts, few))
    np.testing.assert_allclose(np.asarray(call(experts, few | many))[:2], one, rtol=2e-5, atol=2e-6)
    gate_up, down = (f64(few[k]) for k in ("gate_up", "down"))
    x, ids, w = f64(few["x"]), np.asarray(few["ids"]), f64(few["weights"])
    want = np.zeros_like(x)
    for t in range(len(x)):
        for e, share in zip(ids[t], w[t], strict=True):
            h = oracle.silu(x[t] @ gate_up[e, 0].T) * (x[t] @ gate_up[e, 1].T)
            want[t] += share * h.astype(ml_dtypes.bfloat16).astype(float) @ down[e].T
    np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-4)


def every_code(rows: int) -> quant.Nvfp4:
    """A matrix [1, rows, 128] of all 16 codes in each scale group, with all 256 scales."""
    codes = np.tile(np.arange(16, dtype=np.uint8), 8)
    packed = np.tile(codes[::2] | codes[1::2] << 4, (1, rows, 1))
    scales = np.resize(np.arange(256, dtype=np.uint8), (1, rows, 8)).view(ml_dtypes.float8_e4m3fn)
    return quant.Nvfp4(packed, scales, np.array([0.25], np.float32))


def test_nvfp4_products_are_exact_in_the_kernel():
    """All 16 codes with all 256 scales, NaN among them, against float64: no bit differs."""
    from qwen4jax.pallas.moe.triton_down import down_kernel
    from tests.pallas.triton_interpreter import interpret

    tokens, rows, columns = 8, 64, 128
    down = every_code(rows)
    want = values(down)[0]
    size = dict(C=128, L=64, FORM="nvfp4", W=4, AHEAD=1, ASK=False, SHARED=0, LISTED=0, SUM=1)
    for code in range(16):
        # token n reads this code of scale group n
        hidden = np.zeros((tokens, columns), ml_dtypes.bfloat16)
        hidden[np.arange(tokens), 16 * np.arange(tokens) + code] = 1.0
        ids, share = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
        tiles = quant.TiledNvfp4.of(down)
        stored = np.asarray(tiles.weight), np.asarray(tiles.weight_scale), down.weight_scale_2
        outs = [((1,), jnp.int32), ((tokens, rows), jnp.float32), ((tokens, rows), jnp.float32)]
        _, parts, got = interpret(
            down_kernel,
            (1, tokens),
            [hidden, ids, ids, *stored, hidden, share, share, np.zeros(1, np.int32)],
            [jax.ShapeDtypeStruct(*out) for out in outs],
            dict(
                size,
                T=tokens,
                TP=8,
                K=1,
                KP=1,
                D=rows,
                F=columns,
                SHARED=0,
                N=8,
                LISTED=0,
                PLACES=tokens,
            ),
            {9: 0},
        )
        np.testing.assert_array_equal(parts, got)
        np.testing.assert_array_equal(f64(got), hidden.astype(float) @ want.T)


def test_nvfp4_products_of_many_tokens_are_exact_in_the_kernel():
    """Likewise; a tile of 128 pairs reads every code of every scale group."""
    from qwen4jax.pallas.moe.triton_many import ordered
    from qwen4jax.pallas.moe.triton_many_products import down_many_kernel
    from tests.pallas.triton_interpreter import interpret

    pairs, rows, columns = 128, 128, 128
    down = every_code(rows)
    tiles = quant.TiledNvfp4.of(down)
    hidden = np.eye(pairs, dtype=ml_dtypes.bfloat16)
    (parts,) = interpret(
        down_many_kernel,
        (1, 1),
        [
            np.asarray(ordered(jnp.asarray(hidden), "nvfp4")),
            np.zeros(1, np.int32),
            np.arange(pairs, dtype=np.int32),
            *(np.asarray(tiles.weight), np.asarray(tiles.weight_scale), down.weight_scale_2),
        ],
        [jax.ShapeDtypeStruct((pairs, rows), jnp.float32)],
        dict(D=rows, F=columns, C=128, L=64, FORM="nvfp4", ROWS=pairs, W=4, STAGES=1),
    )
    np.testing.assert_array_equal(f64(parts), hidden.astype(float) @ values(down)[0].T)
