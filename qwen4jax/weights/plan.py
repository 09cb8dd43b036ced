"""Every expected tensor against what the headers say: names, shapes, dtypes."""

import re
from collections.abc import Iterable

from qwen4jax.params import Params, Tensor
from qwen4jax.weights.directory import Directory
from qwen4jax.weights.names import VISION, Naming, Piece, leaves

_QUANTISED = ("U8", "I8", "F8_E4M3", "F8_E5M2")
_INPUT_SCALE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.input_scale")
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale")


def stored_labels(path: str, leaf: Tensor, stated: str | None) -> tuple[str, ...]:
    """The safetensors dtypes in which the leaf at `path` may be stored.

    Args:
        path: place in the tree.
        leaf: its declaration.
        stated: the dtype that `config.json` states. The other 16-bit format contradicts it: the
            same bytes would silently mean something else.
    """
    component = path.rpartition(".")[2]
    if component in ("weight_scale_2", "input_scale"):
        return ("F32",)
    if component == "weight_scale_inv" or (component == "weight_scale" and leaf.shape == ()):
        return ("BF16", "F32")
    if leaf.dtype == "float8_e4m3fn":
        return ("F8_E4M3",)
    if leaf.dtype == "uint8":
        return ("U8",)
    contradicting = {"bfloat16": "F16", "float16": "BF16"}.get(stated or "")
    return tuple(label for label in ("BF16", "F16", "F32") if label != contradicting)


def check_tensors(
    directory: Directory, naming: Naming, declared: Params, stated: str | None, problems: list[str]
) -> None:
    """Adds a line to `problems` for each tensor that is missing, unexpected or of another kind."""
    expected: set[str] = set()
    quantised: set[str] = set()
    no_input_scale: list[str] = []
    for path, leaf in leaves(declared):
        labels = stored_labels(path, leaf, stated)
        for piece in naming.pieces(path, leaf):
            expected.add(piece.name)
            if piece.name in directory.entries:
                if why := _mismatch(directory, piece, labels):
                    problems.append(why)
                    if directory.entries[piece.name].dtype in _QUANTISED and "F32" in labels:
                        quantised.add(piece.name.removesuffix(".weight"))
            elif piece.name not in directory.unseen:
                if path.endswith(".input_scale"):
                    no_input_scale.append(piece.name)
                else:
                    problems.append(f"{piece.name}: missing, expected {list(piece.shape)}")
    for name, value in naming.hash_buffers():
        expected.add(name)
        if name in directory.entries:
            if why := _mismatch(directory, Piece(name, value.shape), ("I64",)):
                problems.append(why)
        elif name not in directory.unseen:
            problems.append(f"{name}: missing, expected {list(value.shape)}")
    problems += _describe_input_scales(no_input_scale)
    for name in directory.entries:
        if name in expected or name.startswith(VISION):
            continue
        if name.rpartition(".")[0] not in quantised:
            problems.append(_describe_unexpected(directory, name))


def _mismatch(directory: Directory, piece: Piece, labels: tuple[str, ...]) -> str | None:
    entry = directory.entries[piece.name]
    where = directory.where(piece.name)
    if entry.dtype not in labels:
        elsewhere = not any(part in piece.name for part in (".experts.", ".ngram_embedding."))
        if entry.dtype in _QUANTISED and "F32" in labels and elsewhere:
            return (
                f"{where}: stored quantised, as {entry.dtype} {list(entry.shape)}; only routed "
                "experts and n-gram tables are read so, this tensor does not survive it"
            )
        return f"{where}: dtype {entry.dtype}, expected {' or '.join(labels)}"
    if entry.shape not in (piece.shape, *piece.also):
        return f"{where}: shape {list(entry.shape)}, expected {list(piece.shape)}"
    return None


def _describe_input_scales(names: Iterable[str]) -> list[str]:
    """One line for each block of experts of which some lack their input scale."""
    lacking: dict[str, dict[int, list[str]]] = {}
    for name in names:
        match = _INPUT_SCALE.fullmatch(name)
        assert match, name
        block, expert, projection = match.groups()
        lacking.setdefault(block, {}).setdefault(int(expert), []).append(projection)
    return [
        f"{block}: input_scale is missing for expert"
        + ", ".join(f" {e} ({', '.join(projections)})" for e, projections in experts.items())
        + "; either all experts have one or none"
        for block, experts in lacking.items()
    ]


def _describe_unexpected(directory: Directory, name: str) -> str:
    entry = directory.entries[name]
    where = f"{directory.where(name)}: {entry.dtype} {list(entry.shape)}"
    if name.endswith(_KV_SCALES):
        return f"{where}: scales of a quantised KV cache are not supported"
    return f"{where}: unexpected, the configuration has no such tensor"
