"""Which implementation of an operation runs, and why.

    with registry.using("triton"):             # every operation that it applies to
        ...
    with registry.using({"moe.experts": "triton"}):
        ...
    print(registry.explain())

The order of choice: the implementation named in the call, the one named by `using`, the fastest
that was measured on this kind of device or on the one that stands in for it (`measured.py`), the
reference. An implementation named for an operation runs or raises; the others are skipped where
they do not apply. What is chosen is part of what a jitted function is compiled for.

A kernel is for one device. XLA, which partitions references among the devices of a mesh, would
gather a kernel's operands whole at every call; so a kernel refuses operands that lie on several,
and the reference runs. Inside `jax.shard_map` operands are a device's own, and kernels run.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AxisType

from qwen4jax import pallas
from qwen4jax.pallas import measured

REFERENCE = "reference"

# of a `Kernel`: where wgmma is, or all that has TMA
HOPPER: dict[str, Any] = {"devices": measured.HOPPER, "devices_text": "a Hopper GPU"}
TMA: dict[str, Any] = {
    "devices": f"{measured.HOPPER}|{measured.BLACKWELL}",
    "devices_text": "a GPU that has TMA, Hopper or later",
}

# ((operation or "", implementation), ...), and the kind of device traced for
_choice = jax.make_user_context(())
_device = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation that is not for every device or argument.

    Attributes:
        function: dotted name, imported when it first runs: kernel languages are extras.
        needs: packages that must be installed.
        devices: pattern of the kinds of device it runs on.
        devices_text: the same in words.
        refuses: what keeps it from given arguments, if anything; called like the operation.
    """

    function: str
    needs: tuple[str, ...] = ()
    devices: str = r"NVIDIA"
    devices_text: str = "an NVIDIA GPU"
    refuses: Callable[..., str | None] = lambda *args, **kwargs: None

    def missing(self, device: str) -> str | None:
        """What keeps it from this kind of device, if anything."""
        if not re.search(self.devices, device):
            return f"needs {self.devices_text}, this is {device}"
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"needs {', '.join(absent)} (pip install 'qwen4jax[gpu]')"
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        module, _, name = self.function.rpartition(".")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)


class Operation(Mapping[str, Callable[..., Any]]):
    """One operation's implementations by name, the reference among them."""

    def __init__(self, name: str, implementations: Mapping[str, Callable[..., Any]]):
        assert REFERENCE in implementations
        self.name = name
        self._implementations = dict(implementations)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._implementations[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._implementations)

    def __len__(self) -> int:
        return len(self._implementations)

    def run(self, implementation: str | None, rows: int, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the implementation named, or the one preferred for `rows` rows.

        Raises:
            ValueError: there is none of that name.
            NotImplementedError: the one named does not run here, or not with these arguments.
        """
        if implementation is not None:
            run = self._named(implementation, args, kwargs)
        else:
            run = self._preferred(rows, args, kwargs)
        return run(*args, **kwargs)

    def _named(self, name: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        if name not in self:
            known = ", ".join(self)
            raise ValueError(f"{self.name}: no implementation {name!r}; there are: {known}")
        if reason := self._refusal(name, args, kwargs):
            raise NotImplementedError(f"{self.name}: {name!r} {reason}")
        return self[name]

    def _preferred(self, rows: int, args: Any, kwargs: Any) -> Callable[..., Any]:
        for operation, name in _choice.value:
            if operation == self.name:
                return self._named(name, args, kwargs)
            if not operation and name in self and not self._refusal(name, args, kwargs):
                return self[name]
        for name in self.order(device_kind(), rows):
            if self._refusal(name, args, kwargs) is None:
                return self[name]
        return self[REFERENCE]

    def order(self, device: str, rows: int) -> list[str]:
        """Implementations preferred for `rows` rows on a kind of device, best first."""
        for most_rows, names in measured.rows_of(device, self.name):
            if rows <= most_rows:
                return list(names)
        return []

    def missing(self, name: str, device: str) -> str | None:
        """What an implementation lacks on a kind of device, if anything."""
        entry = self[name]
        return entry.missing(device) if isinstance(entry, Kernel) else None

    def _refusal(self, name: str, args: Any, kwargs: Any) -> str | None:
        entry = self[name]
        if not isinstance(entry, Kernel):
            return None
        return (
            entry.missing(device_kind()) or _spread(args, kwargs) or entry.refuses(*args, **kwargs)
        )


def _spread(args: Any, kwargs: Any) -> str | None:
    """What keeps a kernel from operands on several devices among which XLA would partition it."""
    for leaf in jax.tree.leaves((args, kwargs)):
        placement = getattr(getattr(leaf, "aval", None), "sharding", None)
        if placement is None:
            continue
        axes = zip(placement.mesh.axis_sizes, placement.mesh.axis_types, strict=True)
        devices = math.prod(size for size, kind in axes if kind != AxisType.Manual)
        if devices > 1:
            return f"is for one device, and an operand lies on a mesh of {devices}"
    return None


def device_kind() -> str:
    """The kind of device that is traced for: `using(device=)`, or JAX's default device."""
    if _device.value is not None:
        return _device.value
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.devices(default)[0].device_kind
    return (default or jax.devices()[0]).device_kind


@contextlib.contextmanager
def using(
    implementation: str | Mapping[str, str] | None = None, *, device: str | None = None
) -> Iterator[None]:
    """Within it, operations run the implementation named; jitted functions compile for it anew.

    Args:
        implementation: a name, for every call that it applies to, or names by operation.
        device: kind of device to choose for ("NVIDIA H200"), for programs that are compiled
            on another machine than they run on.

    Raises:
        ValueError: no operation, or not the one named, has that implementation.
    """
    with contextlib.ExitStack() as stack:
        if implementation is not None:
            named = {"": implementation} if isinstance(implementation, str) else implementation
            for operation, name in named.items():
                _check(operation, name)
            stack.enter_context(_choice((*named.items(), *_choice.value)))
        if device is not None:
            stack.enter_context(_device(device))
        yield


def _check(operation: str, name: str) -> None:
    known = operations()
    if operation and operation not in known:
        raise ValueError(f"no operation {operation!r}; there are: {', '.join(known)}")
    of = [known[operation]] if operation else list(known.values())
    if not any(name in one for one in of):
        raise ValueError(f"{operation or 'no operation'}: no implementation {name!r}")


def operations() -> dict[str, Operation]:
    """Every operation by name."""
    found: dict[str, Operation] = {}
    for module in pkgutil.iter_modules(pallas.__path__):
        if module.ispkg:
            package = importlib.import_module(f"{pallas.__name__}.{module.name}")
            found |= {o.name: o for o in vars(package).values() if isinstance(o, Operation)}
    return found


def explain() -> str:
    """A line for each implementation of each operation: whether it runs here, and when."""
    device = device_kind()
    lines = [f"device: {device}"]
    if note := unmeasured():
        lines.append(f"note: {note}")
    for operation in operations().values():
        lines.append(f"{operation.name}:")
        for name in operation:
            missing = operation.missing(name, device)
            lines.append(f"  {name}: {missing or _place(operation, name, device)}")
    return "\n".join(lines)


def unmeasured() -> str | None:
    """In words, where no kernel was checked and timed on this kind of GPU: what runs instead."""
    device = device_kind()
    source = measured.source(device)
    if "NVIDIA" not in device or source == device:
        return None
    if source is None:
        return f"no kernel was run on {device} yet: XLA's operations run, kernels when named"
    return f"no kernel was run on {device} yet: what was right and fastest on {source} runs"


def _place(operation: Operation, name: str, device: str) -> str:
    """When an implementation that runs here is the one that does."""
    for chosen, implementation in _choice.value:
        if chosen == operation.name or (not chosen and implementation in operation):
            return "named by using()" if implementation == name else "not the one named by using()"
    source = measured.source(device)
    fastest = "measured fastest" if source == device else f"fastest on {source}"
    below, places = 0, []
    for most_rows, names in measured.rows_of(device, operation.name):
        able = [n for n in names if not operation.missing(n, device)]
        last = "any number of" if most_rows == measured.ANY else most_rows
        rows = f"for {below + 1} to {last} rows"
        if able[:1] == [name]:
            places.append(f"{fastest} {rows}")
        elif name in able:
            places.append(f"{rows} where {able[able.index(name) - 1]} does not apply")
        below = most_rows
    if places:
        return ", ".join(places)
    if name == REFERENCE and below == measured.ANY:
        return "where no other applies"
    if name == REFERENCE:
        return f"above {below} rows, and where no other applies" if below else "the only choice"
    return "runs when named"
