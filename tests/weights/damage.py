"""Random damage to a checkpoint directory, each of a kind that its structure can betray.

Not among them: other bytes inside a tensor, two tensors of one shape whose headers were exchanged,
another value of a setting that no tensor's shape depends on. Nothing in the format tells those.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qwen4jax.weights.directory import INDEX
from qwen4jax.weights.safetensors import DTYPES, TensorFile
from tests.weights.edit import edit_header, edit_index, edit_json, tensors_of, write

Random = np.random.Generator


def spoil(path: Path, seed: int) -> str:
    """Damages the directory once; returns what was done."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    return f"{kind.__name__}: {kind(path, rng)}"


def _any(rng: Random, items: list[Any]) -> Any:
    return items[rng.integers(len(items))]


def _file(path: Path, rng: Random) -> Path:
    return _any(rng, sorted(path.glob("*.safetensors")))


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return length, json.loads(raw[8 : 8 + length])


def _name(file: Path, rng: Random) -> str:
    return _any(rng, sorted(set(_header(file)[1]) - {"__metadata__"}))


def truncate(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    raw = file.read_bytes()
    kept = int(rng.integers(len(raw)))
    file.write_bytes(raw[:kept])
    return f"{file.name} to {kept} bytes"


def extend(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    file.write_bytes(file.read_bytes() + rng.bytes(int(rng.integers(1, 64))))
    return file.name


def header_length(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    bits = int(rng.integers(1, 64))
    other = _any(rng, [length + bits, max(0, length - bits), int(rng.integers(1 << 62)), 0])
    file.write_bytes(struct.pack("<Q", other) + raw[8:])
    return f"{file.name} {length} -> {other}"


def header_byte(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    raw = bytearray(file.read_bytes())
    length, _ = _header(file)
    at = 8 + int(rng.integers(length))
    raw[at] = int(rng.integers(256))
    file.write_bytes(raw)
    return f"{file.name} byte {at}"


def header_digit(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    raw = bytearray(file.read_bytes())
    length, _ = _header(file)
    at = _any(rng, [i for i in range(8, 8 + length) if chr(raw[i]).isdigit()])
    raw[at] = ord("0") + (raw[at] - ord("0") + int(rng.integers(1, 10))) % 10
    file.write_bytes(raw)
    return f"{file.name} digit {at}"


def delete_file(path: Path, rng: Random) -> str:
    file = _any(rng, [*sorted(path.glob("*.safetensors")), path / INDEX, path / "config.json"])
    file.unlink()
    return file.name


def delete_tensor(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    name = _name(file, rng)
    _rewrite(file, lambda tensors: tensors.pop(name))
    if rng.integers(2):
        edit_index(path, lambda m: m.pop(name))
        return f"{name}, in the index as well"
    return name


def exchange_files(path: Path, rng: Random) -> str:
    first, second = _file(path, rng), _file(path, rng)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    return f"{first.name} and {second.name}"


def exchange_offsets(path: Path, rng: Random) -> str:
    """Of two tensors of different size: others of a kind cannot be told apart."""
    file = path / "model-mtp.safetensors"
    header = _header(file)[1]
    first = _name(file, rng)

    def size(name: str) -> int:
        start, stop = header[name]["data_offsets"]
        return stop - start

    names = sorted(set(header) - {"__metadata__"})
    second = _any(rng, [name for name in names if size(name) != size(first)])

    def edit(header: dict[str, Any]) -> None:
        one, other = header[first], header[second]
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]

    edit_header(file, edit)
    return f"{first} and {second}"


def exchange_index(path: Path, rng: Random) -> str:
    names = sorted(json.loads((path / INDEX).read_text())["weight_map"])
    first, second = _any(rng, names), _any(rng, names)

    def edit(m: dict[str, str]) -> None:
        m[first], m[second] = m[second], m[first]

    edit_index(path, edit)
    return f"{first} and {second}"


def index_entry(path: Path, rng: Random) -> str:
    names = sorted(json.loads((path / INDEX).read_text())["weight_map"])
    name = _any(rng, names)
    action = int(rng.integers(4))

    def edit(m: dict[str, str]) -> None:
        if action == 0:
            del m[name]
        elif action == 1:
            m[name + "x"] = m.pop(name)
        elif action == 2:
            m[name] = "absent.safetensors"
        else:
            m["model.added.weight"] = m[name]

    edit_index(path, edit)
    return f"{('removed', 'renamed', 'misplaced', 'beside')[action]} {name}"


def index_text(path: Path, rng: Random) -> str:
    file = path / INDEX
    raw = bytearray(file.read_bytes())
    at = int(rng.integers(len(raw)))
    raw[at] = int(rng.integers(256))
    file.write_bytes(raw)
    return f"byte {at}"


def relabel(path: Path, rng: Random) -> str:
    """Another dtype for the same bytes, of the same width: the shape fits as before."""
    file = _file(path, rng)
    name = _name(file, rng)
    label = _header(file)[1][name]["dtype"]
    width = DTYPES[label].itemsize
    others = [x for x, dtype in DTYPES.items() if dtype.itemsize == width and x != label]
    other = _any(rng, [*others, "F4", "XYZ"])
    edit_header(file, lambda header: header[name].update(dtype=other))
    return f"{name} {label} -> {other}"


def reshape(path: Path, rng: Random) -> str:
    """Another shape of as many elements, or of others."""
    file = _file(path, rng)
    name = _name(file, rng)
    shape = _header(file)[1][name]["shape"]
    other = _any(
        rng,
        [shape[::-1], [1, *shape], [*shape, 1], [n + 1 for n in shape], shape[:-1], [7]],
    )
    edit_header(file, lambda header: header[name].update(shape=other))
    return f"{name} {shape} -> {other}"


def rename_tensor(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    name = _name(file, rng)
    other = name.replace("0", "7") if "0" in name else name + ".x"
    _rewrite(file, lambda tensors: tensors.update({other: tensors.pop(name)}))
    if rng.integers(2):
        edit_index(path, lambda m: m.update({other: m.pop(name)}))
    return f"{name} -> {other}"


def cut_tensor(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    name = _name(file, rng)
    _rewrite(file, lambda tensors: tensors.update({name: tensors[name][..., :-1]}), name)
    return name


def other_values(path: Path, rng: Random) -> str:
    """A stray file with the same names."""
    file = _file(path, rng)
    name = _name(file, rng)
    tensors = {name: tensors_of(path)[name]}
    write(path / "model-stray.safetensors", tensors)
    return name


def config_size(path: Path, rng: Random) -> str:
    fields = (
        "hidden_size num_hidden_layers vocab_size head_dim num_experts moe_intermediate_size "
        "hc_count hc_lowrank indexer_head_dim linear_value_head_dim ple_embed_dim seed "
        "num_key_value_heads ngram_vocab_size_base split_ngram_parts heads_per_ngram"
    ).split()
    field = _any(rng, fields)
    value = _any(rng, [-1, 0, 1, 5, 7, 1000, "x", None, 2.5, [], True])

    def edit(config: dict[str, Any]) -> None:
        config[field] = config[field] * 2 if value == 5 else value

    edit_json(path / "config.json", edit)
    return f"{field} {value}"


def config_text(path: Path, rng: Random) -> str:
    file = path / "config.json"
    raw = file.read_bytes()
    kept = int(rng.integers(len(raw)))
    file.write_bytes(raw[:kept])
    return f"to {kept} bytes"


def quantization_text(path: Path, rng: Random) -> str:
    said = _any(
        rng,
        [
            {"quant_method": "gptq"},
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            {"quant_algo": "NVFP4", "quant_method": "modelopt"},
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {}}},
            {"quant_algo": 4},
            [],
            7,
        ],
    )
    edit_json(path / "config.json", lambda config: config.update(quantization_config=said))
    return str(said)


def replace_by_directory(path: Path, rng: Random) -> str:
    file = _file(path, rng)
    file.unlink()
    file.mkdir()
    return file.name


def _rewrite(
    file: Path, edit: Callable[[dict[str, np.ndarray]], Any], needed: str | None = None
) -> None:
    opened = TensorFile(file)
    tensors = {name: opened.array(name).copy() for name in opened.entries}
    if needed is None or tensors[needed].ndim:
        edit(tensors)
    write(file, tensors)


KINDS = [
    truncate,
    extend,
    header_length,
    header_byte,
    header_digit,
    delete_file,
    delete_tensor,
    exchange_files,
    exchange_offsets,
    exchange_index,
    index_entry,
    index_text,
    relabel,
    reshape,
    rename_tensor,
    cut_tensor,
    other_values,
    config_size,
    config_text,
    quantization_text,
    replace_by_directory,
]
