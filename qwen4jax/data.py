"""Text for scoring, through grain: documents to windows to batches, and resumable scores of them.

The order is that of the source, whatever the threads do, so that two models or two settings are
compared over the same tokens in the same batches.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.decode.call import check_integer, check_params, known_tokenizer
from qwen4jax.decode.requests import prompt_ids
from qwen4jax.decode.score import Score, bits_per_byte, score_rows
from qwen4jax.decode.text import Tokenizer
from qwen4jax.host_table import require_arrays
from qwen4jax.params import Params

FORMAT = 1
# places of one compiled step; longer windows take several
_CHUNK = 512
_THREADS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
_ANY_ID = 2**31


# documents by number: a list, a grain source, `TextFiles`; strings or lists of ids
Source = Sequence[Any] | grain.sources.RandomAccessDataSource[Any]


class TextFiles:
    """UTF-8 files as documents, each read when its turn comes."""

    def __init__(self, paths: Iterable[str | Path]):
        self.paths = [Path(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        """The text of one file, line ends as they are."""
        path = self.paths[index]
        try:
            return path.read_bytes().decode()
        except UnicodeDecodeError as e:
            raise ValueError(f"{path}: byte {e.start} is no UTF-8") from None


def scoring_batches(
    source: Source,
    tokenizer: Any,
    *,
    length: int,
    batch: int,
    stride: int | None = None,
    limit: int | None = None,
) -> grain.IterDataset:
    """Windows over documents, in batches of a fixed shape.

    Window `k` of a document begins at its token `k * stride`. A token counts in the first window
    that holds it; what a later window repeats is context. So each token of a document but its
    first counts exactly once, the later ones with at least `length - stride` tokens before them.

    An iterator's `get_state()` is small JSON (`set_state` takes it back): the next batches are
    those that would have come, whatever the threads had read ahead. A batch is a dict of

        ids       int32 [batch, length]; 0 where there is none
        valid     bool [batch, length], which ids are there
        counted   bool [batch, length], which of them count
        present   bool [batch], which rows there are (the last batch may have fewer)
        document  int64 [batch], index of the document
        window    int64 [batch], index of the window in it
        windows   int64 [batch], how many it has; an empty document has one, without ids
        bytes     int64 [batch], UTF-8 bytes of the document; -1 where it was given as ids

    Args:
        source: documents.
        tokenizer: a `Tokenizer` or what `Tokenizer.from_object` takes; None if all are ids.
        length: tokens of a window.
        batch: windows of a batch.
        stride: tokens from one window to the next; by default `length - 1`, the fewest windows.
        limit: how many of the documents to take, from the first on; by default all.

    Raises:
        TypeError, ValueError: an argument, named, is none of those described. While iterating: a
            document is neither text nor ids (`source[3]`).
    """
    stride = _stride(source, length, batch, stride, limit)
    tokenizer = known_tokenizer(tokenizer)
    documents = grain.MapDataset.source(_Numbered(source))[:limit]
    encoded = documents.map(functools.partial(_encode, tokenizer))
    windows = grain.experimental.FlatMapIterDataset(
        encoded.to_iter_dataset(_THREADS), _CutWindows(length, stride)
    )
    pad = functools.partial(grain.experimental.batch_and_pad, batch_size=batch)
    return windows.batch(batch, batch_fn=pad)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the documents that were scored.

    Attributes:
        documents: how many.
        tokens: tokens with a log-probability, all but the first of each document.
        nats: sum of their negative log-probabilities.
        bytes: UTF-8 bytes of the documents; None if one was given as ids.
    """

    documents: int = 0
    tokens: int = 0
    nats: float = 0.0
    bytes: int | None = 0

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of the scored tokens by bytes of the documents; None without either."""
        return bits_per_byte(self.nats, self.bytes) if self.tokens else None

    def plus(self, other: "Totals") -> "Totals":
        """The sums of both."""
        known = self.bytes is not None and other.bytes is not None
        return Totals(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.nats + other.nats,
            (self.bytes or 0) + (other.bytes or 0) if known else None,
        )


def score_dataset(
    params: Params,
    source: Source,
    tokenizer: Any = None,
    *,
    out: str | Path,
    length: int,
    batch: int,
    stride: int | None = None,
    limit: int | None = None,
) -> Totals:
    """Scores documents into a file, one line of JSON each; a run that was killed is completed.

    A line is `{"document": 0, "tokens": 41, "nats": 97.4, "bytes": 158}`: index, tokens that
    count, the sum of their negative log-probabilities, and bytes of the text (null for ids), in
    the order of the source.

    Beside `out` stands `out.state.json`: how far the run has come, replaced after every batch has
    reached the file. What a killed run wrote beyond it, a torn line too, is cut off and written
    again. The completed file is byte for byte that of a run without interruption.

    Args:
        params: of the model.
        source: as `scoring_batches`.
        tokenizer: as `scoring_batches`.
        out: file of the lines.
        length: as `scoring_batches`.
        batch: as `scoring_batches`.
        stride: as `scoring_batches`.
        limit: as `scoring_batches`.

    Returns:
        Sums over all lines of the file.

    Raises:
        FileExistsError: `out` is there without its state.
        ValueError: the file was begun with other arguments or weights, or has lost lines; a
            document has an id that the model has not. What is wrong is named.
    """
    tokenizer = known_tokenizer(tokenizer)
    batches = scoring_batches(
        source, tokenizer, length=length, batch=batch, stride=stride, limit=limit
    )
    check_params(params)
    config = params.config
    if length > config.max_position_embeddings:
        raise ValueError(
            f"length: {length} is over max_position_embeddings={config.max_position_embeddings}"
        )
    settings = {
        "length": length,
        "batch": batch,
        "stride": length - 1 if stride is None else stride,
        "documents": len(source) if limit is None else min(limit, len(source)),
        "tokenizer": None if tokenizer is None else tokenizer.vocab_size,
        "config": hashlib.sha256(repr(config).encode()).hexdigest(),
        "weights": _fingerprint(params),
    }
    with contextlib.closing(_Record(Path(out), settings)) as record:
        iterator = iter(batches)
        if record.iterator is not None:
            iterator.set_state(record.iterator)
        for windows in iterator:
            _check_ids(windows, config.vocab_size)
            rows = [ids[valid] for ids, valid in zip(windows["ids"], windows["valid"], strict=True)]
            scores = score_rows(params, rows, batch=batch, chunk=min(length, _CHUNK))
            lines = [
                line
                for row in np.flatnonzero(windows["present"])
                if (line := record.add(scores[row], {k: v[row] for k, v in windows.items()}))
            ]
            record.append(lines, iterator.get_state())
        return record.totals


class _Record:
    """The file of results and how far it has come.

    Attributes:
        iterator: state of the grain iterator after the last batch in the file; None at the start.
        totals: of the documents in the file.
    """

    def __init__(self, out: Path, settings: dict[str, Any]):
        self._out, self._settings = out, settings
        self._state = out.with_name(out.name + ".state.json")
        self.iterator, self.totals, self._open, self._size = None, Totals(), Totals(), 0
        if self._state.exists():
            found = self._read()
            self.iterator, self._size = found["iterator"], found["size"]
            self.totals, self._open = Totals(**found["totals"]), Totals(**found["open"])
            there = out.stat().st_size if out.exists() else 0
            if there < self._size:
                raise ValueError(
                    f"{out}: has {there} bytes of the {self._size} that were written, lines are "
                    f"lost; delete it and {self._state.name} to begin anew"
                )
        elif out.exists() and out.stat().st_size:
            raise FileExistsError(f"{out}: is there, and no {self._state.name} to go on from")
        else:
            self._write()
        self._file = out.open("ab")
        # a run that was killed may have written on before it kept its state
        self._file.truncate(self._size)

    def close(self) -> None:
        self._file.close()

    def add(self, score: Score, window: dict[str, Any]) -> str | None:
        """Counts one window; the line of its document when it is the last of it."""
        counted = window["counted"][1 : score.tokens + 1]
        nats = -float(score.logprobs[counted].sum(dtype=np.float64))
        self._open = self._open.plus(Totals(tokens=int(counted.sum()), nats=nats))
        if window["window"] + 1 < window["windows"]:
            return None
        size = None if window["bytes"] < 0 else int(window["bytes"])
        done = dataclasses.replace(self._open, documents=1, bytes=size)
        self._open, self.totals = Totals(), self.totals.plus(done)
        line = {"document": int(window["document"]), "tokens": done.tokens, "nats": done.nats}
        return json.dumps(line | {"bytes": size}) + "\n"

    def append(self, lines: Sequence[str], iterator: Any) -> None:
        """Writes the lines of a batch, and when they are on the disk, how far that is."""
        self._size += self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.iterator = iterator
        self._write()

    def _write(self) -> None:
        state = {
            "format": FORMAT,
            "settings": self._settings,
            "iterator": self.iterator,
            "size": self._size,
            "open": dataclasses.asdict(self._open),
            "totals": dataclasses.asdict(self.totals),
        }
        partial = self._state.with_name(self._state.name + ".partial")
        with partial.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._state)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._state.read_text())
        except ValueError as e:
            raise ValueError(f"{self._state}: cannot be read as JSON: {e}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{self._state}: is no state of format {FORMAT}")
        for name, value in self._settings.items():
            if (begun := found["settings"].get(name)) != value:
                raise ValueError(
                    f"{self._out}: was begun with {name} {begun}, now it is {value}; write to "
                    f"another file, or delete it and {self._state.name}"
                )
        return found


def _stride(source: Any, length: int, batch: int, stride: int | None, limit: int | None) -> int:
    """The stride; raises for an argument that is out of range."""
    if isinstance(source, str | bytes) or not hasattr(source, "__getitem__"):
        raise TypeError(f"source: documents by number are expected, found {type(source).__name__}")
    for name, value in (("length", length), ("batch", batch), ("limit", limit)):
        if value is not None:
            check_integer(name, value)
    if length < 2:
        raise ValueError(f"length: {length} is under 2: no token would have one before it")
    if stride is None:
        return length - 1
    check_integer("stride", stride, length - 1)
    return stride


class _Numbered:
    """Documents with their numbers: grain leaves out what is None, a document never is."""

    def __init__(self, source: Source):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._source[index]


def _encode(tokenizer: Tokenizer | None, numbered: tuple[int, Any]) -> dict[str, Any]:
    """Ids and bytes of one document."""
    index, document = numbered
    empty = isinstance(document, str | Sequence | np.ndarray) and not len(document)
    ids = [] if empty else prompt_ids(document, f"source[{index}]", _ANY_ID, tokenizer)
    size = len(document.encode()) if isinstance(document, str) else -1
    return {"ids": np.asarray(ids, np.int32), "document": index, "bytes": size}


@dataclasses.dataclass(frozen=True)
class _CutWindows(grain.experimental.FlatMapTransform):
    """Cuts a document into windows."""

    length: int
    stride: int

    def flat_map(self, element: dict[str, Any]) -> "_Windows":
        return _Windows(element, self.length, self.stride)


class _Windows(Sequence[dict[str, Any]]):
    """The windows of one document, cut when they are asked for."""

    def __init__(self, document: dict[str, Any], length: int, stride: int):
        self._document, self._length, self._stride = document, length, stride

    def __len__(self) -> int:
        beyond = len(self._document["ids"]) - self._length
        return 1 + max(0, -(-beyond // self._stride))

    def __getitem__(self, index: Any) -> Any:
        start = index * self._stride
        there = self._document["ids"][start : start + self._length]
        place = np.arange(self._length)
        # the window before this one had all but the last `stride` places
        first = 1 if index == 0 else self._length - self._stride
        return {
            "ids": np.pad(there, (0, self._length - len(there))),
            "valid": place < len(there),
            "counted": (place >= first) & (place < len(there)),
            "present": np.bool_(True),
            "document": np.int64(self._document["document"]),
            "window": np.int64(index),
            "windows": np.int64(len(self)),
            "bytes": np.int64(self._document["bytes"]),
        }


def _check_ids(windows: dict[str, np.ndarray], vocab_size: int) -> None:
    bad = np.argwhere(windows["ids"] >= vocab_size)
    if len(bad):
        row, place = bad[0]
        raise ValueError(
            f"source[{windows['document'][row]}]: id {windows['ids'][row, place]} is not in "
            f"[0, {vocab_size})"
        )


def _fingerprint(params: Params) -> int:
    """A number that other weights are unlikely to have: from the bits of every leaf."""
    require_arrays(params, "params")
    return zlib.crc32(np.asarray(_bit_sums(jax.tree.leaves(params))))


@jax.jit
def _bit_sums(arrays: list[jax.Array]) -> jax.Array:
    sums = []
    for array in arrays:
        bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
        sums.append(jnp.sum(bits, dtype=jnp.uint32))
    return jnp.stack(sums)
