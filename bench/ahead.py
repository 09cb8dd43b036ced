"""Programs that are compiled on a machine without a GPU, and loaded where the GPU is.

    python -m bench.kernels --released --compile-for "NVIDIA H200" --programs DIR   # here
    python -m bench.kernels --released --programs DIR                               # on the device

The first writes DIR and measures nothing, the second takes from it what is there and compiles the
rest; `bench.chains` and `bench.decode` have the same two arguments, and may share DIR. A device is
then held for the measurements alone. XLA compiles for a GPU by its description (`bench/targets.py`)
but without one it cannot time alternatives, and sorts by itself: products by cuBLAS and sorts, as
of the references and of many rows, may be others than those of a compilation on the device. Result
lines say `compiled`, "ahead" or "here".

DIR is of one device kind, one state of the sources, one jax, one Triton and one set of XLA's flags,
all in its `made.json`; anything else is refused with what differs. Reading a program unpickles it:
read none that others made.
"""

import argparse
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import lzma
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.tree_util import PyTreeDef, default_registry

import qwen4jax
from bench.targets import TARGETS, place_on
from qwen4jax.pallas import registry

AHEAD, HERE = "ahead", "here"
_RECORD = "made.json"
# what is compiled: kind, names, and every number that the program depends on
Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What belongs to a key.

    Attributes:
        programs: compiled functions by name; none where they are for another device.
        facts: what was found out beside them; pickled with them.
        refused: why there are none, if the implementation does not take the case.
        ahead: whether they were loaded.
    """

    programs: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: str | None = None
    ahead: bool = False

    @property
    def skipped(self) -> str | None:
        """Why there are none, as a row says it."""
        return self.refused and f"skipped: {self.refused}"

    @property
    def compiled(self) -> str:
        """As a result line says it."""
        return AHEAD if self.ahead else HERE


class Store:
    """Where a benchmark gets its programs: of a folder, or from the compiler.

    Args:
        folder: of programs; None compiles all.
        target: kind of a device that is not here, for which all is compiled and written; the kind
            that is here is one, too.

    Raises:
        SystemExit: the folder is of something else, or there is none to read.
    """

    def __init__(self, folder: Path | None = None, target: str | None = None):
        self.folder, self.target = folder, target
        here = jax.devices()[0].device_kind
        self._sharding = place_on(target) if target not in (None, here) else None
        if folder is None:
            return
        made, record = _made(target or here), folder / _RECORD
        if record.exists():
            if different := _differences(json.loads(record.read_text()), made):
                raise SystemExit(f"{folder}: its programs are of another making: {different}")
        elif target is None:
            raise SystemExit(f"{folder}: no {_RECORD}, so no programs were written there")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(record, (json.dumps(made, indent=1) + "\n").encode())
        self._seal = hashlib.sha256(record.read_bytes()).hexdigest()

    def place(self, tree: Any) -> Any:
        """Shapes of a tree's arrays, which lie on the device that is compiled for."""
        one = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding)  # noqa: E731
        return jax.tree.map(one, tree)

    def get(self, key: Key, compile: Callable[[], Kept]) -> Kept:
        """What belongs to `key`: loaded from the folder, or what `compile` gives.

        With a target it is written, what is already there is left, and no programs come back.

        Raises:
            ValueError: the file of that name is not of the folder, or of another key.
            Exception: whatever `compile` raises; nothing is written then.
        """
        file = self._file(key)
        if file is not None and file.exists():
            return self._load(file, key)
        if self.target is None:
            return compile()
        with registry.using(device=self.target):
            kept = compile()
        if file is not None:
            self._write(file, key, kept)
        return Kept(refused=kept.refused)

    def _file(self, key: Key) -> Path | None:
        if self.folder is None:
            return None
        words = re.sub(r"[^\w.-]", "_", ".".join(key))[:80]
        return self.folder / f"{words}.{hashlib.sha256(repr(key).encode()).hexdigest()[:10]}.xz"

    def _write(self, file: Path, key: Key, kept: Kept) -> None:
        programs = {}
        for name, program in kept.programs.items():
            binary, *trees = serialize_executable.serialize(program)
            programs[name] = binary, [_parts(tree) for tree in trees]
        body = pickle.dumps((programs, kept.facts, kept.refused))
        _write_whole(file, lzma.compress(pickle.dumps((self._seal, key, body))))

    def _load(self, file: Path, key: Key) -> Kept:
        seal, of, body = pickle.loads(lzma.decompress(file.read_bytes()))
        if (seal, of) != (self._seal, key):
            what = f"it is of {of}, not of {key}" if of != key else f"not made with {_RECORD}"
            raise ValueError(f"{file}: {what}")
        programs, facts, refused = pickle.loads(body)
        if self.target:
            return Kept(refused=refused)
        # makes known where the library lies that the host's part of Mosaic's kernels calls, which
        # a process that compiles none would not do
        importlib.import_module("jax.experimental.mosaic.gpu")
        here = jax.devices()[:1]
        load = serialize_executable.deserialize_and_load
        loaded = {
            name: load(binary, *map(_structure, trees), execution_devices=here)
            for name, (binary, trees) in programs.items()
        }
        return Kept(loaded, facts, refused, ahead=True)


def or_refused(compile: Callable[[], Kept]) -> Callable[[], Kept]:
    """`compile`, of which NotImplementedError is a result: what keeps the implementation away."""

    def compiled() -> Kept:
        try:
            return compile()
        except NotImplementedError as e:
            return Kept(refused=str(e))

    return compiled


def _write_whole(file: Path, data: bytes) -> None:
    """Writes a file that nobody sees before it is complete."""
    part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
    part.write_bytes(data)
    part.replace(file)


def _parts(tree: Any) -> tuple[Any, list]:
    """A structure as what can be pickled where structures cannot, those with the model's types."""
    return tree.node_data(), [_parts(child) for child in tree.children()]


def _structure(parts: tuple[Any, list]) -> Any:
    node, children = parts
    return PyTreeDef.from_node_data_and_children(
        default_registry, node, [_structure(child) for child in children]
    )


def _made(device: str) -> dict[str, Any]:
    """What a program depends on but its key; XLA's compiler for CUDA is taken to be jaxlib's."""
    package = Path(qwen4jax.__file__).parent
    bench = Path(__file__).parent
    files = [*package.rglob("*.py"), *bench.glob("*.py"), *bench.glob("*.txtpb")]
    sources = {
        str(file.relative_to(package.parent if package in file.parents else bench.parent)): (
            hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        )
        for file in sorted(files)
    }
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "device": device,
        **{name: _version(name) for name in ("jax", "jaxlib", "triton")},
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith("--xla_dump")),
        "sources": sources,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, in words; what is not installed here does not."""
    found = [
        f"{name} was {before[name]!r} and is {now[name]!r}"
        for name in before
        if name != "sources" and before[name] != now[name] and now[name] is not None
    ]
    old, new = before["sources"], now["sources"]
    changed = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    if changed:
        rest = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        found.append(f"changed since: {', '.join(changed[:5])}{rest}")
    return "; ".join(found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--programs` and `--compile-for`."""
    parser.add_argument(
        "--programs",
        type=Path,
        metavar="DIR",
        help="folder of compiled programs that you made (they are unpickled); the rest is compiled",
    )
    parser.add_argument(
        "--compile-for",
        choices=(*TARGETS, "cpu"),
        metavar="DEVICE",
        help="only compile, for this kind of device, and write --programs: needs no device; of "
        + ", ".join(TARGETS),
    )


def jobs(args: argparse.Namespace, beside_a_device: int) -> int:
    """Threads that compile: without a device as many as there are cores."""
    return (os.cpu_count() or 1) if args.compile_for else beside_a_device


def store(args: argparse.Namespace) -> Store:
    """The store that arguments name.

    Raises:
        SystemExit: they name a device but no folder, or what `Store` refuses.
    """
    if args.compile_for and args.programs is None:
        raise SystemExit("--compile-for: --programs names no folder to write to")
    return Store(args.programs, args.compile_for)
