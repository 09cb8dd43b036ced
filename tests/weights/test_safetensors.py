"""The reader refuses what the format forbids, with file name and byte counts."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.safetensors import DTYPES, LABELS, Output, TensorFile, write_file
from tests.weights.edit import GOLDEN, edit_header, write

TWO = {
    "first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "second": np.arange(4, dtype=ml_dtypes.bfloat16),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "x.safetensors", TWO)
    return tmp_path / "x.safetensors"


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TensorFile(file)
    assert file.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", ["t0", "nvfp4"])
def test_reads_what_the_reference_implementation_reads(case: str):
    for file in (GOLDEN / case / "checkpoint").glob("*.safetensors"):
        ours = TensorFile(file)
        theirs = dict(safetensors.deserialize(file.read_bytes()))
        assert set(ours.entries) == set(theirs)
        for name, expected in theirs.items():
            assert ours.entries[name].dtype == expected["dtype"]
            assert list(ours.entries[name].shape) == expected["shape"]
            assert ours.array(name).tobytes() == bytes(expected["data"])


@pytest.mark.parametrize("label", DTYPES)
def test_every_dtype_comes_back(label: str, tmp_path: Path):
    bits = np.arange(48, dtype=np.uint8) % (2 if label == "BOOL" else 48)
    array = bits.view(DTYPES[label]).reshape(2, -1)
    write(tmp_path / "x.safetensors", {"a": array, "scalar": array[0, 0], "empty": array[:0]})
    read = TensorFile(tmp_path / "x.safetensors")
    assert read.array("a").tobytes() == array.tobytes()
    assert read.array("a").dtype == array.dtype
    assert read.array("scalar").shape == ()
    assert read.array("empty").shape == (0, array.shape[1])
    assert not read.array("a").flags.writeable


def test_the_reference_implementation_reads_ours(file: Path):
    theirs = dict(safetensors.deserialize(file.read_bytes()))
    for name, array in TWO.items():
        assert theirs[name]["dtype"] == LABELS[array.dtype]
        assert bytes(theirs[name]["data"]) == array.tobytes()


def test_written_tensors_are_aligned(tmp_path: Path):
    arrays = {
        "odd": np.zeros(3, np.uint8),
        "wide": np.ones(2, np.int64),
        "half": np.ones(3, ml_dtypes.bfloat16),
    }
    write(tmp_path / "x.safetensors", arrays)
    for entry in TensorFile(tmp_path / "x.safetensors").entries.values():
        assert entry.start % DTYPES[entry.dtype].itemsize == 0


def test_an_unaligned_tensor_is_read(tmp_path: Path):
    header = json.dumps(
        {
            "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "wide": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    values = np.array([1.5, -2.25], np.float32)
    raw = struct.pack("<Q", len(header)) + header + b"\x07" + values.tobytes()
    (tmp_path / "x.safetensors").write_bytes(raw)
    assert TensorFile(tmp_path / "x.safetensors").array("wide").tolist() == [1.5, -2.25]


@pytest.mark.parametrize("cut", [1, 4, 16, 24])
def test_truncation_is_refused_with_byte_counts_LOD_02(file: Path, cut: int):
    """LOD-02: a shard that lost its end."""
    raw = file.read_bytes()
    file.write_bytes(raw[:-cut])
    why = refusal(file)
    assert "truncated" in why
    assert f"{cut} missing" in why
    assert str(len(raw) - cut) in why


def test_trailing_bytes_are_refused_LOD_02(file: Path):
    """LOD-02: eight bytes more than the header knows of."""
    file.write_bytes(file.read_bytes() + bytes(8))
    assert "8 trailing bytes" in refusal(file)


@pytest.mark.parametrize("length", [1 << 20, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused_LOD_02(file: Path, length: int):
    """LOD-02: the length of the header is over that of the file."""
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    why = refusal(file)
    assert str(length) in why
    assert str(file.stat().st_size - 8) in why


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_header_is_refused(file: Path, size: int):
    file.write_bytes(file.read_bytes()[:size])
    assert f"{size} bytes" in refusal(file)


def test_a_header_over_the_limit_is_refused(tmp_path: Path):
    file = tmp_path / "x.safetensors"
    with file.open("wb") as out:
        out.write(struct.pack("<Q", 100_000_001))
        out.truncate(8 + 100_000_001)  # sparse: takes no room
    assert "over the limit" in refusal(file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff\xfe", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 5000, "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"a": 1, "a": 2}', "'a' stands there twice"),
        (b'{"__metadata__": 3}', "__metadata__"),
        (b'{"a": {"dtype": "F32"}}', "a: is not described"),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, text: bytes, why: str):
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    assert why in refusal(file)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("dtype", "F33", "unknown dtype 'F33'"),
        ("dtype", 7, "unknown dtype 7"),
        ("dtype", "F64", "F64 [2, 3] needs 48 bytes, data_offsets span 24"),
        ("shape", [3, 3], "F32 [3, 3] needs 36 bytes"),
        ("shape", [-2, -3], "no list of sizes"),
        ("shape", [2.0, 3], "no list of sizes"),
        ("shape", [True, 6], "no list of sizes"),
        ("shape", 6, "no list of sizes"),
        ("data_offsets", [0], "no byte range"),
        ("data_offsets", [24, 0], "no byte range"),
        ("data_offsets", [-24, 0], "no byte range"),
        ("data_offsets", [4, 28], "leaves a hole"),
        ("data_offsets", [8, 32], "leaves a hole"),
    ],
)
def test_a_bad_entry_is_refused(file: Path, field: str, value: object, why: str):
    edit_header(file, lambda header: header["first"].update({field: value}))
    message = refusal(file)
    assert why in message
    assert "first" in message or "second" in message


def test_overlapping_tensors_are_refused(file: Path):
    edit_header(file, lambda header: header["second"].update(data_offsets=[16, 24]))
    assert "second: starts at byte" in refusal(file)
    assert "overlaps" in refusal(file)


def test_a_hole_between_tensors_is_refused(file: Path):
    edit_header(file, lambda header: header.pop("first"))
    assert "leaves a hole" in refusal(file)


def test_a_file_that_changes_after_its_header_was_read_is_refused(file: Path):
    opened = TensorFile(file)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        opened.array("first")


def test_an_unreadable_file_is_named(tmp_path: Path):
    assert "cannot be read" in refusal(tmp_path / "absent.safetensors")


def test_a_failed_write_leaves_no_file_of_that_name(tmp_path: Path):
    announced = Output("a", "F32", (2,), lambda: np.zeros(2, np.float64))
    with pytest.raises(ValueError, match="a: made as float64, announced F32"):
        write_file(tmp_path / "x.safetensors", [announced], {})
    assert not (tmp_path / "x.safetensors").exists()
