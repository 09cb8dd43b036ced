"""Index and files against each other, both ways, before any parameter is touched."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from qwen4jax.hf_fields import ConfigError
from qwen4jax.weights.directory import INDEX
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import load
from tests.weights.edit import (
    GOLDEN,
    assert_same,
    copy_of,
    edit_index,
    tensors_of,
    write,
    write_tensors,
)

GATE = "model.layers.0.mlp.gate.weight"


@pytest.fixture
def t0(tmp_path: Path) -> Path:
    """T0 in three shards."""
    path = copy_of("t0", tmp_path)
    write_tensors(path, tensors_of(path))
    return path


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_shards_one_file_and_links_load_alike(t0: Path, tmp_path: Path):
    reference = load(GOLDEN / "t0" / "checkpoint")
    assert_same(load(t0), reference)
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(t0 / "config.json", single)
    write(single / "model.safetensors", tensors_of(t0))
    assert_same(load(single), reference)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in t0.iterdir():
        (linked / file.name).symlink_to(file)
    assert_same(load(linked), reference)


def test_a_missing_shard_is_named_LOD_01(t0: Path):
    """LOD-01: shard 2 of 3 is deleted; its tensors are not listed one by one as well."""
    (t0 / "model-00002-of-00003.safetensors").unlink()
    error = refusal(t0)
    assert len(error.problems) == 1
    assert "model-00002-of-00003.safetensors" in error.problems[0]
    assert "missing" in error.problems[0]


def test_a_broken_link_is_a_missing_shard_LOD_01(t0: Path):
    """LOD-01: as from a cache that was cleared."""
    file = t0 / "model-00002-of-00003.safetensors"
    file.unlink()
    file.symlink_to(t0 / "gone")
    assert f"{file.name}: the file is missing" in str(refusal(t0))


def test_an_empty_directory_is_refused_LOD_01(tmp_path: Path):
    """LOD-01: the message says which file a checkpoint has."""
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load(tmp_path)


def test_a_configuration_alone_is_refused_LOD_01(t0: Path):
    """LOD-01: neither tensors nor index."""
    for file in t0.glob("model*"):
        file.unlink()
    assert f"neither model.safetensors nor {INDEX}" in str(refusal(t0))


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "other.safetensors"])
def test_a_directory_with_the_name_of_a_file_is_refused_LOD_01(t0: Path, name: str):
    """LOD-01: in place of a shard, and beside them."""
    (t0 / name).unlink(missing_ok=True)
    (t0 / name).mkdir()
    assert f"{name}: is a directory, not a file" in str(refusal(t0))


def test_a_typing_error_in_the_index_is_named_LOD_01(t0: Path):
    """LOD-01: once as the index's entry without a tensor, once as the tensor without an entry."""
    edit_index(t0, lambda m: m.update({GATE + "x": m.pop(GATE)}))
    error = refusal(t0)
    assert len(error.problems) == 2
    assert f"{GATE}x: {INDEX} places it in model-0000" in str(error)
    assert f"but not in {INDEX}" in str(error)


def test_no_such_directory(tmp_path: Path):
    assert "no such directory" in str(refusal(tmp_path / "absent"))
    (tmp_path / "file").touch()
    assert "is a file, not a directory" in str(refusal(tmp_path / "file"))


@pytest.mark.parametrize("cut", [100, 4096, 0.5])
def test_a_truncated_shard_is_refused_LOD_02(t0: Path, cut: float):
    """LOD-02: the last 100 bytes, the last 4096, half of the file."""
    file = t0 / "model-00002-of-00003.safetensors"
    raw = file.read_bytes()
    missing = int(cut if cut > 1 else len(raw) * cut)
    file.write_bytes(raw[:-missing])
    error = refusal(t0)
    assert len(error.problems) == 1
    assert f"{file.name}: truncated" in error.problems[0]
    assert f"{missing} missing" in error.problems[0]


def test_a_stray_file_is_refused_and_listed_LOD_03(t0: Path):
    """LOD-03: the same names with other values; the index alone decides what is read."""
    write(t0 / "model-extra.safetensors", {GATE: np.ones((4, 32), np.float32)})
    error = refusal(t0)
    assert error.problems == (
        f"model-extra.safetensors: {INDEX} does not name it; it holds 1 tensors: {GATE}",
    )


def test_a_stray_file_beside_a_single_one_is_refused_LOD_03(t0: Path):
    """LOD-03: without an index only model.safetensors counts."""
    tensors = tensors_of(t0)
    for file in t0.glob("model*"):
        file.unlink()
    write(t0 / "model.safetensors", tensors)
    write(t0 / "more.safetensors", {GATE: np.ones((4, 32), np.float32)})
    assert "more.safetensors: only model.safetensors is read" in str(refusal(t0))


def test_a_name_that_the_index_lacks_is_refused_LOD_03(t0: Path):
    """LOD-03: the tensor is in a shard, the index does not say so."""
    edit_index(t0, lambda m: m.pop(GATE))
    error = refusal(t0)
    assert len(error.problems) == 1
    assert GATE in error.problems[0]


def test_a_tensor_in_another_file_than_the_index_says_LOD_03(t0: Path):
    """LOD-03: which of the two is right is not for the loader to guess."""
    edit_index(t0, lambda m: m.update({GATE: "model-00003-of-00003.safetensors"}))
    assert f"{INDEX} places it in model-00003-of-00003.safetensors" in str(refusal(t0))


def test_a_tensor_in_two_files_is_refused_LOD_03(t0: Path):
    """LOD-03: two shards that the index names both hold it."""
    third = t0 / "model-00003-of-00003.safetensors"
    tensors = tensors_of(t0)
    last = json.loads((t0 / INDEX).read_text())["weight_map"]
    members = {name: tensors[name] for name, file in last.items() if file == third.name}
    write(third, members | {GATE: tensors[GATE] + 1})
    assert f"{GATE}: is in both" in str(refusal(t0))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "a JSON object is expected"),
        ('{"weight_map": []}', "weight_map is no JSON object"),
        ('{"weight_map": {}}', "weight_map is no JSON object"),
        ('{"weight_map": {"a": 3}}', "which is no file name"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "which is no file name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' stands there twice"),
    ],
)
def test_a_bad_index_is_refused(t0: Path, text: str, why: str):
    (t0 / INDEX).write_text(text)
    assert why in str(refusal(t0))


def test_everything_is_listed_at_once(t0: Path):
    file = t0 / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    (t0 / "model-00002-of-00003.safetensors").unlink()
    write(t0 / "model-extra.safetensors", {"x": np.ones(3, np.float32)})
    error = refusal(t0)
    assert len(error.problems) == 3
    for name in ("model-00001-of", "model-00002-of", "model-extra"):
        assert any(problem.startswith(name) for problem in error.problems)
