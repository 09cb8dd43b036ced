"""What the registry chose while a program was traced, and whether that is the measured choice."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from qwen4jax.pallas import registry

# operations of a round and of a prefill, of either alone: without them another program was traced
BOTH = {
    "compress_and_store.prepare_and_store",
    "gated_residual.boundary",
    "gated_residual.update",
    "index_score",
    "index_topk",
    "moe.experts",
    "moe.router",
    "ple.embed",
    "ple.mix",
    "skinny_matmul",
    "skinny_matmul.projections",
    "sparse_attention",
}
ROUND = {"gated_delta.step", "gated_delta.commit", "skinny_matmul.argmax"}
PREFILL = {"gated_delta.chunks"}
# operations of the model whose reference runs on an H200, as far as no other is preferred for the
# rows of the call (`measured.py`): why
WITHOUT_KERNEL = {
    "gated_residual.update": "there is none: XLA fuses an addition with what is beside it",
    "skinny_matmul": "cuBLAS is faster for many rows",
    "skinny_matmul.projections": "cuBLAS is faster for many rows",
    "skinny_matmul.argmax": "follows the output head's product, which is cuBLAS's for many rows",
    "ple.mix": "the kernel computes earlier tokens' part of a convolution again: for few rows",
}
# implementations that take the released widths alone: in a narrow model the next best one runs
ONLY_WIDE = {("gated_delta.chunks", "mosaic_hopper"), ("moe.experts", "mosaic_hopper")}
# implementations that do not take all stored forms of weights: of others the next best one runs
SOME_FORMS = {("moe.experts", "mosaic_hopper")}


class Choice(NamedTuple):
    """One call of an operation without a named implementation.

    Attributes:
        operation: name.
        rows: tokens of the call.
        chosen: implementation that ran.
        measured: those measured fastest for as many rows, best first.
    """

    operation: str
    rows: int
    chosen: str
    measured: tuple[str, ...]


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """The choices made within it, at every call that is traced or run."""
    found: list[Choice] = []
    preferred = registry.Operation._preferred

    def choose(self: registry.Operation, rows: int, args: Any, kwargs: Any) -> Any:
        run = preferred(self, rows, args, kwargs)
        name = next(name for name in self if self[name] is run)
        order = self.order(registry.device_kind(), rows)
        found.append(Choice(self.name, rows, name, tuple(order)))
        return run

    with mock.patch.object(registry.Operation, "_preferred", choose):
        yield found


def fallen_back(choices: Iterable[Choice], *, narrow: bool = False) -> set[Choice]:
    """Choices that are neither what measured fastest nor among `WITHOUT_KERNEL`.

    After one of `SOME_FORMS` the next may run.

    Of a `narrow` model: fastest apart from `ONLY_WIDE`.
    """

    def fell(c: Choice) -> bool:
        fastest = [n for n in c.measured if not narrow or (c.operation, n) not in ONLY_WIDE]
        if not fastest:
            return c.operation not in WITHOUT_KERNEL
        return c.chosen not in fastest[: 1 + ((c.operation, fastest[0]) in SOME_FORMS)]

    return {c for c in choices if fell(c)}
