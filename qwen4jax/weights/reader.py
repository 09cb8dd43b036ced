"""Copying leaves of the parameter tree out of mapped files into host memory."""

import collections

import numpy as np

from qwen4jax.host_table import HostTable
from qwen4jax.params import Tensor
from qwen4jax.weights.checkpoint import Survey
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.names import Piece
from qwen4jax.weights.safetensors import DTYPES


class Reader:
    """Reads the tensors of a checkpoint that has been surveyed, and keeps account of them.

    Attributes:
        read: names of the tensors that were read or compared.
        converted: stored dtype -> tensors that were cast.
    """

    def __init__(self, found: Survey):
        self.found = found
        self.read = {name for name, _ in found.naming.hash_buffers()}
        self.converted: collections.Counter[str] = collections.Counter()

    def fill(self, out: np.ndarray, path: str, leaf: Tensor, first: int = 0) -> int:
        """Fills `out` with rows `first, first + 1, ...` of the leaf at `path`, cast to its dtype.

        Rows are counted along the leaf's first axis; a scalar is one whole.

        Returns:
            The bytes that were read.

        Raises:
            CheckpointError: block scales hold something that is no scale.
        """
        directory = self.found.directory
        done = 0
        for piece in self.found.naming.pieces(path, leaf):
            target, source = _overlap(piece, leaf, first, len(out) if leaf.shape else 1)
            if target is None:
                continue
            stored = directory.array(piece.name)
            if path.endswith((".weight_scale", ".weight_scale_inv")):
                self._check_scales(piece.name, stored)
            part = out[(*target, ...)]
            values = stored.reshape((-1, *leaf.shape[1:]))[source] if source else stored
            _copy(part, values.reshape(part.shape))
            done += part.size * stored.itemsize
            self._account(piece.name, stored.dtype, out.dtype)
            directory.release(piece.name)
        return done

    def in_its_files(self, path: str, leaf: Tensor) -> HostTable:
        """The table at `path` where it is: its rows are read when they are asked for."""
        parts = []
        for piece in self.found.naming.pieces(path, leaf):
            stored, kind = self.found.directory.rows(piece.name)
            parts.append((stored, kind))
            self._account(piece.name, kind, np.dtype(leaf.dtype))
        return HostTable(parts, leaf.dtype)

    def require_nothing_unread(self) -> None:
        """Raises if a tensor of the files went nowhere: then the table of names has a hole.

        Raises:
            CheckpointError: there are unread tensors.
        """
        unread = set(self.found.directory.entries) - self.read - set(self.found.skipped)
        if unread:
            raise CheckpointError(
                self.found.directory.path, [f"{name}: was not read" for name in sorted(unread)]
            )

    def _account(self, name: str, stored: np.dtype, held: np.dtype) -> None:
        if name not in self.read:
            self.read.add(name)
            if stored != held:
                self.converted[stored.name] += 1

    def _check_scales(self, name: str, stored: np.ndarray) -> None:
        if stored.dtype == DTYPES["F8_E4M3"]:
            bits = stored.view(np.uint8)
            # 0x7f is this format's only NaN, bit 7 the sign
            bad = ((bits & 0x7F) == 0x7F) | (bits > 0x80)
        else:
            values = stored.astype(np.float32)
            bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            raise CheckpointError(
                self.found.directory.path,
                [
                    f"{self.found.directory.where(name)}: {int(bad.sum())} of {bad.size} scales "
                    "are negative or not finite"
                ],
            )


def _copy(to: np.ndarray, values: np.ndarray) -> None:
    if to.dtype == values.dtype:
        # as bits: NumPy copies elements of ml_dtypes one by one
        bits = np.dtype(f"u{to.itemsize}")
        to.view(bits)[...] = values.view(bits)
        return
    # float32 to a narrower format may overflow to inf, as any cast does
    with np.errstate(over="ignore", invalid="ignore"):
        to[...] = values


def _overlap(
    piece: Piece, leaf: Tensor, first: int, count: int
) -> tuple[tuple[int | slice, ...] | None, slice | None]:
    """(part of the buffer, rows of the stored tensor) for rows `first` to `first + count`.

    The part is None where the piece has none of these rows; the rows are None for the whole.
    """
    match piece.where:
        case ():
            if not leaf.shape or count == leaf.shape[0]:
                return (), None
            return (), slice(first, first + count)
        case (slice() as rows,):
            start, stop = max(rows.start, first), min(rows.stop, first + count)
            if start >= stop:
                return None, None
            return (slice(start - first, stop - first),), slice(
                start - rows.start, stop - rows.start
            )
        case (int() as row, *rest):
            inside = first <= row < first + count
            return ((row - first, *rest) if inside else None), None
    raise AssertionError(piece.where)
