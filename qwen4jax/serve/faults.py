"""Faults on demand, for the tests of the server: `--test-faults`, then metadata of a call.

`x-test-fault: lost-round` makes the next round fail as it does when the device loses its buffers;
`nan` fills the call's cache with NaN; `stall=SECONDS` holds the device's thread up. Each happens
once, to the call that asks for it. Without the flag the metadata means nothing.
"""

import dataclasses
import time

import jax

from qwen4jax.decode.batching import Engine
from qwen4jax.serve.errors import invalid
from qwen4jax.state import AttentionCache, DeltaNetState

METADATA = "x-test-fault"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to come.

    Attributes:
        kind: `lost-round`, `nan` or `stall`.
        seconds: of a stall.
    """

    kind: str
    seconds: float = 0.0

    @property
    def needs_tokens(self) -> bool:
        """Whether it happens to a stream that has begun rather than at once."""
        return self.kind != "stall"

    def happen(self, engine: Engine, slot: int) -> None:
        """Does it, to the request in `slot`."""
        if self.kind == "stall":
            time.sleep(self.seconds)
        elif self.kind == "nan":
            _poison(engine, slot)
        else:
            for leaf in jax.tree.leaves(engine.state):
                leaf.delete()


def parse_fault(text: str) -> Fault:
    """The fault that metadata asks for.

    Raises:
        CallError: there is no such fault.
    """
    kind, _, seconds = text.partition("=")
    try:
        fault = Fault(kind, float(seconds or 0))
    except ValueError:
        raise invalid(f"{METADATA}: {seconds!r} are no seconds") from None
    if kind not in ("lost-round", "nan", "stall"):
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
