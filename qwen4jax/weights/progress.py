"""Progress in bytes."""

import sys
from collections.abc import Callable
from typing import Any, Self

import tqdm

Progress = Callable[[int, int], None]


class Meter:
    """Counts bytes and shows them.

    Attributes:
        total: bytes there are.
        done: bytes so far.
    """

    def __init__(self, progress: Progress | bool | None, total: int):
        """Begins at zero.

        Args:
            progress: called with (`done`, `total`); True shows a bar, False shows none, None shows
                one if standard error is a terminal.
            total: bytes there are.
        """
        self.total = total
        self.done = 0
        self._call = progress if callable(progress) else None
        shown = sys.stderr.isatty() if progress is None else progress is True
        self._bar = tqdm.tqdm(total=total, unit="B", unit_scale=True, disable=not shown)

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        self.done += count
        self._bar.update(count)
        if self._call:
            self._call(self.done, self.total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.close()
