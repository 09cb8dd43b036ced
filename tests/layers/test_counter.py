"""What launches count by serves every boundary and router of a step."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from qwen4jax.model import step
from tests.tiny import ROWS, T0, new_state, t0


def test_each_call_gets_the_counter_that_the_one_before_it_left(monkeypatch: pytest.MonkeyPatch):
    """A fresh one would be a launch more, and beside a launch that meets another could meet."""
    assert T0.ple_layer_ids
    moe = importlib.import_module("qwen4jax.layers.moe")
    residual = importlib.import_module("qwen4jax.layers.gated_residual")
    router, boundary, given, left = moe.router, residual.boundary, [], []

    def noted(counter: Any, results: Any) -> Any:
        # a value of its own, though here it is what came in
        given.append(counter)
        left.append(results[-1] + 0)
        return *results[:-1], left[-1]

    def routed(x: Any, gate: Any, shared_gate: Any, k: int, counter: Any, **more: Any) -> Any:
        return noted(counter, router(x, gate, shared_gate, k, counter, **more))

    def mixed(*arrays: Any, **more: Any) -> Any:
        return noted(arrays[6], boundary(*arrays, **more))

    monkeypatch.setattr(moe, "router", routed)
    monkeypatch.setattr(residual, "boundary", mixed)
    tokens, count = jnp.zeros((ROWS, 2), jnp.int32), jnp.full(ROWS, 2, jnp.int32)
    # made outside of what is traced, for they are kept for other tests
    params = t0()
    jax.make_jaxpr(lambda *a: step(params, *a, final=True)[0].length)(new_state(), tokens, count)
    assert len(given) == 3 * T0.num_hidden_layers
    assert given[0] is None
    assert all(one is other for one, other in zip(given[1:], left, strict=False))
