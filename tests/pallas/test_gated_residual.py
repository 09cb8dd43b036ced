"""The gated residual against NumPy float64."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.pallas import counters
from qwen4jax.pallas.gated_residual import BOUNDARY, MIX, UPDATE, boundary, limits, mix, update
from qwen4jax.pallas.gated_residual.cases import CASES
from tests import oracle
from tests.pallas.calls import assert_matches, call, f64, over_cases


@over_cases(CASES, "mix", MIX)
def test_mix_matches_float64(case, implementation):
    inputs = case.inputs()
    x, inject, gates = call(mix, inputs, implementation)
    streams = f64(inputs["streams"])
    rows = streams.reshape(-1, *streams.shape[2:])
    down, up = f64(inputs["down"]), f64(inputs["up"])
    inject_weight = None if inputs["inject"] is None else f64(inputs["inject"])
    want = oracle.mix(rows, f64(inputs["norm"]), down, up, inject_weight, inputs["eps"])
    bfloat16 = inputs["streams"].dtype == jnp.bfloat16
    # the normed streams and the low-rank values between the products are rounded too
    inner = 2.0**-7 if bfloat16 else 4e-6
    assert x.dtype == inputs["streams"].dtype
    assert gates.dtype == jnp.float32
    assert_matches(x, want[0].reshape(x.shape), share=inner)
    assert_matches(gates, want[2].reshape(gates.shape), share=inner)
    if inputs["inject"] is None:
        assert inject is None
    else:
        assert inject.dtype == jnp.float32
        assert_matches(inject, want[1].reshape(inject.shape), share=inner)


@over_cases(CASES, "update", UPDATE)
def test_update_matches_float64(case, implementation):
    inputs = case.inputs()
    got = call(update, inputs, implementation)
    added = f64(inputs["inject"])[..., None] * f64(inputs["y"])[..., None, :]
    assert got.dtype == inputs["streams"].dtype
    assert_matches(got, f64(inputs["streams"]) + added, share=1e-7)


@over_cases(CASES, "boundary", BOUNDARY)
def test_boundary_matches_float64(case, implementation):
    inputs = case.inputs()
    streams, x, inject, counter = call(boundary, inputs, implementation)
    want = f64(inputs["streams"])
    if inputs["pending"] is not None:
        weights, y = map(f64, inputs["pending"])
        want = want + weights[..., None] * y[..., None, :]
    assert streams.dtype == x.dtype == inputs["streams"].dtype
    assert_matches(streams, want, share=1e-7)
    # the norm reads the streams as they were rounded
    rows = f64(streams).reshape(-1, *streams.shape[2:])
    down, up = f64(inputs["down"]), f64(inputs["up"])
    inject_weight = None if inputs["inject"] is None else f64(inputs["inject"])
    mixed = oracle.mix(rows, f64(inputs["norm"]), down, up, inject_weight, inputs["eps"])
    inner = 2.0**-7 if streams.dtype == jnp.bfloat16 else 4e-6
    assert_matches(x, mixed[0].reshape(x.shape), share=inner)
    if inputs["inject"] is None:
        assert inject is None
    else:
        assert inject.dtype == jnp.float32
        assert_matches(inject, mixed[1].reshape(inject.shape), share=inner)
    # a meeting of programs turns the sign of its place
    grown = [0] * counters.MEETING + [-(2**31) if implementation == "triton_one" else 0]
    np.testing.assert_array_equal(np.asarray(counter), grown)


@pytest.mark.parametrize("implementation", ["triton_few", "triton_one"])
def test_a_boundary_keeps_a_rows_nan_to_that_row(implementation):
    """And what the counter has been through does not matter."""
    inputs = next(c for c in CASES if str(c) == "boundary-bfloat16_five").inputs()
    *want, counter = call(boundary, inputs, implementation)
    spoilt = inputs["streams"].at[1].set(jnp.nan)
    *got, counter = call(boundary, inputs | dict(streams=spoilt, counter=counter), implementation)
    for a, b in zip(got, want, strict=True):
        assert np.isnan(f64(a)[1]).all()
        np.testing.assert_array_equal(f64(a)[[0, 2, 3, 4]], f64(b)[[0, 2, 3, 4]])
    assert not np.asarray(counter).any()


def test_one_launch_is_cut_into_programs_that_run_at_once():
    assert limits.one_cut(4, 2560, 320) == limits.OneCut(132, 10, 5, 8)
    assert limits.one_cut(16, 2560, 320) is None
    entry = BOUNDARY["triton_one"]
    for device in ("H200", "H100 80GB HBM3", "GH200 480GB", "B200", "GB300"):
        assert entry.missing(f"NVIDIA {device}") is None
    for device in ("H100 PCIe", "H200 MIG 3g.71gb", "GeForce RTX 5090"):
        assert "132 multiprocessors" in entry.missing(f"NVIDIA {device}")


@pytest.mark.parametrize(("rank", "takes"), [(64, True), (320, True), (96, False), (384, False)])
def test_ranks_of_many_rows(rank: int, takes: bool):
    """Shared memory holds the low-rank values of 128 rows, in one or two powers of two."""
    given = dict(streams=(1, 600, 4, 128), norm=(512,), down=(rank, 512), up=(512, rank))
    arrays = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in given.items()}
    reason = limits.refuses_many(pending=None, inject=None, **arrays)
    assert (reason is None) == takes


@pytest.mark.parametrize("implementation", MIX)
def test_each_stream_is_normed_alone(implementation):
    """NUM-17: the backbone's norm takes each stream for itself, whatever the others' size."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1, 1, 4, 32))
    scales = np.array([1.0, 10.0, 100.0, 1000.0])
    streams = jnp.asarray(rows * scales[:, None], jnp.float32)
    zeros = jnp.zeros
    # gates of 1/2 everywhere: the input is half the mean of the normed streams
    inputs = dict(streams=streams, norm=zeros(128), down=zeros((8, 128)), up=zeros((128, 8)))
    x, inject, gates = call(mix, inputs | dict(inject=zeros((4, 128)), eps=1e-6), implementation)
    np.testing.assert_array_equal(np.asarray(gates), 0.5)
    np.testing.assert_array_equal(np.asarray(inject), 1.0)
    normed = rows[0, 0] / np.sqrt((rows[0, 0] ** 2).mean(-1, keepdims=True))
    np.testing.assert_allclose(np.sqrt((normed**2).mean(-1)), 1)
    np.testing.assert_allclose(np.asarray(x)[0, 0], normed.mean(0) / 2, rtol=1e-5, atol=1e-6)


# alone in a program, as where a draft row's output is not needed but its residual is
_OPTIMISED = """
import jax, jax.numpy as jnp, numpy as np
from qwen4jax.pallas.gated_residual.reference import mix
rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
inputs = draw(1, 512, 4, 64), 0.1 * draw(256), 0.1 * draw(16, 256), 0.3 * draw(256, 16)
read = lambda *given: mix(*given, None, eps=1e-6)[0]
print(float(jnp.abs(read(*inputs) - jax.jit(read)(*inputs)).max()))
"""


def test_many_rows_are_right_in_an_optimised_program():
    """The tests compile without optimising, users do not: XLA's CPU fusion was wrong by 0.2."""
    done = subprocess.run(
        [sys.executable, "-c", _OPTIMISED],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 1e-5
