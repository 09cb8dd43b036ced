"""Stores of converted parameters: bit-exact, resumable, never half valid."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.ablation import Ablation
from qwen4jax.config import Config, Quantization
from qwen4jax.params import Params
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import load
from qwen4jax.weights.store import MANIFEST, restore, store
from tests.weights.edit import GOLDEN, assert_same, edit_json, part, random_params

PARTS = 8  # embedding, four layers, mixer, head, draft head


@pytest.fixture(scope="module")
def params() -> Params:
    config = Config.tiny(dtype="bfloat16", quantization=Quantization("nvfp4", "fp8", "fp8"))
    return random_params(config)


@pytest.fixture(scope="module")
def stored(params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "x"
    assert store(params, path, source="a test") == PARTS
    return path


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    shutil.copytree(stored, tmp_path / "x")
    return tmp_path / "x"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        restore(path)
    return str(caught.value)


def test_stored_forms_come_back(stored: Path, params: Params):
    assert_same(restore(stored), params)


@pytest.mark.parametrize("case", ["t0", "nvfp4"])
def test_loaded_checkpoints_come_back(tmp_path: Path, case: str):
    loaded = load(GOLDEN / case / "checkpoint")
    store(loaded, tmp_path / "x", source=case)
    assert_same(restore(tmp_path / "x"), loaded)


def test_variants_come_back(tmp_path: Path):
    """A weight-only checkpoint, float32 block scales, a configuration full of lists."""
    config = Config.tiny(
        quantization=Quantization("nvfp4", "fp8", "bf16"),
        ablation=Ablation(index_share="share"),
        eos_token_id=(1, 2),
        ple_layer_ids=(1, 2),
    )
    params = random_params(config)
    weight_only = dataclasses.replace(
        params,
        layers=tuple(_without_input_scales(layer) for layer in params.layers),
        mtp=_with_wide_scales(params.mtp),
    )
    assert part(params, "layers.0.mlp.experts.down_proj.input_scale") is not None
    store(weight_only, tmp_path / "x")
    assert_same(restore(tmp_path / "x"), weight_only)


def _without_input_scales(layer):
    experts = layer.mlp.experts
    experts = dataclasses.replace(
        experts,
        gate_up_proj=dataclasses.replace(experts.gate_up_proj, input_scale=None),
        down_proj=dataclasses.replace(experts.down_proj, input_scale=None),
    )
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, experts=experts))


def _with_wide_scales(mtp):
    (layer,) = mtp.layers
    experts = layer.mlp.experts

    def widen(w):
        return dataclasses.replace(w, weight_scale_inv=w.weight_scale_inv.astype(jnp.float32))

    experts = dataclasses.replace(
        experts, gate_up_proj=widen(experts.gate_up_proj), down_proj=widen(experts.down_proj)
    )
    mlp = dataclasses.replace(layer.mlp, experts=experts)
    return dataclasses.replace(mtp, layers=(dataclasses.replace(layer, mlp=mlp),))


def test_the_manifest_says_what_it_is(stored: Path):
    manifest = json.loads((stored / MANIFEST).read_text())
    assert manifest["source"] == "a test"
    assert manifest["package"].startswith("qwen4jax")
    assert manifest["config"]["quantization"]["experts"] == "nvfp4"
    tensor = manifest["parts"]["layers.1"]["layers.1.ple.ngram_embedding.weight"]
    assert tensor["dtype"] == "float8_e4m3fn"
    assert tensor["shape"][1] == 8


def test_a_finished_store_is_left_alone(copy: Path, params: Params):
    assert store(params, copy) == 0
    assert_same(restore(copy), params)


@pytest.mark.parametrize("at", [0, 3, PARTS - 1])
def test_an_interrupted_store_is_completed(
    tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch, at: int
):
    path = tmp_path / "x"
    with monkeypatch.context() as patch:
        _fail_in_part(patch, at)
        with pytest.raises(KeyboardInterrupt):
            store(params, path)
    assert "there is no manifest.json" in refusal(path)
    assert store(params, path) == PARTS - at
    assert_same(restore(path), params)


def _fail_in_part(patch: pytest.MonkeyPatch, at: int) -> None:
    from orbax.checkpoint import StandardCheckpointer

    original, calls = StandardCheckpointer.save, iter(range(100))

    def save(self, *arguments, **keywords):
        if next(calls) == at:
            raise KeyboardInterrupt
        return original(self, *arguments, **keywords)

    patch.setattr(StandardCheckpointer, "save", save)


def test_other_parameters_replace_a_store(copy: Path, params: Params):
    changed = dataclasses.replace(params, lm_head=part(params, "lm_head") + 1)
    assert store(changed, copy) == 1
    assert_same(restore(copy), changed)
    shallow = random_params(Config.tiny(num_hidden_layers=3, layer_types=("linear_attention",) * 3))
    store(shallow, copy)
    assert_same(restore(copy), shallow)
    assert not (copy / "blocks" / "layers.3").exists()


def test_a_part_that_was_removed_is_written_again(copy: Path, params: Params):
    shutil.rmtree(copy / "blocks" / "layers.2")
    assert "part layers.2" in refusal(copy)
    assert store(params, copy) == 1
    assert_same(restore(copy), params)


def test_another_directory_is_never_touched(tmp_path: Path, params: Params):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="no store"):
        store(params, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_damaged_part_is_refused(copy: Path, params: Params):
    """Orbax may or may not notice; the checksum does."""
    changed = dataclasses.replace(params, lm_head=part(params, "lm_head") + 1)
    store(changed, copy.parent / "other")
    shutil.rmtree(copy / "blocks" / "lm_head")
    shutil.copytree(copy.parent / "other" / "blocks" / "lm_head", copy / "blocks" / "lm_head")
    assert "part lm_head: lm_head is not what was stored" in refusal(copy)
    assert np.array_equal(part(restore(copy, verify=False), "lm_head"), part(changed, "lm_head"))


def test_damaged_bytes_are_refused(copy: Path):
    for file in (copy / "blocks" / "layers.0").rglob("*"):
        if file.is_file() and file.stat().st_size > 10_000:
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 0xFF
            file.write_bytes(raw)
    assert "part layers.0" in refusal(copy)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda m: m.update(format=2), "format 2, this version reads 1"),
        (lambda m: m["config"].update(hidden_size=65), "the configuration was changed"),
        (lambda m: m["parts"].pop("layers.2"), "layers.2.mlp.gate: missing"),
        (lambda m: m["parts"]["mtp"].update(x=m["parts"]["lm_head"]["lm_head"]), "x: unexpected"),
        (
            lambda m: m["parts"]["lm_head"]["lm_head"].update(dtype="float32"),
            "lm_head: float32 [384, 64], the configuration declares bfloat16",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(copy: Path, edit, why: str):
    edit_json(copy / MANIFEST, edit)
    assert why in refusal(copy)


def test_what_is_no_store_is_refused(tmp_path: Path):
    assert "no store" in refusal(tmp_path)
    assert "no store" in refusal(tmp_path / "absent")
    (tmp_path / MANIFEST).write_text("{")
    assert "cannot be read as JSON" in refusal(tmp_path)
