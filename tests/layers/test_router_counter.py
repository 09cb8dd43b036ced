"""The zeros by which a router's programs learn who is last serve every layer of a step."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from qwen4jax.model import step
from tests.tiny import ROWS, T0, new_state, t0


def test_each_router_gets_what_the_one_before_it_left(monkeypatch: pytest.MonkeyPatch):
    """Fresh ones would be a launch more of every layer; the per-layer embedding keeps them too."""
    assert T0.ple_layer_ids
    layer = importlib.import_module("qwen4jax.layers.moe")
    router, given, left = layer.router, [], []

    def seen(x: Any, gate: Any, shared_gate: Any, k: int, counter: Any, **more: Any) -> Any:
        chosen, zeros = router(x, gate, shared_gate, k, counter, **more)
        # a value of its own, though here it is what came in
        given.append(counter)
        left.append(zeros + 0)
        return chosen, left[-1]

    monkeypatch.setattr(layer, "router", seen)
    tokens, count = jnp.zeros((ROWS, 2), jnp.int32), jnp.full(ROWS, 2, jnp.int32)
    # made outside of what is traced, for they are kept for other tests
    params = t0()
    jax.make_jaxpr(lambda *a: step(params, *a, final=True)[0].length)(new_state(), tokens, count)
    assert len(given) == T0.num_hidden_layers
    assert given[0] is None
    assert all(one is other for one, other in zip(given[1:], left, strict=False))
