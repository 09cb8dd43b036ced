"""Writing a checkpoint directory in Hugging Face's layout."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen4jax.config import LINEAR, Config
from qwen4jax.host_table import HostTable
from qwen4jax.params import Params, declare
from qwen4jax.weights.arrange import stored_leaves
from qwen4jax.weights.directory import INDEX, SINGLE
from qwen4jax.weights.formats import quantization_config
from qwen4jax.weights.names import Naming, leaves
from qwen4jax.weights.progress import Meter, Progress
from qwen4jax.weights.safetensors import LABELS, Output, write_file

SHARD_BYTES = 5 * 10**9


def save(
    params: Params,
    path: str | Path,
    *,
    stacked_experts: bool = True,
    shard_bytes: int = SHARD_BYTES,
    label: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes parameters as a Hugging Face checkpoint directory; `load` gives the same bits back.

    The directory appears when it is complete. Stored forms stay as they are. An ablation is no
    part of the format: what is loaded has the default one.

    Args:
        params: the parameters.
        path: the directory to make.
        stacked_experts: whether plain experts are one tensor for all of a layer, as in the released
            bfloat16 checkpoint; quantised ones are always one by one.
        shard_bytes: largest size of a file, unless a single tensor is larger.
        label: text for `_name_or_path` of `config.json`.
        overwrite: whether to replace a directory that is there.

    Raises:
        FileExistsError: the directory is there and not empty.
        ValueError: a leaf is not what the configuration declares, or the draft head was changed by
            `draft_weights` or `draft_vocab`.
    """
    if params.config.quantization.draft_copy:
        raise ValueError(
            "draft_weights, draft_vocab: a draft head that was changed on request is not saved"
        )
    naming = Naming(params.config)
    if stacked_experts:
        naming = dataclasses.replace(naming, stacked=frozenset(naming.expert_blocks()))
    raw = hf_config(params.config)
    if label is not None:
        raw["_name_or_path"] = label
    write_checkpoint(
        Path(path), raw, _outputs(params, naming), shard_bytes=shard_bytes, overwrite=overwrite
    )


def hf_config(config: Config) -> dict[str, Any]:
    """The contents of `config.json` for a text-only model."""
    written_apart = ("dtype", "quantization", "ablation", "rope_parameters", "layer_types")
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in written_apart
    }
    rope = dataclasses.asdict(config.rope_parameters)
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": config.dtype,
        # the spelling of the released file, which every version of transformers reads
        "layer_types": [t if t == LINEAR else "full_attention" for t in config.layer_types],
        "rope_parameters": {**rope, "rope_type": "default", "mrope_interleaved": True},
        **fields,
        **quantization_config(config.quantization, Naming(config)),
    }


def _outputs(params: Params, naming: Naming) -> list[Output]:
    declared = dict(leaves(declare(params.config)))
    latest = _Latest()
    outputs = []
    for path, leaf, read in stored_leaves(params):
        expected = declared[path]
        # FP8 block scales may be float32 as well
        wide = path.endswith(".weight_scale_inv") and leaf.dtype == np.float32
        if leaf.shape != expected.shape or (leaf.dtype != expected.dtype and not wide):
            raise ValueError(
                f"{path}: {leaf.dtype} {list(leaf.shape)}, the configuration declares "
                f"{expected.dtype} {list(expected.shape)}"
            )
        label = LABELS[np.dtype(leaf.dtype)]
        for piece in naming.pieces(path, expected):
            outputs.append(
                Output(
                    piece.name,
                    label,
                    piece.shape,
                    lambda read=read, where=piece.where: latest.on_host(read)[where],
                )
            )
    for name, values in naming.hash_buffers():
        outputs.append(Output(name, "I64", values.shape, lambda values=values: values))
    return outputs


class _Latest:
    """One leaf on the host at a time: its pieces are written one after the other."""

    def __init__(self):
        self._read: Callable[[], Any] | None = None
        self._array: np.ndarray | HostTable = np.empty(0)

    def on_host(self, read: Callable[[], Any]) -> Any:
        if read is not self._read:
            leaf = read()
            # a table in its files gives the rows of one piece after the other
            array = leaf if isinstance(leaf, HostTable) else np.asarray(leaf)
            self._read, self._array = read, array
        return self._array


def write_checkpoint(
    path: Path,
    config: dict[str, Any],
    outputs: Sequence[Output],
    *,
    shard_bytes: int = SHARD_BYTES,
    others: Iterable[Path] = (),
    overwrite: bool = False,
    progress: Progress | bool | None = False,
) -> None:
    """Writes a checkpoint directory beside `path` and renames it when it is complete.

    What a killed process leaves behind has another name and no `config.json`: it never loads.

    Args:
        path: the directory to make.
        config: contents of `config.json`.
        outputs: the tensors.
        shard_bytes: largest size of a file, unless a single tensor is larger.
        others: files to copy into the directory.
        overwrite: whether to replace a directory that is there.
        progress: as in `load`.

    Raises:
        FileExistsError: the directory is there and not empty.
        ValueError: two tensors have the same name.
    """
    if path.exists() and (path.is_file() or any(path.iterdir())) and not overwrite:
        raise FileExistsError(f"{path} is there and not empty")
    shards = _shards(outputs, shard_bytes)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with Meter(progress, sum(o.nbytes for o in outputs)) as meter:
            for name, members in shards.items():
                write_file(partial / name, members, {"format": "pt"})
                meter.advance(sum(o.nbytes for o in members))
        if len(shards) > 1:
            weight_map = {o.name: name for name, members in shards.items() for o in members}
            index = {"metadata": {"total_size": meter.total}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=1))
        for other in others:
            shutil.copyfile(other, partial / other.name)
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        _replace(path, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(path: Path, new: Path) -> None:
    if not path.exists() or not any(path.iterdir()):
        new.replace(path)
        return
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    path.replace(old)
    new.replace(path)
    shutil.rmtree(old)


def _shards(outputs: Sequence[Output], shard_bytes: int) -> dict[str, list[Output]]:
    """File name -> tensors, in the given order, as many to a file as fit."""
    if len({o.name for o in outputs}) != len(outputs):
        raise ValueError("two tensors have the same name")
    groups: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if groups[-1] and size + output.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    width = max(5, int(math.log10(len(groups))) + 1)
    return {
        f"model-{i:0{width}}-of-{len(groups):0{width}}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }
