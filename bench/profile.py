"""Kernel times of a compiled function by the scopes of the program it came from."""

import collections
import glob
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

from bench.parts import part_of

# (names under which to look for the kernel's scope, best first; microseconds)
Event = tuple[tuple[str, ...], float]


def device_kernels(run: Callable[[Any], Any], carry: Any, *, rounds: int) -> list[Event]:
    """Runs `carry = run(carry)` under the profiler; every kernel of the first device."""
    folder = tempfile.mkdtemp(prefix="profile-")
    with jax.profiler.trace(folder):
        for _ in range(rounds):
            carry = run(carry)
        jax.block_until_ready(carry)
    events: list[Event] = []
    for file in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        data = jax.profiler.ProfileData.from_file(file)
        for plane in data.planes:
            if plane.name.startswith("/device:GPU:0"):
                for line in plane.lines:
                    if "Stream" in line.name:
                        events += list(_events(line))
    return events


def _events(line: Any) -> Iterable[Event]:
    for event in line.events:
        stats = {str(k): str(v) for k, v in event.stats}
        # inside a graph the statistics name the whole graph, the kernel only itself
        names = (event.name, stats.get("hlo_op", ""), stats.get("name", ""))
        yield names, event.duration_ns / 1e3


def time_by_part(
    events: list[Event], scopes: dict[str, list[str]], *, rounds: int
) -> tuple[dict[tuple[str, str], float], int]:
    """Milliseconds per round of each (part, phase), and kernels per round; scopes by `op_names`."""
    totals: dict[tuple[str, str], float] = collections.defaultdict(float)
    unknown: dict[str, float] = collections.defaultdict(float)
    for names, microseconds in events:
        found = (scopes.get(_kernel_name(name)) for name in names)
        places = next((scope for scope in found if scope), [names[-1]])
        for place in places:
            # calls of one kernel do the same work, so they share its time
            share = microseconds / len(places) / rounds / 1e3
            part = part_of(place)
            totals[part] += share
            if part[0] == "other":
                unknown[names[0]] += share
    print(
        f"{len(scopes)} scoped instructions; without a part, ms:",
        sorted(unknown.items(), key=lambda item: -item[1])[:8],
    )
    return dict(totals), round(len(events) / rounds)


def time_by_kernel(events: list[Event], *, rounds: int, most: int = 40) -> dict[str, list[float]]:
    """Kernel name -> (launches, milliseconds) per round of those that take longest."""
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for names, microseconds in events:
        total = found[_kernel_name(names[0])]
        total[0] += 1 / rounds
        total[1] += microseconds / rounds / 1e3
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:most]
    return {name: [round(count, 1), round(ms, 4)] for name, (count, ms) in longest}


def op_names(hlo: str) -> dict[str, list[str]]:
    """Kernel name -> scope paths of the instructions that launch it, from optimised HLO text.

    A fusion carries the scope of its root; one without a scope takes that of the computation it
    calls. XLA makes one kernel of all Triton calls that are alike, under the name they gave it, and
    one of Mosaic is named after the function that ends its scope.
    """
    custom: dict[str, list[str]] = collections.defaultdict(list)
    names: dict[str, str] = {}
    inside: dict[str, str] = {}
    calls: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)
        if head and not line.startswith(" "):
            computation = head.group(1)
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
        if not found:
            continue
        scope = re.search(r'op_name="([^"]*)"', line)
        if scope and "__gpu$xla.gpu.triton" in line:
            given = re.search(r'\bname = "([^"]*)"', line)
            if given:
                custom[_kernel_name(given.group(1))].append(scope.group(1))
        if scope and 'custom_call_target="mosaic_gpu' in line:
            *_, function, _ = scope.group(1).split("/")
            custom[_kernel_name(f"{function}_mosaic_gpu_kernel")].append(scope.group(1))
        if scope:
            names[found.group(1)] = scope.group(1)
            inside[computation] = scope.group(1)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        if called:
            calls[found.group(1)] = called.group(1)
    for name, target in calls.items():
        if name not in names and target in inside:
            names[name] = inside[target]
    return {_kernel_name(name): [scope] for name, scope in names.items()} | custom


def _kernel_name(instruction: str) -> str:
    """The name XLA gives the kernel of an instruction; several kernels of one are numbered."""
    return re.sub(r"[^A-Za-z0-9_]", "_", re.sub(r"__\d+$", "", instruction))
