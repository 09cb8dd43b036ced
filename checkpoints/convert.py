"""Quantise a checkpoint: `python checkpoints/convert.py SOURCE TARGET --experts nvfp4`.

Reads plain weights and writes the released layouts: routed experts one by one in NVFP4 (weight
only) or in e4m3 with 128 x 128 blocks, n-gram tables in e4m3 with one scale, all else as it was,
vision tensors and tokenizer included. The source is never written to; the target appears when it
is complete.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # run by its path: in this folder an inspect.py hides Python's own
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import copy
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qwen4jax.config import Quantization
from qwen4jax.params import Params, declare
from qwen4jax.weights import quantize
from qwen4jax.weights.checkpoint import Survey, survey
from qwen4jax.weights.directory import INDEX
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.formats import quantization_config
from qwen4jax.weights.names import MTP, Piece, leaves
from qwen4jax.weights.progress import Progress
from qwen4jax.weights.safetensors import LABELS, Output
from qwen4jax.weights.save import SHARD_BYTES, write_checkpoint

_TABLE_ROWS = 1 << 20


def convert(
    source: str | Path,
    target: str | Path,
    quantization: Quantization,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | bool | None = False,
) -> None:
    """Writes the checkpoint at `source` in other stored forms to `target`.

    Everything is checked and planned before the first byte is written.

    Raises:
        CheckpointError: the source does not load, is quantised already, or holds values that are
            not finite.
        FileExistsError: the target is there and not empty.
        OSError: the target's file system has too little room.
        ValueError: the forms do not fit the model's sizes, or the target lies in the source.
    """
    source, target = Path(source).resolve(), Path(target).resolve()
    if target.is_relative_to(source):
        raise ValueError(f"{target} lies in the source, which is never written to")
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there and not empty")
    found = survey(source)
    found.require()
    found.check_values()
    if found.config.quantization != Quantization():
        raise CheckpointError(
            source, [f"is quantised already: {found.config.quantization}; convert a plain one"]
        )
    if not found.config.mtp_num_hidden_layers:
        quantization = dataclasses.replace(quantization, mtp_experts="bf16")
    outputs = plan(found, quantization)
    _require_room(target, sum(o.nbytes for o in outputs))
    write_checkpoint(
        target,
        _config(found, quantization),
        outputs,
        shard_bytes=shard_bytes,
        others=_others(source),
        progress=progress,
    )


def plan(found: Survey, quantization: Quantization) -> list[Output]:
    """The tensors to write, in the order of the source's; nothing is computed yet."""
    directory = found.directory
    declared = declare(found.config.replace(quantization=quantization))
    replaced: dict[str, list[Output]] = {}
    gone: set[str] = set()
    for path, leaf in leaves(found.declared):
        form = _form(path, quantization)
        if form == "bf16":
            continue
        pieces = list(found.naming.pieces(path, leaf))
        gone |= {piece.name for piece in pieces}
        if path.endswith(".ngram_embedding"):
            outputs = _table(found, path, pieces)
        else:
            outputs = _experts(found, path, pieces, leaf.shape, declared, form)
        replaced[pieces[0].name] = list(outputs)
    planned = []
    for name, entry in directory.entries.items():
        planned += replaced.get(name, [])
        if name not in gone:
            same = functools.partial(directory.array, name)
            planned.append(Output(name, entry.dtype, entry.shape, same))
    return planned


def _form(path: str, quantization: Quantization) -> str:
    if path.endswith(".ngram_embedding"):
        return quantization.ngram_embedding
    if ".mlp.experts." in path:
        return quantization.mtp_experts if path.startswith(MTP) else quantization.experts
    return "bf16"


@dataclasses.dataclass(frozen=True, eq=False)
class _Matrix:
    """One expert's matrix on its way to a stored form.

    Attributes:
        name: for messages.
        load: reads the values [O, I].
        form: `nvfp4` or `fp8`.
    """

    name: str
    load: Callable[[], np.ndarray]
    form: str

    @functools.cached_property
    def scale(self) -> np.ndarray:
        """The scale, or the scales of the blocks; small enough to be kept."""
        make = {"nvfp4": quantize.nvfp4_scale, "fp8": quantize.fp8_scale}[self.form]
        try:
            return make(self.load())
        except ValueError as e:
            raise CheckpointError(self.name, [str(e)]) from e

    def component(self, name: str) -> np.ndarray:
        """What is stored as `name` in the form."""
        if name in ("weight_scale_2", "weight_scale_inv"):
            return self.scale
        codes = _encode(self)
        if self.form == "fp8":
            return codes[0]
        return codes[0] if name == "weight" else codes[1]


# codes and group scales of a matrix are written one after the other
@functools.lru_cache(maxsize=1)
def _encode(matrix: _Matrix) -> tuple[np.ndarray, ...]:
    if matrix.form == "fp8":
        return (quantize.fp8_encode(matrix.load(), matrix.scale),)
    return quantize.nvfp4_encode(matrix.load(), matrix.scale)


def _experts(
    found: Survey,
    path: str,
    pieces: list[Piece],
    shape: tuple[int, ...],
    declared: Params,
    form: str,
) -> Iterator[Output]:
    """The tensors of one leaf's experts in a stored form, expert after expert."""
    matrices: dict[tuple[int | slice, ...], _Matrix] = {}
    for piece in pieces:
        whole = functools.partial(found.directory.array, piece.name)
        if piece.where:
            matrices[piece.where] = _Matrix(piece.name, whole, form)
            continue
        for index in np.ndindex(shape[:-2]):
            one = functools.partial(_part, whole, shape, index)
            matrices[index] = _Matrix(f"{piece.name}{list(index)}", one, form)
    # a weight-only form: no activations were seen that could give an input scale
    components = {
        name.removeprefix(f"{path}."): leaf
        for name, leaf in leaves(declared)
        if name.startswith(f"{path}.") and not name.endswith(".input_scale")
    }
    each = (found.naming.pieces(f"{path}.{name}", leaf) for name, leaf in components.items())
    for together in zip(*each, strict=True):
        for (name, leaf), piece in zip(components.items(), together, strict=True):
            produce = functools.partial(matrices[piece.where].component, name)
            yield Output(piece.name, LABELS[np.dtype(leaf.dtype)], piece.shape, produce)


def _part(
    whole: Callable[[], np.ndarray], shape: tuple[int, ...], index: tuple[int, ...]
) -> np.ndarray:
    return whole().reshape(shape)[index]


def _table(found: Survey, path: str, pieces: list[Piece]) -> Iterator[Output]:
    """The shards of an n-gram table in e4m3, and its scale."""

    def rows(name: str) -> Iterator[np.ndarray]:
        shard = found.directory.array(name)
        for first in range(0, len(shard), _TABLE_ROWS):
            yield shard[first : first + _TABLE_ROWS]
        found.directory.release(name)

    @functools.cache
    def scale() -> np.ndarray:
        try:
            return quantize.table_scale(part for piece in pieces for part in rows(piece.name))
        except ValueError as e:
            raise CheckpointError(found.naming.module(path), [str(e)]) from e

    def encode(name: str, shape: tuple[int, ...]) -> np.ndarray:
        parts = [quantize.table_encode(part, scale()) for part in rows(name)]
        return np.concatenate(parts).reshape(shape)

    yield Output(f"{found.naming.module(path)}.weight_scale", "BF16", (1,), scale)
    for piece in pieces:
        produce = functools.partial(encode, piece.name, piece.shape)
        yield Output(piece.name, "F8_E4M3", piece.shape, produce)


def _config(found: Survey, quantization: Quantization) -> dict[str, Any]:
    """The source's `config.json` with what says how tensors are stored."""
    raw = copy.deepcopy(found.raw)
    fields = quantization_config(quantization, found.naming)
    text = raw.get("text_config", raw)
    for settings in (raw, text):
        settings.pop("quantization_config", None)
        settings.pop("ple_embedding_dtype", None)
    if "ple_embedding_dtype" in fields:
        text["ple_embedding_dtype"] = fields["ple_embedding_dtype"]
    if "quantization_config" in fields:
        raw["quantization_config"] = fields["quantization_config"]
    return raw


def _others(source: Path) -> list[Path]:
    """The tokenizer and whatever else belongs to the checkpoint besides tensors."""
    written = (INDEX, "config.json", "hf_quant_config.json")
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file.suffix != ".safetensors" and file.name not in written
    ]


def _require_room(target: Path, needed: int) -> None:
    parent = next(p for p in target.parents if p.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise OSError(f"{parent}: {needed:,} bytes are to be written, {free:,} are free")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Quantise a checkpoint.")
    parser.add_argument("source", type=Path, help="a plain checkpoint; it is never written to")
    parser.add_argument("target", type=Path, help="the directory to make")
    parser.add_argument("--experts", choices=("bf16", "fp8", "nvfp4"), required=True)
    parser.add_argument(
        "--mtp-experts",
        choices=("bf16", "fp8", "nvfp4"),
        help="of the draft head; default: fp8 beside fp8 experts, plain beside others",
    )
    parser.add_argument("--table", choices=("bf16", "fp8"), default="fp8", help="n-gram tables")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    options = parser.parse_args(arguments)
    mtp = options.mtp_experts or ("fp8" if options.experts == "fp8" else "bf16")
    forms = Quantization(options.experts, mtp, options.table)
    try:
        convert(
            options.source, options.target, forms, shard_bytes=options.shard_bytes, progress=None
        )
    except (OSError, ValueError) as e:
        sys.exit(f"nothing was written: {e}")
    print(f"wrote {options.target}: {forms}")


if __name__ == "__main__":
    main()
