"""A checkpoint directory against the model it claims to hold: everything is checked from headers.

`survey` compares the files, their index, the configuration and the declaration of every tensor in
`params.py`, and collects every disagreement. Nothing is allocated and no tensor is read.
"""

import collections
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from qwen4jax.config import Config, Quantization
from qwen4jax.hf_fields import ConfigError
from qwen4jax.params import Params, declare
from qwen4jax.weights import formats
from qwen4jax.weights.directory import Directory, open_directory, read_json
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.names import MTP, PREFIXES, VISION, Naming, leaves
from qwen4jax.weights.plan import check_tensors
from qwen4jax.weights.variants import as_found

_PER_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.\w+_proj\.(\w+)")
_SHARD = re.compile(r"(.*)\.shard_(\d+)\.weight")


@dataclasses.dataclass(frozen=True)
class Survey:
    """A directory, the model in it, and what keeps it from being loaded.

    Attributes:
        directory: its files and tensors.
        raw: the parsed `config.json`.
        config: the model, with the stored forms that were found; `mtp_num_hidden_layers` is 0 if
            the directory holds no draft head.
        naming: the layout of the tensors' names that was found.
        declared: the declaration of every tensor, in the tree that `load` returns.
        skipped: vision tensors, which no text model reads.
        notes: what differs from the configuration without being an error.
        problems: everything that keeps it from being loaded, one line each.
    """

    directory: Directory
    raw: dict[str, Any]
    config: Config
    naming: Naming
    declared: Params
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def require(self) -> None:
        """Raises what was found.

        Raises:
            CheckpointError: there are problems.
        """
        if self.problems:
            raise CheckpointError(self.directory.path, self.problems)

    def check_values(self) -> None:
        """Reads the few numbers that would spoil everything: scales and hash constants.

        Raises:
            CheckpointError: a scale is not a positive number, or a constant of the n-gram hash is
                not what the configuration gives.
        """
        problems = []
        for name, expected in self.naming.hash_buffers():
            found = self.directory.array(name)
            if not np.array_equal(found, expected):
                problems.append(
                    f"{self.directory.where(name)}: holds {found.tolist()}, the configuration "
                    f"gives {expected.tolist()}"
                )
        for path, leaf in leaves(self.declared):
            if path.endswith((".weight_scale_2", ".input_scale")) or leaf.shape == ():
                for piece in self.naming.pieces(path, leaf):
                    value = float(self.directory.array(piece.name).reshape(()))
                    if not 0 < value < float("inf"):
                        problems.append(
                            f"{self.directory.where(piece.name)}: a scale of {value} is not a "
                            "positive number"
                        )
        if problems:
            raise CheckpointError(self.directory.path, problems)


def survey(path: str | Path, *, dtype: str | None = None) -> Survey:
    """Compares a directory with its configuration, from headers alone.

    Args:
        path: the directory.
        dtype: of plain tensors in memory; None keeps what the checkpoint states.

    Raises:
        CheckpointError: there is no such directory.
        ConfigError: `config.json` names no model that this package can run.
    """
    directory = open_directory(Path(path))
    problems = directory.problems
    config = Config.from_hf(directory.path)
    raw = read_json(directory.path / "config.json", problems) or {}
    sidecar_file = directory.path / "hf_quant_config.json"
    sidecar = read_json(sidecar_file, problems) if sidecar_file.exists() else None

    notes: list[str] = []
    names = {*directory.entries, *directory.unseen}
    mtp = any(name.startswith(MTP) for name in names)
    if config.mtp_num_hidden_layers and not mtp and names:
        notes.append(f"no {MTP}* tensors: the draft head is off, mtp_num_hidden_layers is 0")
        config = config.replace(mtp_num_hidden_layers=0)
    elif mtp and not config.mtp_num_hidden_layers:
        problems.append(
            f"config.json: mtp_num_hidden_layers is 0, yet there are {MTP}* tensors; "
            "which of the two is meant?"
        )
        config = config.replace(mtp_num_hidden_layers=1)

    naming = _find_naming(directory, config)
    quantization = _find_forms(directory, naming)
    allowed, refused = formats.declared_forms(raw, sidecar, naming)
    problems += refused
    for group in formats.GROUPS:
        form = getattr(quantization, group)
        if form not in allowed[group] and not refused:
            problems.append(
                f"{group}: stored as {form}, the configuration declares "
                f"{' or '.join(sorted(allowed[group]))}"
            )
    stated = _stated_dtype(raw)
    kept = _dtype(stated, directory, notes)
    try:
        config = config.replace(dtype=dtype or kept, quantization=quantization)
        declared = _as_found(declare(config), directory)
    except ValueError as e:
        # a stored form that does not fit the configured sizes
        problems.append(str(e))
        raise CheckpointError(directory.path, problems) from e
    skipped = tuple(name for name in directory.entries if name.startswith(VISION))
    if directory.files:
        check_tensors(directory, naming, declared, stated, problems)
    return Survey(
        directory=directory,
        raw=raw,
        config=config,
        naming=naming,
        declared=declared,
        skipped=skipped,
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _stated_dtype(raw: dict[str, Any]) -> str | None:
    merged = {**raw, **raw.get("text_config", {})}
    dtype = merged.get("dtype", merged.get("torch_dtype"))
    if dtype not in ("bfloat16", "float16", "float32", None):
        raise ConfigError(f"config.json: dtype: {dtype!r} is not bfloat16, float16 or float32")
    return dtype


def _dtype(stated: str | None, directory: Directory, notes: list[str]) -> Any:
    """The dtype to hold plain tensors in.

    float16 is held as float32: its mantissa does not fit bfloat16. A file that states nothing gets
    what holds all of its tensors exactly.
    """
    if stated == "float16":
        notes.append("dtype float16 is held as float32")
    if stated is not None:
        return "bfloat16" if stated == "bfloat16" else "float32"
    labels = {e.dtype for name, e in directory.entries.items() if not name.startswith(VISION)}
    dtype = "float32" if labels & {"F16", "F32"} and "BF16" not in labels else "bfloat16"
    notes.append(f"config.json states no dtype: {dtype} by the stored tensors")
    return dtype


def _find_naming(directory: Directory, config: Config) -> Naming:
    """The layout in which the names stand: prefix, experts, shards of the n-gram tables."""
    entries = directory.entries
    nested = sum(name.startswith(PREFIXES[1]) for name in entries)
    flat = sum(name.startswith(PREFIXES[0]) and not name.startswith(VISION) for name in entries)
    prefix = PREFIXES[1] if 2 * nested > flat else PREFIXES[0]
    naming = Naming(config, prefix)

    names = (*entries, *directory.unseen)
    single = {m.group(1) for name in names if (m := _PER_EXPERT.fullmatch(name))}
    blocks = naming.expert_blocks()
    stacked = frozenset(b for b in blocks if naming.module(b) not in single)

    rows: dict[str, dict[int, int]] = {naming.module(t): {} for t in naming.tables()}
    for name, entry in entries.items():
        match = _SHARD.fullmatch(name)
        if match and match.group(1) in rows and entry.shape:
            rows[match.group(1)][int(match.group(2))] = entry.shape[0]
    shard_rows = {}
    for table in naming.tables():
        found = rows[naming.module(table)]
        # numeric order; with a shard missing the equal split stands, so that the gap is reported
        if sorted(found) == list(range(config.split_ngram_parts)):
            counts = tuple(found[i] for i in range(len(found)))
            index = naming.tables().index(table)
            if sum(counts) == config.ngram_hash(index).rows:
                shard_rows[table] = counts
    return dataclasses.replace(naming, stacked=stacked, shard_rows=shard_rows)


def _find_forms(directory: Directory, naming: Naming) -> Quantization:
    """The form of each group by the majority of its tensors; the check finds the exceptions."""
    labels: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    tables = {naming.module(t) for t in naming.tables()}
    for name in (*directory.entries, *directory.unseen):
        group = "mtp_experts" if name.startswith(MTP) else "experts"
        entry = directory.entries.get(name)
        if m := _PER_EXPERT.fullmatch(name):
            if entry is None:
                # the names of the scales tell what cannot be seen
                label = {"weight_scale_2": "U8", "weight_scale_inv": "F8_E4M3"}.get(m.group(3))
                labels[group] += collections.Counter([label] if label else [])
            elif m.group(3) == "weight":
                labels[group][entry.dtype] += 1
        elif entry and (m := _SHARD.fullmatch(name)) and m.group(1) in tables:
            labels["ngram_embedding"][entry.dtype] += 1
    names = {*directory.entries, *directory.unseen}
    if not labels["ngram_embedding"] and any(f"{table}.weight_scale" in names for table in tables):
        labels["ngram_embedding"]["F8_E4M3"] += 1
    forms: dict[str, Any] = {}
    for group in formats.GROUPS:
        label = next((label for label, _ in labels[group].most_common(1)), "BF16")
        forms[group] = {"U8": "nvfp4", "F8_E4M3": "fp8"}.get(label, "bf16")
    if forms["ngram_embedding"] == "nvfp4":
        forms["ngram_embedding"] = "bf16"
    return Quantization(**forms)


def _as_found(declared: Params, directory: Directory) -> Params:
    names = (*directory.entries, *directory.unseen)
    return as_found(
        declared,
        input_scales=[name for name in names if name.endswith(".input_scale")],
        wide_scales=[
            name
            for name, entry in directory.entries.items()
            if name.endswith(".weight_scale_inv") and entry.dtype == "F32"
        ],
    )
