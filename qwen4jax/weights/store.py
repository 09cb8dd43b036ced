"""Keeping loaded parameters on disk with Orbax, in the form in which they are in memory.

A store is a directory: `blocks/NAME` is an Orbax checkpoint of one part of the tree, `parts.json`
grows as parts are finished, and `manifest.json` is written last: without it nothing is restored.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.ablation import Ablation
from qwen4jax.config import Config, Quantization, RopeParameters
from qwen4jax.host_table import HostTable
from qwen4jax.params import Params, declare
from qwen4jax.weights.arrange import arrange, stored_leaves
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.names import leaves
from qwen4jax.weights.variants import as_found

FORMAT = 1
MANIFEST = "manifest.json"
_PARTS = "parts.json"
_BLOCKS = "blocks"
# bytes of an array that are on the host at a time while its checksum is made
_SLICE = 1 << 30


def store(params: Params, path: str | Path, *, source: str | None = None) -> int:
    """Stores parameters; a store that was interrupted is completed.

    Parts that an earlier run finished are kept if their checksums are those of `params`, and
    written again otherwise. Until the last part is written the directory holds no manifest.

    Args:
        params: the parameters.
        path: the directory, new or an earlier store.
        source: where they come from, for the manifest.

    Returns:
        The number of parts that were written.

    Raises:
        FileExistsError: the directory holds something else.
    """
    path = Path(path).absolute()
    if path.exists() and any(path.iterdir()) and not _is_store(path):
        raise FileExistsError(f"{path} is there, not empty and no store")
    (path / _BLOCKS).mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    finished = _read(path / _PARTS) if (path / _PARTS).exists() else {}
    done: dict[str, Any] = {}
    written = 0
    for name, block in _blocks(params):
        described = {where: _describe(array) for where, array in block.items()}
        if finished.get(name) != described or not (path / _BLOCKS / name).is_dir():
            with _checkpointer() as checkpointer:
                checkpointer.save(path / _BLOCKS / name, block, force=True)
            written += 1
        done[name] = described
        _write(path / _PARTS, {**finished, **done})
    for left in (path / _BLOCKS).iterdir():
        if left.name not in done:
            shutil.rmtree(left)
    _write(path / _PARTS, done)
    config = _config_fields(params.config)
    manifest = {
        "format": FORMAT,
        "package": f"qwen4jax {_version()}",
        "source": source,
        "config": config,
        "config_sha256": _digest(config),
        "parts": done,
    }
    _write(path / MANIFEST, manifest)
    return written


def restore(path: str | Path, *, verify: bool = True) -> Params:
    """The parameters in a store, on the default device.

    Args:
        path: the directory.
        verify: whether to compare every array with its checksum.

    Raises:
        CheckpointError: the store is incomplete, damaged, or of another format.
    """
    path = Path(path).absolute()
    manifest = _read_manifest(path)
    try:
        config = _config(manifest["config"])
    except (TypeError, ValueError, KeyError) as e:
        raise CheckpointError(
            path, [f"{MANIFEST}: no configuration this version reads: {e}"]
        ) from e
    described = {where: d for part in manifest["parts"].values() for where, d in part.items()}
    declared = as_found(
        declare(config),
        input_scales=[where for where in described if where.endswith(".input_scale")],
        wide_scales=[
            where
            for where, d in described.items()
            if where.endswith(".weight_scale_inv") and d["dtype"] == "float32"
        ],
    )
    problems = _compare(declared, described)
    if problems:
        raise CheckpointError(path, problems)
    arrays: dict[str, jax.Array] = {}
    sharding = jax.sharding.SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
    for name, part in manifest["parts"].items():
        wanted = {
            where: jax.ShapeDtypeStruct(tuple(d["shape"]), jnp.dtype(d["dtype"]), sharding=sharding)
            for where, d in part.items()
        }
        try:
            with _checkpointer() as checkpointer:
                block = checkpointer.restore(path / _BLOCKS / name, wanted)
        except Exception as e:  # whatever Orbax and its file format make of a damaged directory
            raise CheckpointError(path, [f"part {name}: Orbax cannot read it: {e}"]) from e
        if verify:
            problems += [
                f"part {name}: {where} is not what was stored (checksum)"
                for where, array in block.items()
                if _describe(array) != part[where]
            ]
        arrays |= block
    if problems:
        raise CheckpointError(path, problems)
    ordered = [arrays[where] for where, _ in leaves(declared)]
    return arrange(jax.tree.structure(declared).unflatten(ordered))


def _checkpointer() -> Any:
    # slow to import, and whoever loads a Hugging Face directory has no need of it
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


def _is_store(path: Path) -> bool:
    return {p.name for p in path.iterdir()} <= {_BLOCKS, _PARTS, MANIFEST, f"{_PARTS}.partial"}


def _blocks(params: Params) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, path -> array) for each layer and each other top-level part."""
    blocks: dict[str, dict[str, Callable[[], jax.Array]]] = {}
    for path, _, read in stored_leaves(params):
        steps = path.split(".")
        name = ".".join(steps[:2]) if steps[0] == "layers" else steps[0]
        blocks.setdefault(name, {})[path] = read
    for name, block in blocks.items():
        # Orbax writes arrays: a table in its files becomes one for the while
        arrays = {path: read() for path, read in block.items()}
        whole = lambda x: np.asarray(x) if isinstance(x, HostTable) else x  # noqa: E731
        yield name, {path: whole(x) for path, x in arrays.items()}


def _describe(array: jax.Array) -> dict[str, Any]:
    checksum = 0
    rows = array.shape[0] if array.ndim else 1
    step = max(1, _SLICE * rows // max(1, array.nbytes))
    for first in range(0, rows, step):
        part = np.asarray(array[first : first + step] if step < rows else array)
        checksum = zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8), checksum)
    return {"shape": list(array.shape), "dtype": array.dtype.name, "crc32": checksum}


def _compare(declared: Params, described: dict[str, Any]) -> list[str]:
    expected = dict(leaves(declared))
    problems = [f"{path}: missing" for path in expected if path not in described]
    for path, found in described.items():
        if path not in expected:
            problems.append(f"{path}: unexpected")
            continue
        leaf = expected[path]
        if (tuple(found["shape"]), found["dtype"]) != (leaf.shape, leaf.dtype):
            problems.append(
                f"{path}: {found['dtype']} {found['shape']}, the configuration declares "
                f"{leaf.dtype} {list(leaf.shape)}"
            )
    return problems


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).exists():
        parts = len(_read(path / _PARTS)) if (path / _PARTS).exists() else 0
        state = f"an interrupted store, {parts} parts finished" if parts else "no store"
        raise CheckpointError(path, [f"{state}: there is no {MANIFEST}"])
    manifest = _read(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            path, [f"{MANIFEST}: format {manifest.get('format')!r}, this version reads {FORMAT}"]
        )
    if _digest(manifest.get("config")) != manifest.get("config_sha256"):
        raise CheckpointError(path, [f"{MANIFEST}: the configuration was changed"])
    return manifest


def _config_fields(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _config(fields: dict[str, Any]) -> Config:
    values = _with_tuples(fields)
    values["rope_parameters"] = RopeParameters(**_with_tuples(values["rope_parameters"]))
    values["quantization"] = Quantization(**values["quantization"])
    values["ablation"] = Ablation(**values["ablation"])
    return Config(**values)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _version() -> str:
    try:
        return importlib.metadata.version("qwen4jax")
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree"


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(file, [f"cannot be read as JSON: {e}"]) from e
    if not isinstance(value, dict):
        raise CheckpointError(file, ["is no JSON object"])
    return value


def _write(file: Path, value: Any) -> None:
    partial = file.with_name(file.name + ".partial")
    with partial.open("w") as out:
        json.dump(value, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)
