"""Loading a Hugging Face checkpoint directory into the parameter tree.

Quantised tensors stay in their stored form. Everything is checked before anything is allocated;
then one leaf after the other is copied out of the mapped files, to a GPU in parts if it is large.
"""

import dataclasses
import functools
import math
import re
import time
import typing
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.host_table import HostTable
from qwen4jax.pallas import registry
from qwen4jax.params import Params, Tensor, tensors
from qwen4jax.weights.arrange import arrange
from qwen4jax.weights.checkpoint import survey
from qwen4jax.weights.draft import DraftForm, check_draft, check_form, lighten_draft
from qwen4jax.weights.names import leaves
from qwen4jax.weights.placement import Placement, check_pinned, pinned_array
from qwen4jax.weights.progress import Meter, Progress
from qwen4jax.weights.reader import Reader

# the largest part that is staged at once: larger ones load no faster
_LARGEST_PART = 1 << 30
# XLA's CPU client takes a NumPy array as it is, without a copy, if it is aligned to this
_ALIGNMENT = 64
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 2 ** (10 * i) for i, unit in enumerate("KMGT", start=1)}


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        path: the directory.
        tensors_read: tensors of the files that went into the parameters or were compared.
        bytes_read: bytes read from the files.
        vision_tensors_skipped: tensors of the vision tower, which is not part of the model.
        vision_bytes_skipped: their bytes.
        converted: stored dtype -> tensors cast to the dtype in memory.
        parameter_bytes: bytes of the loaded parameters, without a table that stays in its files.
        staging_bytes: the most host memory in use at a time besides resident parameters.
        notes: what differs from the configuration, as an absent draft head; and if the kernels of
            this GPU were chosen by measurements on another.
        seconds: how long it took.
    """

    path: Path
    tensors_read: int
    bytes_read: int
    vision_tensors_skipped: int
    vision_bytes_skipped: int
    converted: dict[str, int]
    parameter_bytes: int
    staging_bytes: int
    notes: tuple[str, ...]
    seconds: float


def load(
    path: str | Path,
    *,
    dtype: str | None = None,
    host_budget: int | str | None = None,
    table: Placement = "device",
    draft_weights: DraftForm | None = None,
    draft_vocab: int | None = None,
    progress: Progress | bool | None = None,
) -> Params:
    """Loads a Hugging Face checkpoint directory onto the default device.

    Args:
        path: directory with `config.json` and safetensors files.
        dtype: `bfloat16` or `float32` for plain tensors; None keeps what `config.json` states
            (float16 is held as float32). Quantised tensors never change.
        host_budget: host memory the loader may use, in bytes or as `"24GiB"`. It bounds what is
            staged on the way to an accelerator; on the CPU backend the parameters count as well.
        table: where n-gram tables lie: on the `device`; `pinned` in host memory, where the GPU's
            kernel reads the few rows it needs; or on the `host`, in the mapped files, of which
            only pages with rows that are asked for are read (`qwen4jax.host_table`): for CPUs and
            for devices that do not read host memory. The files must stay as they are then. Neither
            counts as `host_budget`. Output ids do not depend on it.
        draft_weights: form that the draft head's experts and projections, and a copy of the output
            head for drafts, are quantised to: `fp8` or `nvfp4`; None keeps what is stored. Output
            ids do not depend on it.
        draft_vocab: how many ids drafts are chosen among, the lowest; None is all. Output ids do
            not depend on it.
        progress: called with (bytes read, bytes in all); True shows a bar, False shows none, None
            shows one if standard error is a terminal.

    Returns:
        The parameters; `params.config` says what was found: dtype, stored forms, draft head.

    Raises:
        CheckpointError: the files do not hold the model; one message lists everything.
        ConfigError: `config.json` names no model that this package can run.
        MemoryError: `host_budget` is too small, or the table cannot be pinned; the message shows
            the arithmetic.
        ValueError: an argument is none of those described, or is about a draft head that the model
            does not have.
    """
    return load_and_report(
        path,
        dtype=dtype,
        host_budget=host_budget,
        table=table,
        draft_weights=draft_weights,
        draft_vocab=draft_vocab,
        progress=progress,
    )[0]


def load_and_report(
    path: str | Path,
    *,
    dtype: str | None = None,
    host_budget: int | str | None = None,
    table: Placement = "device",
    draft_weights: DraftForm | None = None,
    draft_vocab: int | None = None,
    progress: Progress | bool | None = None,
) -> tuple[Params, LoadReport]:
    """As `load`, with an account of what was read."""
    began = time.monotonic()
    if dtype is not None:
        dtype = np.dtype(dtype).name
        if dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: {dtype!r} is not 'bfloat16' or 'float32'")
    if table not in typing.get_args(Placement):
        raise ValueError(f"table: {table!r} is not 'device', 'pinned' or 'host'")
    check_form(draft_weights)
    budget = host_bytes(host_budget)
    found = survey(path, dtype=dtype)
    found.require()
    found.check_values()
    check_draft(found.config, draft_weights, draft_vocab)
    device = next(iter(jnp.zeros(()).devices()))
    tables = [t for t in tensors(found.declared) if _is_table(t)]
    if table == "pinned":
        check_pinned(tables, device.platform)
    apart = tables if table == "host" else []
    staged = [t for t in tensors(found.declared) if t not in apart]
    stage = Stage(staged, budget, resident=device.platform == "cpu")
    if not found.config.mtp_num_hidden_layers and found.notes:
        warnings.warn(f"{path}: {'; '.join(found.notes)}", stacklevel=3)

    reader = Reader(found)
    entries = found.directory.entries
    skipped_bytes = sum(entries[name].nbytes for name in found.skipped)
    in_files = [leaf for leaf in leaves(found.declared) if leaf[1] in apart]
    left = sum(entries[p.name].nbytes for leaf in in_files for p in found.naming.pieces(*leaf))
    total = sum(entry.nbytes for entry in entries.values()) - skipped_bytes - left
    with Meter(progress, total) as meter:
        meter.advance(sum(entries[name].nbytes for name in reader.read))
        arrays: list[jax.Array | HostTable] = []
        for where, leaf in leaves(found.declared):
            if table == "pinned" and leaf in tables:
                arrays.append(fill_pinned(reader, where, leaf, meter, device))
            elif leaf in apart:
                arrays.append(reader.in_its_files(where, leaf))
            else:
                arrays.append(stage.transfer(reader, where, leaf, meter))
    reader.require_nothing_unread()
    params = jax.tree.structure(found.declared).unflatten(arrays)
    del arrays
    params = lighten_draft(params, draft_weights, draft_vocab)
    params = arrange(params)
    report = LoadReport(
        path=Path(path),
        tensors_read=len(reader.read),
        bytes_read=meter.done,
        vision_tensors_skipped=len(found.skipped),
        vision_bytes_skipped=skipped_bytes,
        converted=dict(reader.converted),
        parameter_bytes=sum(array.nbytes for array in jax.tree.leaves(params)),
        staging_bytes=stage.peak,
        notes=(*found.notes, *filter(None, [registry.unmeasured()])),
        seconds=time.monotonic() - began,
    )
    return params, report


def _is_table(leaf: Tensor) -> bool:
    return leaf.axes[:1] == ("ngram_rows",)


def fill_pinned(
    reader: Reader, path: str, leaf: Tensor, meter: Meter, device: typing.Any
) -> jax.Array:
    """Reads one leaf into pinned host memory, without another copy of it."""
    array, memory = pinned_array(leaf.shape, jnp.dtype(leaf.dtype), device)
    step = max(1, _LARGEST_PART // max(1, _row_bytes(leaf)))
    for first in range(0, leaf.shape[0], step):
        meter.advance(reader.fill(memory[first : first + step], path, leaf, first))
    return array


class Stage:
    """The host memory between the files and the device, kept within the budget.

    Attributes:
        resident: whether host memory is where parameters live: then nothing is staged, each leaf
            is filled in place.
        largest: bytes of the largest part of a leaf on its way to a device.
        peak: the most bytes in use so far.
    """

    def __init__(self, sizes: Sequence[Tensor], budget: int | None, *, resident: bool):
        self.resident = resident
        self.peak = 0
        # besides the part itself the runtime holds a copy while it is on its way
        self.largest = _LARGEST_PART if budget is None else min(_LARGEST_PART, budget // 2)
        if budget is None:
            return
        if resident:
            total = sum(t.nbytes for t in sizes)
            if total > budget:
                raise MemoryError(
                    f"host_budget of {budget:,} bytes: the parameters stay in host memory on the "
                    f"CPU backend and take {total:,} bytes in {len(sizes)} arrays"
                )
        else:
            widest = max(sizes, key=_row_bytes)
            if 2 * _row_bytes(widest) > budget:
                raise MemoryError(
                    f"host_budget of {budget:,} bytes: staging needs 2 x {_row_bytes(widest):,} "
                    f"bytes for one row of {list(widest.shape)} {widest.dtype} and its copy on "
                    "the way to the device"
                )

    def transfer(self, reader: Reader, path: str, leaf: Tensor, meter: Meter) -> jax.Array:
        """Reads one leaf and puts it onto the device."""
        rows = leaf.shape[0] if leaf.shape else 1
        step = max(1, min(rows, self.largest // max(1, _row_bytes(leaf))))
        dtype = jnp.dtype(leaf.dtype)
        if self.resident or step == rows:
            whole = self._buffer(leaf.shape, dtype)
            meter.advance(reader.fill(whole, path, leaf))
            return jax.device_put(whole).block_until_ready()
        bits = np.dtype(f"uint{8 * dtype.itemsize}")
        array = jnp.zeros(leaf.shape, bits)
        buffer = self._buffer((step, *leaf.shape[1:]), dtype)
        for first in range(0, rows, step):
            part = buffer[: rows - first]
            meter.advance(reader.fill(part, path, leaf, first))
            # the buffer is free for the next part when this one has arrived
            array = _put_rows(array, part.view(bits), np.int32(first)).block_until_ready()
        return _reinterpret(array, leaf.dtype)

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        if not self.resident:
            self.peak = max(self.peak, 2 * size)
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + size].view(dtype).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(whole: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, first, 0)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _reinterpret(whole: jax.Array, dtype: str) -> jax.Array:
    return jax.lax.bitcast_convert_type(whole, jnp.dtype(dtype))


def _row_bytes(leaf: Tensor) -> int:
    return math.prod(leaf.shape[1:]) * jnp.dtype(leaf.dtype).itemsize


def host_bytes(budget: int | str | None) -> int | None:
    """`budget` in bytes; text has a unit of 1000 or 1024, as `24GB` or `24GiB`.

    Raises:
        ValueError: it is no size.
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", budget.upper())
        if not match or match.group(2) not in _UNITS:
            raise ValueError(f"host_budget: {budget!r} is no size; write 24GiB or 24GB")
        budget = int(float(match.group(1)) * _UNITS[match.group(2)])
    if isinstance(budget, bool) or budget <= 0:
        raise ValueError(f"host_budget: {budget!r} is not a positive number of bytes")
    return budget
