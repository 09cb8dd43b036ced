"""Training text through grain: windows of a long row of ids, in an order that can be resumed."""

import json
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

_THREADS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


class Windows:
    """Windows of `length` ids of a file, one beginning every `stride` ids, as a grain source.

    Each has `stride` ids more to its right than it needs, so that a reader may move its start.
    """

    def __init__(self, path: Path, length: int, stride: int):
        self._path, self._length, self._stride = path, length, stride
        self._ids = np.load(path, mmap_mode="r")
        self._count = (len(self._ids) - length) // stride
        if self._count < 1:
            raise ValueError(f"{path}: {len(self._ids)} ids, windows of {length} need more")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Int32[np.ndarray, " W"]:
        start = index * self._stride
        return np.asarray(self._ids[start : start + self._stride + self._length], np.int32)

    def __repr__(self) -> str:
        # grain compares it when a state is set
        return f"Windows({self._path.name}, {self._length}, {self._stride})"


def training_windows(
    path: Path, *, length: int, batch: int, stride: int, seed: int
) -> grain.IterDataset:
    """Batches int32 [batch, length] without end; each epoch in another order, from other starts.

    Read by threads; the order is a function of `seed` alone, and an iterator's state is small JSON.

    Args:
        path: `.npy` file of ids.
        length: ids of a window.
        batch: windows of a batch.
        stride: ids from one window to the next, before each start is moved by less than that.
        seed: of order and starts.
    """

    def moved(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        start = int(rng.integers(len(ids) - length + 1))
        return ids[start : start + length]

    source: Any = Windows(path, length, stride)
    windows = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    batches = windows.random_map(moved).batch(batch, drop_remainder=True)
    return batches.to_iter_dataset(_THREADS)


def held_out_windows(
    path: Path, *, length: int, batch: int, batches: int, stride: int
) -> list[Int32[np.ndarray, "B W"]]:
    """The same few batches every time, spread over the whole file.

    Args:
        path: `.npy` file of ids.
        length: ids of a window.
        batch: windows of a batch.
        batches: how many.
        stride: places of a window that are predicted.

    Raises:
        ValueError: the file is too short.
    """
    source = Windows(path, length, stride)
    wanted = batch * batches
    if wanted > len(source):
        raise ValueError(f"{path}: has {len(source)} windows of {length}, {wanted} are asked for")
    chosen = np.linspace(0, len(source) - 1, wanted).astype(int)
    rows = np.stack([source[int(i)][:length] for i in chosen])
    return list(rows.reshape(batches, batch, length))


def bytes_per_token(directory: Path, part: str) -> float:
    """UTF-8 bytes of a token on average, by the `text.json` beside the ids."""
    facts = json.loads((directory / "text.json").read_text())[part]
    return facts["bytes"] / facts["tokens"]
