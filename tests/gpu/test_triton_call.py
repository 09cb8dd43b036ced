"""Both routes of a Triton kernel on a device: the same results, in shared memory too."""

import jax
import numpy as np
import pytest

from qwen4jax.pallas import triton_call
from qwen4jax.pallas.gated_delta import cases as gated_delta
from qwen4jax.pallas.gated_delta import commit
from qwen4jax.pallas.skinny_matmul import cases as skinny_matmul
from qwen4jax.pallas.skinny_matmul import projections


@pytest.mark.parametrize(
    ("function", "cases", "name"),
    [(projections, skinny_matmul.CASES, "delta_in_4"), (commit, gated_delta.CASES, "released_8")],
)
def test_both_routes_agree(function, cases, name, monkeypatch):
    pytest.importorskip("jax_triton")
    (case,) = (c for c in cases if c.function == function.__name__ and c.name == name)
    found = {}
    for route in ("native", "jax_triton"):
        monkeypatch.setattr(triton_call, "default_route", lambda route=route: route)
        inputs = case.inputs()
        arrays = {k: v for k, v in inputs.items() if jax.tree.leaves(v)}
        static = {k: v for k, v in inputs.items() if k not in arrays}
        call = jax.jit(lambda arrays: function(**arrays, **static, implementation="triton"))  # noqa: B023
        found[route] = jax.device_get(call(arrays))
    for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-2
        )
