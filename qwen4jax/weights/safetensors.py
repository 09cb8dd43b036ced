"""Our own reader and writer of safetensors files: NumPy only, memory-mapped, every byte accounted.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype,
shape, byte range) and the tensors, which must fill the rest without holes or overlaps.
Format: https://github.com/huggingface/safetensors#format
"""

import collections
import dataclasses
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qwen4jax.weights.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
LABELS = {dtype: label for label, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
# the limit of the reference implementation; a larger one is a damaged length
_LONGEST_HEADER = 100_000_000
_METADATA = "__metadata__"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file, as its header describes it.

    Attributes:
        name: the tensor's name.
        dtype: safetensors' label, a key of `DTYPES`.
        shape: its shape.
        start: first byte, counted from the beginning of the file.
        stop: byte after the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


class TensorFile:
    """A safetensors file whose header has been read and checked.

    Attributes:
        path: the file.
        size: its length in bytes.
        entries: its tensors by name, in the order of the header.
        metadata: the header's free text.
    """

    def __init__(self, path: Path):
        """Reads the header.

        Raises:
            CheckpointError: the file cannot be read, or header and length contradict each other.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                start, raw = _read_header(file, self.size)
            self.entries, self.metadata = _parse_header(raw, start, self.size)
        except OSError as e:
            raise CheckpointError(path.name, [f"cannot be read: {e.strerror or e}"]) from e
        except _Damaged as e:
            raise CheckpointError(path.name, [str(e)]) from None
        self._map: mmap.mmap | None = None

    def array(self, name: str) -> np.ndarray:
        """The tensor `name` as a read-only view of the mapped file (a copy if it is unaligned)."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if not count:
            return np.empty(entry.shape, dtype)
        view = np.frombuffer(self._mapped(), dtype, count, entry.start)
        if not view.flags.aligned:
            view = view.copy()
        return view.reshape(entry.shape)

    def rows(self, name: str) -> np.ndarray:
        """The bytes of the tensor `name`, uint8 [rows, bytes of a row], in the mapped file.

        They are for reading rows here and there: the system reads no pages ahead.
        """
        entry = self.entries[name]
        count = entry.shape[0]
        view = np.frombuffer(self._mapped(), np.uint8, entry.nbytes, entry.start)
        self._advise(entry, "MADV_RANDOM")
        return view.reshape(count, entry.nbytes // max(1, count))

    def release(self, name: str) -> None:
        """Lets the system drop the pages of a tensor that has been copied elsewhere."""
        self._advise(self.entries[name], "MADV_DONTNEED")

    def _advise(self, entry: Entry, advice: str) -> None:
        """Tells the system what becomes of a tensor's pages, where it listens."""
        if self._map is not None and hasattr(self._map, "madvise"):
            start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
            if entry.stop > start:
                self._map.madvise(getattr(mmap, advice), start, entry.stop - start)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != self.size:
                    raise CheckpointError(
                        self.path.name,
                        [f"changed while it was read: {self.size} bytes before, {size} now"],
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map


class _Damaged(Exception):
    """Why a header is refused."""


def _read_header(file: Any, size: int) -> tuple[int, bytes]:
    """(offset of the first tensor, header) of an open file of `size` bytes."""
    if size < _LENGTH_BYTES:
        raise _Damaged(f"{size} bytes, too short for the {_LENGTH_BYTES} bytes of a header length")
    (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
    if length > size - _LENGTH_BYTES:
        raise _Damaged(
            f"truncated or damaged: the header should be {length} bytes, "
            f"the file has {size - _LENGTH_BYTES} bytes after its length"
        )
    if length > _LONGEST_HEADER:
        raise _Damaged(f"a header of {length} bytes is over the limit of {_LONGEST_HEADER}")
    return _LENGTH_BYTES + length, file.read(length)


def _parse_header(raw: bytes, start: int, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as e:
        raise _Damaged(f"the header is no JSON: {e}") from None
    if not isinstance(header, dict):
        raise _Damaged(f"the header is no JSON object but a {type(header).__name__}")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise _Damaged(f"{_METADATA} is no JSON object")
    entries = {name: _entry(name, value, start) for name, value in header.items()}
    end = start
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            kind = "overlaps the tensor before it" if entry.start < end else "leaves a hole"
            raise _Damaged(f"{entry.name}: starts at byte {entry.start} and {kind}, at {end}")
        end = entry.stop
    if end > size:
        raise _Damaged(
            f"truncated: tensors end at byte {end}, the file has {size} ({end - size} missing)"
        )
    if end < size:
        raise _Damaged(f"{size - end} trailing bytes: tensors end at byte {end} of {size}")
    return entries, metadata


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {repeated!r} stands there twice")
    return values


def _entry(name: str, value: Any, start: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _Damaged(f"{name}: is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Damaged(f"{name}: unknown dtype {dtype!r}")
    if not _counts(shape):
        raise _Damaged(f"{name}: shape {shape!r} is no list of sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Damaged(f"{name}: data_offsets {offsets!r} are no byte range")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if needed != offsets[1] - offsets[0]:
        raise _Damaged(
            f"{name}: {dtype} {shape} needs {needed} bytes, data_offsets span "
            f"{offsets[1] - offsets[0]}"
        )
    return Entry(name, dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A tensor to be written.

    Attributes:
        name: its name in the file.
        dtype: safetensors' label.
        shape: its shape.
        produce: makes the array when its turn comes, so that one tensor is in memory at a time.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_file(path: Path, outputs: Sequence[Output], metadata: dict[str, str]) -> None:
    """Writes one file; it appears under its name when it is complete.

    Tensors are ordered by the width of their elements, so that each is aligned for other readers.

    Raises:
        ValueError: `produce` made an array of another shape or dtype than announced.
    """
    ordered = sorted(outputs, key=lambda o: -DTYPES[o.dtype].itemsize)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(_header_bytes(ordered, metadata))
        for output in ordered:
            array = np.ascontiguousarray(output.produce()).reshape(output.shape)
            if array.dtype != DTYPES[output.dtype]:
                raise ValueError(f"{output.name}: made as {array.dtype}, announced {output.dtype}")
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _header_bytes(outputs: Iterable[Output], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: metadata}
    start = 0
    for output in outputs:
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [start, start + output.nbytes],
        }
        start += output.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
