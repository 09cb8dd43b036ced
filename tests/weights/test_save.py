"""Writing Hugging Face's layout: the same bits come back."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.config import Config, Quantization, RopeParameters
from qwen4jax.hf_fields import ConfigError
from qwen4jax.weights.directory import INDEX
from qwen4jax.weights.load import load
from qwen4jax.weights.names import leaves
from qwen4jax.weights.save import hf_config, save
from tests.weights.edit import GOLDEN, assert_same, part, random_params, tensors_of

FORMS = [
    Quantization(*forms)
    for forms in itertools.product(
        ("bf16", "fp8", "nvfp4"), ("bf16", "fp8", "nvfp4"), ("bf16", "fp8")
    )
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "forms", FORMS, ids=lambda q: f"{q.experts}-{q.mtp_experts}-{q.ngram_embedding}"
)
def test_every_stored_form_comes_back(tmp_path: Path, forms: Quantization, dtype: str):
    params = random_params(Config.tiny(dtype=dtype, quantization=forms))
    save(params, tmp_path / "x", shard_bytes=200_000)
    assert_same(load(tmp_path / "x"), params)


@pytest.mark.parametrize(
    "changes",
    [
        {"mtp_num_hidden_layers": 0},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"ple_layer_ids": ()},
        {"ple_layer_ids": (1, 3), "ngram_size": 4, "ple_embed_dim": 48, "eos_token_id": (1, 2)},
        {"hc_count": 2, "norm_topk_prob": False, "output_gate_type": None, "rms_norm_eps": 1e-5},
        {"rope_parameters": RopeParameters(1e4, 0.5, (4, 2, 2))},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.filterwarnings("ignore:.*the draft head is off")
def test_every_shape_of_model_comes_back(tmp_path: Path, changes: dict):
    params = random_params(Config.tiny(**changes))
    save(params, tmp_path / "x")
    assert_same(load(tmp_path / "x"), params)


def test_the_configuration_comes_back():
    config = Config.flash_next()
    assert Config.from_dict(json.loads(json.dumps(hf_config(config)))) == config


@pytest.mark.parametrize("case", ["t0", "nvfp4"])
def test_cycles_of_save_and_load_change_nothing_LOD_13(tmp_path: Path, case: str):
    """LOD-13: no +1 is folded into or out of a norm, nothing drifts."""
    first = load(GOLDEN / case / "checkpoint")
    params = first
    for cycle in range(3):
        save(params, tmp_path / str(cycle), stacked_experts=bool(cycle % 2))
        params = load(tmp_path / str(cycle))
        assert_same(params, first)
    original = tensors_of(GOLDEN / case / "checkpoint")
    written = tensors_of(tmp_path / "0")
    for name in original.keys() & written.keys():
        assert written[name].tobytes() == original[name].tobytes()


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_norm_weights_are_stored_as_they_are_LOD_13(tmp_path: Path, value: float):
    """LOD-13: every kind of norm, the GDN output norm among them, has one convention on disk."""
    params = random_params(Config.tiny())
    norms = [path for path, leaf in leaves(params) if "norm" in path.split(".")[-1]]
    kinds = {path.split(".")[-1] for path in norms}
    assert kinds == {
        *("hc_norm", "norm", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "norm_key"),
        *("norm_query", "norm_conv", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    }
    filled = jax.tree.structure(params).unflatten(
        [jnp.full_like(a, value) if path in norms else a for path, a in leaves(params)]
    )
    save(filled, tmp_path / "x")
    for name, array in tensors_of(tmp_path / "x").items():
        if "norm" in name:
            assert (array == np.float32(value)).all()
    assert_same(load(tmp_path / "x"), filled)


def test_shards_and_index(tmp_path: Path):
    params = random_params(Config.tiny())
    save(params, tmp_path / "x", shard_bytes=300_000, label="a label")
    files = sorted(p.name for p in (tmp_path / "x").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 3
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    tensors = tensors_of(tmp_path / "x")
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors.values())
    assert json.loads((tmp_path / "x" / "config.json").read_text())["_name_or_path"] == "a label"
    assert_same(load(tmp_path / "x"), params)


def test_an_existing_directory_is_kept_unless_told(tmp_path: Path):
    first, second = (random_params(Config.tiny(), seed) for seed in (1, 2))
    (tmp_path / "x").mkdir()
    save(first, tmp_path / "x")
    with pytest.raises(FileExistsError, match="not empty"):
        save(second, tmp_path / "x")
    assert_same(load(tmp_path / "x"), first)
    save(second, tmp_path / "x", overwrite=True)
    assert_same(load(tmp_path / "x"), second)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_leaf_that_is_not_as_declared_is_refused(tmp_path: Path):
    params = random_params(Config.tiny())
    wrong = dataclasses.replace(params, lm_head=part(params, "lm_head").astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="lm_head: bfloat16"):
        save(wrong, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = iter(range(1000))

    def fail(path: Path, *_):
        if next(calls) == 2:
            raise OSError("no space left")
        path.write_bytes(b"")

    monkeypatch.setattr("qwen4jax.weights.save.write_file", fail)
    with pytest.raises(OSError, match="no space"):
        save(random_params(Config.tiny()), tmp_path / "x", shard_bytes=200_000)
    assert not list(tmp_path.iterdir())
    with pytest.raises((ConfigError, ValueError)):
        load(tmp_path / "x")
