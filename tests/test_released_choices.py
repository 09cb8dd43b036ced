"""The released model on an H200 takes the measured kernel for every operation; nothing refuses.

Only traced, for a device that is not here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from qwen4jax.config import LINEAR, SPARSE, Config, ExpertFormat, Quantization
from qwen4jax.decode.burst import empty
from qwen4jax.decode.prefill import prefill_chunk
from qwen4jax.decode.round import next_round
from qwen4jax.decode.stopping import Controls
from qwen4jax.pallas import registry
from qwen4jax.params import declare
from qwen4jax.state import abstract_state
from qwen4jax.weights.arrange import tiled
from tests.kernel_choices import (
    BOTH,
    PREFILL,
    ROUND,
    WITHOUT_KERNEL,
    Choice,
    fallen_back,
    recorded,
)

DRAFTS = 3


def place(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.cache
def model(experts: ExpertFormat, **changes: Any) -> Any:
    """Shapes of the released model with four layers, the experts in the order of `load`."""
    config = Config.flash_next(
        num_hidden_layers=4,
        layer_types=(LINEAR, LINEAR, LINEAR, SPARSE),
        quantization=Quantization(experts=experts, mtp_experts=experts, ngram_embedding="fp8"),
        **changes,
    )
    return jax.eval_shape(tiled, jax.tree.map(place, declare(config)))


def state(params: Any, slots: int) -> Any:
    return abstract_state(params.config, slots=slots, max_length=65536, drafts=DRAFTS)


def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def round_choices(params: Any, slots: int) -> list[Choice]:
    """Of a greedy round."""

    def one_round(params: Any, state: Any) -> Any:
        controls = Controls(jnp.zeros(slots, jnp.int32), stop_ids=jnp.zeros((slots, 4), jnp.int32))
        active = jnp.ones(slots, bool)
        # leaves: the type of a burst is checked when shapes take the arrays' places
        return jax.tree.leaves(next_round(params, state, controls, active, empty(slots, DRAFTS)))

    with registry.using(device="NVIDIA H200"), recorded() as found:
        jax.eval_shape(one_round, params, state(params, slots))
    return found


def prefill_choices(params: Any, tokens: int) -> list[Choice]:
    """Of a chunk of one prompt."""
    arguments = ints(1), ints(1, tokens), ints(1)
    with registry.using(device="NVIDIA H200"), recorded() as found:
        jax.eval_shape(prefill_chunk, params, state(params, 1), *arguments)
    return found


@pytest.mark.parametrize("experts", ["nvfp4", "fp8"])
@pytest.mark.parametrize("slots", [1, 32])
def test_a_round_takes_the_measured_kernels(experts: ExpertFormat, slots: int):
    found = round_choices(model(experts), slots)
    assert {c.operation for c in found} >= BOTH | ROUND
    assert (DRAFTS + 1) * slots in {c.rows for c in found}
    assert not fallen_back(found)


@pytest.mark.parametrize("experts", ["nvfp4", "fp8"])
@pytest.mark.parametrize("tokens", [512, 2048])
def test_a_prefill_takes_the_measured_kernels(experts: ExpertFormat, tokens: int):
    found = prefill_choices(model(experts), tokens)
    assert {c.operation for c in found} >= BOTH | PREFILL
    assert tokens in {c.rows for c in found}
    assert not fallen_back(found)


def test_a_refusal_is_seen():
    """Widths that some kernels refuse; and what is listed is there."""
    params = model("nvfp4", hc_lowrank=24, moe_intermediate_size=192)
    refused = {c.operation for c in fallen_back(round_choices(params, 1))}
    assert refused == {"gated_residual.boundary", "moe.experts"}
    assert WITHOUT_KERNEL.keys() <= registry.operations().keys()
