"""Quantising a checkpoint: nearest codes, released layouts, the source untouched."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints import convert as script
from checkpoints.convert import convert
from qwen4jax import quant
from qwen4jax.config import Config, Quantization
from qwen4jax.hf_fields import ConfigError
from qwen4jax.weights import quantize, safetensors
from qwen4jax.weights import save as saving
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import load, load_and_report
from qwen4jax.weights.save import save
from tests.weights.edit import (
    GOLDEN,
    assert_same,
    change,
    copy_of,
    edit_index,
    part,
    random_params,
    tensors_of,
    write,
    write_tensors,
)

ROOT = Path(__file__).parent.parent.parent
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NVFP4 = Quantization("nvfp4", "bf16", "fp8")
FP8 = Quantization("fp8", "fp8", "fp8")
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Plain bfloat16, partial blocks at the edges of the experts."""
    config = Config.tiny(
        hidden_size=160, moe_intermediate_size=144, num_experts=4, dtype="bfloat16"
    )
    save(random_params(config), tmp_path / "source", shard_bytes=1_000_000)
    return tmp_path / "source"


def hashes(path: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())
    }


def matrix(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_nvfp4_takes_the_nearest_codes():
    w = matrix((48, 64))
    scale_2 = quantize.nvfp4_scale(w)
    packed, scale = quantize.nvfp4_encode(w, scale_2)
    assert scale_2 == np.abs(w).max() / np.float32(6 * 448)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(w.shape)
    step = scale.astype(np.float32).repeat(16, 1) * scale_2
    targets = np.abs(w / step)[..., None]
    assert np.array_equal(codes % 8, np.abs(targets - E2M1).argmin(-1))
    assert np.array_equal(codes >= 8, w < 0)
    signed = np.where(codes >= 8, -1, 1).astype(np.float32) * E2M1[codes % 8]
    expected = signed * scale.astype(np.float32).repeat(16, 1) * scale_2
    assert np.array_equal(quant.Nvfp4(packed, scale, scale_2).dequantize(), expected)


def test_a_tie_takes_the_smaller_magnitude():
    w = np.zeros((1, 16), np.float32)
    w[0, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    packed, _ = quantize.nvfp4_encode(w, np.array(6 / (6 * 448), np.float32))
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(16)
    assert codes.tolist()[:8] == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("layer", [0, 3])
def test_golden_nvfp4_is_quantised_to_itself(layer: int):
    """Values that are codes already get the same codes and group scales again."""
    experts = part(load(GOLDEN / "nvfp4" / "checkpoint"), f"layers.{layer}.mlp.experts.down_proj")
    values = np.asarray(experts.dequantize())
    for expert in range(4):
        packed, scale = quantize.nvfp4_encode(values[expert], quantize.nvfp4_scale(values[expert]))
        assert np.array_equal(scale, np.asarray(experts.weight_scale)[expert])
        again = quant.Nvfp4(packed, scale, quantize.nvfp4_scale(values[expert]))
        np.testing.assert_allclose(again.dequantize(), values[expert], rtol=1e-6)


def test_golden_fp8_is_quantised_to_itself():
    experts = part(load(GOLDEN / "fp8" / "checkpoint"), "layers.0.mlp.experts.gate_up_proj")
    values = np.asarray(experts.dequantize())[1, 0]
    scale = quantize.fp8_scale(values)
    # rounding the scale to bfloat16 moves the largest code by at most one
    ratio = scale.astype(np.float32) / np.asarray(experts.weight_scale_inv)[1, 0].astype(np.float32)
    assert ((ratio > 0.93) & (ratio < 1.07)).all()
    codes = quantize.fp8_encode(values, np.asarray(experts.weight_scale_inv)[1, 0])
    assert codes.tobytes() == np.asarray(experts.weight)[1, 0].tobytes()


def test_fp8_takes_the_nearest_codes():
    w = matrix((200, 130))
    scale = quantize.fp8_scale(w)
    assert scale.shape == (2, 2)
    block = np.abs(w[128:, 128:]).max()
    assert scale[1, 1] == (block / np.float32(448)).astype(ml_dtypes.bfloat16)
    codes = quantize.fp8_encode(w, scale)
    full = scale.astype(np.float32).repeat(128, 0)[:200].repeat(128, 1)[:, :130]
    finite = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.sort(finite[np.isfinite(finite)])
    nearest = np.abs((w / full)[..., None] - finite).min(-1)
    np.testing.assert_allclose(np.abs(w / full - codes.astype(np.float32)), nearest, atol=1e-6)


def test_zeros_stay_zeros():
    zeros = np.zeros((32, 32), np.float32)
    packed, scale = quantize.nvfp4_encode(zeros, quantize.nvfp4_scale(zeros))
    assert not packed.any()
    assert np.isfinite(scale.astype(np.float32)).all()
    assert quantize.nvfp4_scale(zeros) > 0
    assert not quantize.fp8_encode(zeros, quantize.fp8_scale(zeros)).astype(np.float32).any()
    assert quantize.table_scale([zeros]) > 0


@pytest.mark.parametrize("forms", [NVFP4, FP8, Quantization("nvfp4", "fp8", "bf16")])
@pytest.mark.parametrize("stacked", [True, False])
def test_converted_values_are_near_and_the_rest_is_the_same(
    tmp_path: Path, forms: Quantization, stacked: bool
):
    config = Config.tiny(
        hidden_size=160, moe_intermediate_size=144, num_experts=4, dtype="bfloat16"
    )
    params = random_params(config)
    save(params, tmp_path / "source", stacked_experts=stacked, shard_bytes=1_000_000)
    convert(tmp_path / "source", tmp_path / "target", forms, shard_bytes=500_000)
    found = load(tmp_path / "target")
    assert found.config == config.replace(quantization=forms)
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2
    step = {"nvfp4": 1 / 6, "fp8": 1 / 16, "bf16": 0}
    for layer, old in zip(found.layers, params.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            got = np.asarray(quant.dequantize(getattr(layer.mlp.experts, name)))
            want = np.asarray(getattr(old.mlp.experts, name)).astype(np.float32)
            # half a step of the widest interval, of a group's or block's largest value
            tolerance = step[forms.experts] * 1.1 * np.abs(want).max()
            assert 0 < np.abs(got - want).max() <= tolerance
        assert_same(layer.mlp_hyper_connection, old.mlp_hyper_connection)
    for path in ("mtp.hyper_connection_mixer", "layers.1.ple.conv1d", "layers.3.self_attn"):
        assert_same(part(found, path), part(params, path))
    table = "layers.1.ple.ngram_embedding"
    got = np.asarray(quant.dequantize(part(found, table)))
    want = np.asarray(part(params, table)).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=0.07, atol=np.abs(want).max() / 448 / 2**6)


def test_the_released_layout(source: Path, tmp_path: Path):
    """One by one, weight-only NVFP4; vision tensors, tokenizer and text settings go along."""
    tensors = tensors_of(source)
    vision = {"model.visual.pos_embed.weight": np.ones((9, 4), ml_dtypes.bfloat16)}
    write_tensors(source, tensors | vision)
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "target", NVFP4)
    written = tensors_of(tmp_path / "target")
    name = "model.layers.3.mlp.experts.2.down_proj"
    assert {n.removeprefix(name) for n in written if n.startswith(f"{name}.")} == {
        ".weight",
        ".weight_scale",
        ".weight_scale_2",
    }
    assert written[f"{name}.weight"].shape == (160, 72)
    assert written[f"{name}.weight_scale"].shape == (160, 9)
    assert written[f"{name}.weight_scale_2"].shape == ()
    assert written["mtp.layers.0.mlp.experts.gate_up_proj"].shape == (4, 288, 160)
    assert written[f"{TABLE}.weight_scale"].shape == (1,)
    assert load_and_report(tmp_path / "target")[1].vision_tensors_skipped == 1
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    raw = json.loads((tmp_path / "target" / "config.json").read_text())
    assert raw["quantization_config"]["quant_algo"] == "NVFP4"
    assert raw["ple_embedding_dtype"] == "float8_e4m3fn"
    assert raw["hidden_size"] == 160


def test_a_directory_without_a_draft_head(source: Path, tmp_path: Path):
    write_tensors(source, {n: a for n, a in tensors_of(source).items() if n[:4] != "mtp."})
    convert(source, tmp_path / "target", FP8)
    with pytest.warns(UserWarning, match="draft head is off"):
        assert load(tmp_path / "target").mtp is None


def test_a_name_in_two_shards_is_refused_before_anything_is_written_LOD_20(
    source: Path, tmp_path: Path
):
    """LOD-20: the clash is found when planning; not a byte of the source changes."""
    name = "model.layers.0.mlp.gate.weight"
    tensors = tensors_of(source)
    write(source / "model-extra.safetensors", {name: tensors[name] + 1, "model.x": tensors[name]})
    edit_index(source, lambda m: m.update({"model.x": "model-extra.safetensors"}))
    before = hashes(source)
    with pytest.raises(CheckpointError, match=f"{name}: is in both"):
        convert(source, tmp_path / "target", NVFP4)
    assert hashes(source) == before
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_failure_half_way_leaves_nothing_LOD_20(source: Path, tmp_path: Path):
    """LOD-20: a value that is not finite, found in the last layer."""
    name = "model.layers.3.mlp.experts.down_proj"
    spoiled = tensors_of(source)[name]
    spoiled[3, 5, 7] = np.inf
    change(source, **{name.replace(".", "__"): spoiled})
    before = hashes(source)
    with pytest.raises(CheckpointError, match=r"down_proj\[3\]: holds values that are not finite"):
        convert(source, tmp_path / "target", FP8, shard_bytes=200_000)
    assert hashes(source) == before
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def die_in_the_second_file(source: str, target: str) -> None:
    """What the process of the next test does: it writes half of a file and is gone."""
    written: list[Path] = []

    def dying(path: Path, *arguments: object) -> None:
        safetensors.write_file(path, *arguments)  # pyright: ignore[reportArgumentType]
        written.append(path)
        if len(written) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    saving.write_file = dying
    script.main([source, target, "--experts", "nvfp4", "--shard-bytes", "100000"])


def test_a_killed_conversion_leaves_nothing_that_loads_LOD_20(tmp_path: Path):
    """LOD-20: killed while it writes; then run again to the end."""
    config = Config.tiny(num_experts=64, hidden_size=256, dtype="bfloat16")
    source, target = tmp_path / "source", tmp_path / "target"
    save(random_params(config), source)
    before = hashes(source)
    code = "import sys; from tests.weights.test_convert import *; "
    command = [sys.executable, "-c", code + "die_in_the_second_file(*sys.argv[1:])", source, target]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not target.exists()
    assert hashes(source) == before
    (left,) = tmp_path.glob(".target.partial-*")
    assert len(list(left.glob("*.safetensors"))) == 2
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load(left)
    convert(source, target, NVFP4)
    assert load(target).config.quantization == NVFP4


def test_what_cannot_be_converted_is_refused(source: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="is quantised already"):
        convert(copy_of("nvfp4", tmp_path), tmp_path / "target", FP8)
    with pytest.raises(ValueError, match="lies in the source"):
        convert(source, source / "target", FP8)
    with pytest.raises(FileExistsError, match="not empty"):
        convert(source, tmp_path / "nvfp4", FP8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no such file"):
        convert(tmp_path / "empty", tmp_path / "target", FP8)
    assert not (tmp_path / "target").exists()


def test_sizes_that_nvfp4_does_not_fit_are_refused(tmp_path: Path):
    save(random_params(Config.tiny(moe_intermediate_size=40)), tmp_path / "source")
    with pytest.raises(ValueError, match="groups of 16, found 40"):
        convert(tmp_path / "source", tmp_path / "target", NVFP4)


def test_too_little_room_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="1,000 are free"):
        convert(source, tmp_path / "target", FP8)
    assert not (tmp_path / "target").exists()


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script.main([str(source), str(tmp_path / "target"), "--experts", "fp8"])
    assert "wrote" in capsys.readouterr().out
    assert load(tmp_path / "target").config.quantization == FP8
    with pytest.raises(SystemExit, match=r"nothing was written: .*not empty"):
        script.main([str(source), str(tmp_path / "target"), "--experts", "nvfp4"])


def test_converted_checkpoints_are_trees_alike(source: Path, tmp_path: Path):
    convert(source, tmp_path / "a", FP8)
    convert(source, tmp_path / "b", FP8, shard_bytes=100_000)
    assert_same(load(tmp_path / "a"), load(tmp_path / "b"))
    assert jax.tree.structure(load(tmp_path / "a")) != jax.tree.structure(load(source))
