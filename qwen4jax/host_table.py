"""A table that stays in host memory, or in its files, and gives compiled programs single rows.

For n-gram tables that do not fit a device, where the device cannot read host memory by itself: on
CPUs a table needs no second copy beside its mapped files, and of these only pages that hold a row
that was asked for are ever read. A program asks by a call back to the host, which a CUDA graph
cannot hold; where a GPU reads pinned memory, `load(table="pinned")` is faster.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def require_arrays(params: Any, what: str) -> None:
    """Refuses parameters of which a part is no array.

    Raises:
        ValueError: their table is a `HostTable`; `what` begins the message.
    """
    is_table = lambda x: isinstance(x, HostTable)  # noqa: E731
    if any(map(is_table, jax.tree.leaves(params, is_leaf=is_table))):
        raise ValueError(f"{what}: the n-gram table is not an array, load with table='device'")


@jax.tree_util.register_static
class HostTable:
    """Rows [rows, width] in NumPy arrays; in a pytree a node without leaves, static like a config.

    Programs are compiled for this very table, which they keep alive: another one, of the same files
    too, has them compiled again. It is never written to, and neither may its files be.

    Attributes:
        shape: of the table.
        dtype: of the rows that it gives; parts in another one are cast.
    """

    def __init__(self, parts: Sequence[tuple[np.ndarray, Any]], dtype: Any):
        """Takes parts as they are, without a copy.

        Args:
            parts: consecutive rows, each part as its bytes, uint8 [rows, bytes of a row] (so that
                a mapped file need not be aligned), and the dtype that they are of.
            dtype: of what is given.
        """
        self.dtype = np.dtype(dtype)
        self._parts = [(stored, np.dtype(kind)) for stored, kind in parts]
        counts = [len(stored) for stored, _ in self._parts]
        self._starts = np.cumsum([0, *counts])
        stored, kind = self._parts[0]
        self.shape = (sum(counts), stored.shape[1] // kind.itemsize)

    @property
    def ndim(self) -> int:
        """Two."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """What the table would take as an array."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows [*ids.shape, width] by their numbers.

        Raises:
            IndexError: there is no such row.
        """
        wanted = np.asarray(ids).reshape(-1)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < self.shape[0]:
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {self.shape[0]}")
        out = np.empty((wanted.size, self.shape[1]), self.dtype)
        holder = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(holder):
            stored, kind = self._parts[number]
            here = np.flatnonzero(holder == number)
            self._put(out, here, stored[wanted[here] - self._starts[number]], kind)
        return out.reshape(*np.shape(ids), self.shape[1])

    def take(self, ids: jax.Array) -> jax.Array:
        """`rows` in a compiled program."""
        # callbacks do not know every dtype of 8 bits
        bits = np.dtype(f"uint{8 * self.dtype.itemsize}")
        found = jax.pure_callback(
            lambda ids: self.rows(np.asarray(ids)).view(bits),
            jax.ShapeDtypeStruct((*ids.shape, self.shape[1]), bits),
            ids,
            vmap_method="broadcast_all",
        )
        return jax.lax.bitcast_convert_type(found, self.dtype)

    def __getitem__(self, where: slice | tuple[slice]) -> np.ndarray:
        """Consecutive rows, copied."""
        (part,) = where if isinstance(where, tuple) else (where,)
        return self.rows(np.arange(*part.indices(self.shape[0])))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole table in new memory."""
        if copy is False:
            raise ValueError("a table in its files becomes an array by a copy only")
        return self[:].astype(dtype or self.dtype, copy=False)

    def _put(self, out: np.ndarray, here: np.ndarray, stored: np.ndarray, kind: np.dtype) -> None:
        if kind == self.dtype:
            # as bytes: NumPy copies elements of ml_dtypes one by one
            out.view(np.uint8)[here] = stored
            return
        # float32 to a narrower format may overflow to inf, as any cast does
        with np.errstate(over="ignore", invalid="ignore"):
            out[here] = stored.view(kind).astype(self.dtype)
