"""Placements of parameters and states, and the model on four devices against one."""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from qwen4jax.config import Config, Quantization
from qwen4jax.params import axis_sizes, declare
from qwen4jax.sharding import (
    EXPERT_AND_HEAD_PARALLEL,
    partition_spec,
    shardings,
    state_shardings,
)
from qwen4jax.state import abstract_state
from tests.golden.cases import read_case

FOUR = AbstractMesh((4,), ("model",))
QUANTISED = Quantization("nvfp4", "fp8", "fp8")


def bytes_per_device(tree: Any, placements: Any) -> int:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(placements), strict=True)
    return sum(
        math.prod(placement.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf, placement in pairs
    )


def test_axes_become_a_partition_spec():
    spec = partition_spec(("experts", "hidden", "expert_hidden"))
    assert spec == PartitionSpec("model", None, None)
    rules = {"experts": ("data", "model"), "hidden": None, "expert_hidden": "tensor"}
    spec = partition_spec(("experts", "hidden", "expert_hidden"), rules)
    assert spec == PartitionSpec(("data", "model"), None, "tensor")
    assert partition_spec((), rules) == PartitionSpec()


@pytest.mark.parametrize(
    ("axes", "rules", "message"),
    [
        (("experts", "hiden"), EXPERT_AND_HEAD_PARALLEL, "'hiden' is no logical axis"),
        (("experts",), {"expert": "model"}, "'expert' is no logical axis"),
        (
            ("experts", "hidden"),
            {"experts": "model", "hidden": ("data", "model")},
            "'model' is given to two of the axes experts hidden",
        ),
    ],
)
def test_wrong_rules_are_named(axes: tuple[str, ...], rules: Any, message: str):
    with pytest.raises(ValueError, match=message):
        partition_spec(axes, rules)


@pytest.mark.parametrize("quantization", [Quantization(), QUANTISED])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_released_model_divides(quantization: Quantization, devices: int):
    """Nearly all of it is spread: a device holds little more than its share."""
    config = Config.flash_next(quantization=quantization)
    declared = declare(config)
    placements = shardings(config, AbstractMesh((devices,), ("model",)))
    assert jax.tree.structure(placements) == jax.tree.structure(declared)
    held = sum(t.nbytes for t in jax.tree.leaves(declared))
    assert bytes_per_device(declared, placements) < 1.1 * held / devices


def test_trees_are_congruent_with_what_was_loaded():
    """Also where a checkpoint lacks something that the declaration has."""
    params: Any = read_case("nvfp4").params
    without = jax.tree.map(
        lambda w: w.replace(input_scale=None) if hasattr(w, "input_scale") else w,
        params,
        is_leaf=lambda w: hasattr(w, "input_scale"),
    )
    for tree in (params, without):
        placements = shardings(tree, FOUR)
        assert jax.tree.structure(placements) == jax.tree.structure(tree)
    experts: Any = placements.layers[0].mlp.experts.down_proj
    assert experts.weight.spec == PartitionSpec("model", None, None)
    assert experts.weight_scale_2.spec == PartitionSpec("model")
    assert placements.layers[0].mlp.shared_expert_gate.spec == PartitionSpec(None, None)


def test_state_axes_are_those_of_its_annotations():
    config = Config.tiny(num_key_value_heads=4)
    state = abstract_state(config, slots=8, max_length=64)
    rules = {**EXPERT_AND_HEAD_PARALLEL, "kv_heads": "model"}
    placements: Any = state_shardings(state, FOUR, rules)
    assert jax.tree.structure(placements) == jax.tree.structure(state)
    assert placements.layers[0].recurrent.spec == PartitionSpec(None, "model", None, None)
    assert placements.layers[3].key.spec == PartitionSpec(None, None, "model", None)
    assert placements.mtp.ring.spec == PartitionSpec(None, None, None)
    by_slot: Any = state_shardings(state, FOUR, {"slots": "model"})
    assert by_slot.length.spec == PartitionSpec("model")
    assert by_slot.ple[0].spec == PartitionSpec("model", None, None)
    assert by_slot.layers[3].key.spec == PartitionSpec(None, None, None, None)


def test_sizes_that_do_not_divide_are_named():
    config = Config.tiny(num_experts=6)
    message = r"layers\.0\.mlp\.gate: axis 'experts' of size 6 .* 4 devices"
    with pytest.raises(ValueError, match=message):
        shardings(config, FOUR)
    state = abstract_state(config, slots=3, max_length=64)
    with pytest.raises(ValueError, match=r"length: axis 'slots' of size 3"):
        state_shardings(state, FOUR, {"slots": "model"})
    with pytest.raises(ValueError, match=r"the mesh has no axis 'tensor', only model"):
        shardings(config, FOUR, {"experts": "tensor"})


def test_every_rule_is_for_an_axis_of_the_parameters():
    assert set(EXPERT_AND_HEAD_PARALLEL) <= set(axis_sizes(Config.tiny()))


FOUR_DEVICES = """
    import jax, jax.numpy as jnp, numpy as np
    from qwen4jax import Config, forward, init_params
    from qwen4jax.config import Quantization
    from qwen4jax.decode.prefill import decode_token, prefill
    from qwen4jax.sharding import shardings, state_shardings
    from qwen4jax.state import init_state

    config = Config.tiny(
        num_hidden_layers=2, layer_types=("linear_attention", "qwen_sparse_attention"),
        ple_layer_ids=(1,), mtp_num_hidden_layers=0,
        quantization=Quantization("nvfp4", "fp8", "fp8"),
    )
    params = init_params(config, 1)
    mesh = jax.make_mesh((4,), ("model",))
    spread = jax.device_put(params, shardings(params, mesh))
    codes = spread.layers[0].mlp.experts.down_proj.weight
    assert len(codes.sharding.device_set) == 4
    assert codes.addressable_shards[0].data.shape[0] == config.num_experts // 4
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (2, 40))
    one, four = forward(params, tokens), forward(spread, tokens)
    assert len(four.sharding.device_set) == 4
    worst = float(jnp.abs(one - np.asarray(four)).max() / jnp.abs(one).max())
    assert worst < 1e-5, worst

    state = init_state(config, slots=2, max_length=64, page_size=8)
    state = jax.device_put(state, state_shardings(state, mesh))
    state, _ = prefill(spread, state, tokens[:, :39].tolist(), [0, 1], chunk=64)
    state, logits = decode_token(spread, state, jnp.asarray(tokens[:, 39]), jnp.ones(2, bool))
    worst = float(np.abs(np.asarray(logits) - one[:, 39]).max() / jnp.abs(one).max())
    assert worst < 1e-5, worst
    print("equal")
"""


def test_four_devices_compute_what_one_does():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(FOUR_DEVICES)],
        cwd=Path(__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
