"""Make the training text of the tiny model: `python checkpoints/tiny_text.py OUT`.

Python's standard library in several releases and its documentation, as this machine has them:

    --library PACKAGE==VERSION=DIR   a standard library (`.../lib/python3.13`), newest first
    --docs PACKAGE==VERSION=DIR      a folder of documentation sources (`*.rst`, `*.rst.txt`)

A path counts once, in the first source that has it, and so does a content. Files are split by a
hash of their path; a held-out file of which the training files have more than a third of the lines
is a near copy and goes to them. OUT gets `train.npy` and
`heldout.npy` (uint16 ids, an end-of-text id after each file), the tokenizer's files, and
`text.json` with counts and the yardsticks (unigram, xz). The list of sources, with the hash of
each one's file list, is `checkpoints/tiny_text.json` in the repository.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # run by its path: in this folder an inspect.py hides Python's own
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import dataclasses
import hashlib
import json
import lzma
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from checkpoints.tiny_tokenizer import END_OF_TEXT, train_tokenizer, write_tokenizer

LICENCE = "PSF-2.0"
HELD_OUT_SHARE = 0.03
NEAR_COPY = 1 / 3
# shorter lines (`else:`, `return None`) are in every file
LINE = 24
SMALLEST, LARGEST = 200, 400_000
# tables of numbers and of code points teach nothing about Python
LEAST_LETTERS = 0.45
# generated from the documentation, or tables of encodings
LEFT_OUT = ("pydoc_data/", "encodings/", "site-packages/", "__pycache__/", "lib-dynload/")


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of text files with a name."""

    label: str
    folder: Path
    suffixes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """One file: where it came from, its path there, its text."""

    source: str
    path: str
    text: str


def read_documents(sources: Iterable[Source]) -> list[Document]:
    """Files worth reading, each path and each content once, in an order that mixes them."""
    found: dict[str, Document] = {}
    contents: set[str] = set()
    for source in sources:
        for path in sorted(source.folder.rglob("*")):
            name = path.relative_to(source.folder).as_posix()
            if not name.endswith(source.suffixes) or any(part in name for part in LEFT_OUT):
                continue
            if name in found or not path.is_file() or not _size_fits(path):
                continue
            text = _decode(path.read_bytes())
            if text is None or _digest(" ".join(text.split())) in contents:
                continue
            contents.add(_digest(" ".join(text.split())))
            found[name] = Document(source.label, name, text)
    return sorted(found.values(), key=lambda d: _digest("order " + d.path))


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; near copies of training text are training text."""
    chosen = [_unit(d.path) < HELD_OUT_SHARE for d in documents]
    train = [d for d, out in zip(documents, chosen, strict=True) if not out]
    lines = {line for d in train for line in _lines(d.text)}
    held_out = []
    for document in (d for d, out in zip(documents, chosen, strict=True) if out):
        own = _lines(document.text)
        near = sum(line in lines for line in own) > NEAR_COPY * len(own)
        (train if near or not own else held_out).append(document)
    return train, held_out


def encode(tokenizer, documents: list[Document]) -> np.ndarray:
    """Ids of all documents, an end-of-text id after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    return np.concatenate([np.asarray([*e.ids, end], np.uint16) for e in encoded])


def yardsticks(
    train: np.ndarray, held_out: np.ndarray, texts: tuple[str, str], vocabulary: int
) -> dict[str, float]:
    """Bits per held-out byte of models that know less: token frequencies, xz with and without.

    `xz_after_train` is what the held-out text adds to a compressed file that begins with the
    training text (as much of it as the window holds).
    """
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    size = len(texts[1].encode())
    nats = -np.log(counts / counts.sum())[held_out].sum()
    window = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
    pack = lambda data: len(lzma.compress(data, lzma.FORMAT_RAW, filters=window))  # noqa: E731
    before, after = (pack(t.encode()) for t in (texts[0], texts[0] + texts[1]))
    return {
        "unigram": nats / math.log(2) / size,
        "xz": 8 * len(lzma.compress(texts[1].encode(), preset=9 | lzma.PRESET_EXTREME)) / size,
        "xz_after_train": 8 * (after - before) / size,
    }


def manifest(documents: list[Document], sources: list[Source]) -> list[dict]:
    """What came from where; the hash is of the sorted lines `sha256 path` of a source's files."""
    entries = []
    for source in sources:
        own = [d for d in documents if d.source == source.label]
        lines = sorted(f"{_digest(d.text)} {d.path}\n" for d in own)
        package, _, version = source.label.partition("==")
        entries.append(
            {
                "package": package,
                "version": version,
                "licence": LICENCE,
                "files": len(own),
                "bytes": sum(len(d.text.encode()) for d in own),
                "sha256": _digest("".join(lines)),
            }
        )
    return entries


def _joined(documents: list[Document]) -> str:
    return "".join(d.text for d in documents)


def _size_fits(path: Path) -> bool:
    return SMALLEST <= path.stat().st_size <= LARGEST


def _decode(data: bytes) -> str | None:
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    letters = sum(c.isalpha() or c.isspace() for c in text)
    return text if letters >= LEAST_LETTERS * len(text) else None


def _lines(text: str) -> set[str]:
    return {s for line in text.splitlines() if len(s := line.strip()) >= LINE}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _unit(path: str) -> float:
    """A number in [0, 1) of a path."""
    return int(_digest("split " + path)[:12], 16) / 16**12


def _sources(options: argparse.Namespace) -> Iterator[Source]:
    for given, suffixes in ((options.library, (".py",)), (options.docs, (".rst", ".rst.txt"))):
        for one in given:
            label, _, folder = one.rpartition("=")
            if "==" not in label or not Path(folder).is_dir():
                raise SystemExit(f"{one}: PACKAGE==VERSION=DIR is expected, DIR a folder")
            yield Source(label, Path(folder), suffixes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the training text of the tiny model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--library", metavar="SOURCE", action="append", default=[])
    parser.add_argument("--docs", metavar="SOURCE", action="append", default=[])
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--limit", type=int, help="files to take, for a trial")
    options = parser.parse_args(arguments)
    sources = list(_sources(options))
    documents = read_documents(sources)[: options.limit]
    if not documents:
        raise SystemExit("no files: give --library and --docs")
    train, held_out = split(documents)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer((d.text for d in train), options.vocabulary)
    write_tokenizer(tokenizer, options.out)
    arrays = {"train": encode(tokenizer, train), "heldout": encode(tokenizer, held_out)}
    for name, ids in arrays.items():
        np.save(options.out / f"{name}.npy", ids)
    texts = _joined(train), _joined(held_out)
    facts = {
        "sources": manifest(documents, sources),
        "train": {"files": len(train), "bytes": len(texts[0].encode())},
        "heldout": {"files": len(held_out), "bytes": len(texts[1].encode())},
        "bits_per_byte": yardsticks(
            arrays["train"], arrays["heldout"], texts, tokenizer.get_vocab_size()
        ),
    }
    for name, ids in arrays.items():
        facts[name]["tokens"] = len(ids)
    (options.out / "text.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
