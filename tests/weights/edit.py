"""Making checkpoint directories for tests, and spoiling them."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.config import Config
from qwen4jax.params import Params, Tensor, declare
from qwen4jax.weights.directory import INDEX
from qwen4jax.weights.safetensors import LABELS, Output, TensorFile, write_file

GOLDEN = Path(__file__).parent.parent / "golden"
REMOVED = object()


def copy_of(case: str, to: Path) -> Path:
    """A copy of a golden checkpoint directory, to be spoiled."""
    target = to / case
    shutil.copytree(GOLDEN / case / "checkpoint", target)
    return target


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory, in memory."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        opened = TensorFile(file)
        found |= {name: opened.array(name).copy() for name in opened.entries}
    return found


def write_tensors(path: Path, tensors: dict[str, np.ndarray], shards: int = 3) -> None:
    """Replaces all tensors of a directory, in files of about equally many and an index."""
    for old in path.glob("*.safetensors"):
        old.unlink()
    weight_map = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        members = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write(path / file, {name: tensors[name] for name in members})
        weight_map |= dict.fromkeys(members, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one safetensors file."""
    outputs = [
        Output(name, LABELS[array.dtype], array.shape, lambda array=array: array)
        for name, array in tensors.items()
    ]
    write_file(file, outputs, {"format": "pt"})


def change(path: Path, **changes: Any) -> None:
    """Replaces tensors of a directory; names are given with `__` for each dot."""
    tensors = tensors_of(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is REMOVED:
            del tensors[name]
        else:
            tensors[name] = value
    write_tensors(path, tensors)


def edit_json(file: Path, edit: Callable[[Any], Any]) -> None:
    """Rewrites a JSON file; `edit` changes its value in place."""
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


def edit_config(path: Path, **changes: Any) -> None:
    """Sets fields of `config.json`; `REMOVED` takes one away."""

    def edit(fields: dict[str, Any]) -> None:
        for name, value in changes.items():
            fields.pop(name, None)
            if value is not REMOVED:
                fields[name] = value

    edit_json(path / "config.json", edit)


def edit_index(path: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    """Changes the index's weight_map in place."""

    def edit_map(fields: dict[str, Any]) -> None:
        edit(fields["weight_map"])

    edit_json(path / INDEX, edit_map)


def edit_header(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a safetensors header in place; the tensors' bytes stay."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def random_params(config: Config, seed: int = 0) -> Params:
    """Parameters of random bits of a modest size, without compiling anything."""
    rng = np.random.default_rng(seed)

    def fill(leaf: Tensor) -> jax.Array:
        dtype = jnp.dtype(leaf.dtype)
        if dtype == np.uint8:
            return jax.device_put(rng.integers(0, 256, leaf.shape).astype(np.uint8))
        values = rng.normal(size=leaf.shape)
        if leaf.size == 0:
            values = np.abs(values) + 0.01
        return jax.device_put(np.asarray(values, np.float32).astype(dtype))

    return jax.tree.map(fill, declare(config))


def part(tree: Any, path: str) -> Any:
    """What stands at a dotted path of a parameter tree."""
    for step in path.split("."):
        tree = tree[int(step)] if step.isdigit() else getattr(tree, step)
    return tree


def assert_same(left: Any, right: Any) -> None:
    """Two parameter trees are equal bit by bit, and so are their configurations."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
