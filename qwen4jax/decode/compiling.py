"""Seconds spent compiling, and which argument caused it."""

import logging
import threading
from collections.abc import Mapping
from typing import Any

import jax

log = logging.getLogger("qwen4jax")

_PARTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """Counts what JAX reports of tracing, lowering and compiling in this process."""

    def __init__(self):
        """Starts listening; JAX has no way to stop, so there is one clock per process."""
        self.seconds = 0.0
        self.programs = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _PARTS:
            with self._lock:
                self.seconds += duration_secs
                self.programs += event == _PARTS[-1]


clock = CompileClock()

_seen: dict[Any, list[dict[str, Any]]] = {}


def report_new_signature(program: Any, signature: Mapping[str, Any]) -> None:
    """Logs a warning that names what differs from an earlier call, if this call compiles again.

    Args:
        program: what is compiled for (hashable): calls of different programs are not compared.
        signature: argument name -> value of everything that a compilation depends on.
    """
    earlier = _seen.setdefault(program, [])
    if any(dict(signature) == one for one in earlier):
        return
    if earlier:
        nearest = min(earlier, key=lambda one: len(_changes(one, signature)))
        what = ", ".join(f"{n} {old} -> {new}" for n, old, new in _changes(nearest, signature))
        log.warning("compiling again: %s", what)
    earlier.append(dict(signature))


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, old.get(name), value) for name, value in new.items() if old.get(name) != value]
