"""The safetensors files of a checkpoint directory, and the index that names their tensors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.safetensors import DTYPES, Entry, TensorFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# names in one message; a shard of the released model holds hundreds
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Directory:
    """What the headers and the index of a directory say.

    Attributes:
        path: the directory.
        files: the files that could be read, by name.
        entries: every tensor in them, by name.
        holder: name of the file that holds each tensor.
        unseen: tensors that the index places in files that cannot be read, with the file's name.
        problems: every disagreement, one line each.
    """

    path: Path
    files: dict[str, TensorFile]
    entries: dict[str, Entry]
    holder: dict[str, str]
    unseen: dict[str, str]
    problems: list[str]

    def array(self, name: str) -> np.ndarray:
        """The tensor `name`, a read-only view of its mapped file."""
        return self.files[self.holder[name]].array(name)

    def rows(self, name: str) -> tuple[np.ndarray, np.dtype]:
        """The tensor `name` as bytes of its rows in its mapped file, and its dtype."""
        return self.files[self.holder[name]].rows(name), DTYPES[self.entries[name].dtype]

    def release(self, name: str) -> None:
        """Lets the system drop the mapped pages of a tensor."""
        self.files[self.holder[name]].release(name)

    def where(self, name: str) -> str:
        """`NAME (FILE)`, for messages."""
        return f"{name} ({self.holder[name]})" if name in self.holder else name


def open_directory(path: Path) -> Directory:
    """Reads the index and every header, and compares them both ways.

    Problems are collected, not raised, so that one message can name them all.

    Raises:
        CheckpointError: there is no such directory.
    """
    if not path.is_dir():
        kind = "is a file, not a directory" if path.exists() else "no such directory"
        raise CheckpointError(path, [kind])
    problems: list[str] = []
    found = Directory(path, {}, {}, {}, {}, problems)
    index = read_index(path, problems)
    if problems:
        # without its index nothing can be said of the files
        return found
    present = sorted(p.name for p in path.glob("*.safetensors"))
    if index is None:
        named = [SINGLE] if SINGLE in present else []
        if not named:
            problems.append(f"neither {SINGLE} nor {INDEX} is there")
    else:
        named = sorted(set(index.values()))
    for name in named:
        _read_file(found, name, index)
    for name in present:
        if name not in named:
            problems.append(_describe_stray(path / name, index is not None))
    if index is not None:
        _compare(found, index)
    return found


def read_index(path: Path, problems: list[str]) -> dict[str, str] | None:
    """Tensor name -> file name of the directory's index; None without one, or with a bad one."""
    file = path / INDEX
    if not file.exists():
        return None
    raw = read_json(file, problems)
    if raw is None:
        return None
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{INDEX}: weight_map is no JSON object with entries")
        return None
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            problems.append(f"{INDEX}: {tensor} is placed in {name!r}, which is no file name")
            return None
    return weight_map


def read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """The JSON object in `file`, or None and a problem."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, OSError, RecursionError) as e:
        problems.append(f"{file.name}: cannot be read as JSON: {e}")
        return None
    if not isinstance(raw, dict):
        problems.append(f"{file.name}: a JSON object is expected, found {type(raw).__name__}")
        return None
    return raw


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {name!r} stands there twice")
        values[name] = value
    return values


def _read_file(found: Directory, name: str, index: dict[str, str] | None) -> None:
    path = found.path / name
    tensors = [t for t, file in index.items() if file == name] if index is not None else []
    try:
        if not path.exists():
            of = f"; {INDEX} places {len(tensors)} tensors there" if tensors else ""
            raise CheckpointError(name, [f"the file is missing{of}"])
        if path.is_dir():
            raise CheckpointError(name, ["is a directory, not a file"])
        file = TensorFile(path)
    except CheckpointError as e:
        found.problems.append(str(e))
        found.unseen.update(dict.fromkeys(tensors, name))
        return
    found.files[name] = file
    for tensor, entry in file.entries.items():
        if tensor in found.holder:
            found.problems.append(f"{tensor}: is in both {found.holder[tensor]} and {name}")
            continue
        found.entries[tensor] = entry
        found.holder[tensor] = name


def _compare(found: Directory, index: dict[str, str]) -> None:
    """Adds a problem for each pair of files that disagree on what is in which."""
    elsewhere: dict[tuple[str | None, str | None], list[str]] = {}
    for tensor, name in index.items():
        if name in found.files and tensor not in found.files[name].entries:
            elsewhere.setdefault((found.holder.get(tensor), name), []).append(tensor)
            if tensor not in found.holder:
                found.unseen[tensor] = name
    for tensor, name in found.holder.items():
        if tensor not in index:
            elsewhere.setdefault((name, None), []).append(tensor)
    for (holder, named), tensors in elsewhere.items():
        if holder is None:
            said = f"{INDEX} places it in {named}, which lacks it"
        elif named is None:
            said = f"is in {holder} but not in {INDEX}"
        else:
            said = f"is in {holder}, {INDEX} places it in {named}"
        more = (
            f" (and {len(tensors) - 1} more tensors: {_some(tensors[1:])})" if tensors[1:] else ""
        )
        found.problems.append(f"{tensors[0]}: {said}{more}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _describe_stray(path: Path, indexed: bool) -> str:
    by = f"{INDEX} does not name it" if indexed else f"only {SINGLE} is read without {INDEX}"
    if path.is_dir():
        return f"{path.name}: is a directory, not a file"
    try:
        names = list(TensorFile(path).entries)
    except CheckpointError as e:
        return f"{e}; and {by}"
    return f"{path.name}: {by}; it holds {len(names)} tensors: {_some(names)}"
