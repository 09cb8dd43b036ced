"""Faults on demand, for the tests of the server: `--test-faults`, then metadata of a call.

`x-test-fault: lost-round` makes the next round fail as it does when the device loses its buffers;
`nan` fills the call's cache with NaN; `stall=SECONDS` holds the device's thread up, and so does
`hold=TOKENS`, once the call has so many tokens: until a call is cancelled or late, or GetStatus is
asked with `release`. Each happens once, to the call that asks for it. Without the flag the metadata
means nothing.
"""

import dataclasses
import time
from collections.abc import Callable

import jax

from qwen4jax.decode.batching import Engine
from qwen4jax.serve.errors import invalid
from qwen4jax.state import AttentionCache, DeltaNetState

METADATA = "x-test-fault"
RELEASE = "release"
_KINDS = ("lost-round", "nan", "stall", "hold", RELEASE)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to come.

    Attributes:
        kind: `lost-round`, `nan`, `stall`, `hold` or `release`.
        amount: seconds of a stall, tokens before a hold.
    """

    kind: str
    amount: float = 0.0

    def is_due(self, tokens: int) -> bool:
        """Whether it happens to a stream that has so many tokens."""
        if self.kind == "stall":
            return True
        return tokens >= (self.amount if self.kind == "hold" else 1)

    def happen(self, engine: Engine, slot: int, hold: Callable[[], None]) -> None:
        """Does it, to the request in `slot`; `hold` returns when a hold has ended."""
        if self.kind == "stall":
            time.sleep(self.amount)
        elif self.kind == "hold":
            hold()
        elif self.kind == "nan":
            _poison(engine, slot)
        elif self.kind == "lost-round":
            for leaf in jax.tree.leaves(engine.state):
                leaf.delete()


def parse_fault(text: str) -> Fault:
    """The fault that metadata asks for.

    Raises:
        CallError: there is no such fault.
    """
    kind, _, amount = text.partition("=")
    try:
        fault = Fault(kind, float(amount or 0))
    except ValueError:
        raise invalid(f"{METADATA}: {amount!r} is no number") from None
    if kind not in _KINDS:
        raise invalid(f"{METADATA}: {kind!r} is no fault")
    return fault


def _poison(engine: Engine, slot: int) -> None:
    """NaN in all that a slot's layers keep."""
    pages = engine.state.page_table[slot]
    nan = float("nan")

    def spoilt(cache: AttentionCache | DeltaNetState) -> AttentionCache | DeltaNetState:
        if isinstance(cache, DeltaNetState):
            return cache.replace(recurrent=cache.recurrent.at[slot].set(nan))
        return cache.replace(key=cache.key.at[pages].set(nan), value=cache.value.at[pages].set(nan))

    engine.state = engine.state.replace(layers=tuple(map(spoilt, engine.state.layers)))
