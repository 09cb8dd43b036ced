"""The table of names against golden checkpoints and against the counts of the released ones."""

import collections
import dataclasses

import pytest

from qwen4jax.config import Config, Quantization
from qwen4jax.params import declare
from qwen4jax.weights.names import Naming, leaves
from tests.weights.edit import GOLDEN, tensors_of


def names(naming: Naming) -> list[str]:
    found = [
        piece.name
        for path, leaf in leaves(declare(naming.config))
        for piece in naming.pieces(path, leaf)
    ]
    return found + [name for name, _ in naming.hash_buffers()]


def released(quantization: Quantization, *stacked_parts: str) -> list[str]:
    config = Config.flash_next(quantization=quantization)
    naming = Naming(config, "model.language_model.")
    stacked = [b for b in naming.expert_blocks() if b.startswith(stacked_parts or ("none",))]
    return names(dataclasses.replace(naming, stacked=frozenset(stacked)))


@pytest.mark.parametrize("case", ["t0", "base", "variant"])
def test_names_are_those_that_transformers_wrote(case: str):
    path = GOLDEN / case / "checkpoint"
    naming = Naming(Config.from_hf(path), stacked=frozenset(["mtp.layers.0.mlp.experts"]))
    found = names(naming)
    assert len(found) == len(set(found))
    assert set(found) == set(tensors_of(path))


def test_the_released_checkpoint_has_as_many_tensors():
    """1,658 tensors in all, 333 of them of the vision tower (spec section 2.8)."""
    found = released(Quantization(), "layers", "mtp")
    assert len(set(found)) == len(found) == 1325
    assert "model.language_model.layers.47.mlp.experts.gate_up_proj" in found
    assert "mtp.layers.0.mlp.experts.down_proj" in found
    assert "lm_head.weight" in found
    assert "model.language_model.embed_tokens.weight" in found


def test_the_released_fp8_checkpoint_has_as_many_tensors():
    """152,089 tensors in all, 333 of them of the vision tower (spec section 2.8)."""
    found = released(Quantization("fp8", "fp8", "fp8"))
    assert len(set(found)) == len(found) == 152_089 - 333
    endings = collections.Counter(name.rpartition(".")[2] for name in found if ".experts." in name)
    assert endings == {"weight": 75_264, "weight_scale_inv": 75_264}


def test_the_released_nvfp4_checkpoint_has_four_tensors_per_matrix():
    found = released(Quantization("nvfp4", "bf16", "fp8"), "mtp")
    endings = collections.Counter(
        name.rpartition(".")[2] for name in found if ".mlp.experts." in name and "mtp" not in name
    )
    each = 48 * 512 * 3
    assert endings == dict.fromkeys(
        ("weight", "weight_scale", "weight_scale_2", "input_scale"), each
    )


def test_shards_stand_in_numeric_order():
    config = Config.tiny(split_ngram_parts=128)
    path = "layers.1.ple.ngram_embedding"
    leaf = dict(leaves(declare(config)))[path]
    pieces = list(Naming(config).pieces(path, leaf))
    assert [p.name.split(".")[-2] for p in pieces] == [f"shard_{i}" for i in range(128)]
    each = leaf.shape[0] // 128
    assert [p.where for p in pieces] == [(slice(i * each, (i + 1) * each),) for i in range(128)]
