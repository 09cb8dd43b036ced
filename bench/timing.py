"""Time of one call among many in a CUDA graph, and the bandwidth of a large copy.

`calls` calls are traced into one function that XLA turns into one graph with a serial schedule, so
that launch gaps count as they do in a decode round. Calls rotate over copies of their arrays that
together are larger than the cache. Each call waits for the result of the one before by an
optimisation barrier, and every result is returned: otherwise XLA merges dots that share an operand,
fuses neighbours and drops what nobody reads. Results are written into donated buffers and carried
arguments are updated in place, so that no node of the graph changes between its launches. The graph
is the body of a loop: the host's work for a launched program grows with its arrays, and of small
calls it would take longer than the device's. Several programs are queued, and the time is wall over
calls.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.operations import Inputs, Operation
from bench.traffic import size
from qwen4jax.pallas import registry

# what the copies of a rotation cover: more than twice the 60 MB of an H200's cache
COLD = 130e6
# of copies and of results
ROOM = 16e9
# microseconds that a loop of graphs takes at least, and how often it goes round at most
LOOP_US, MOST_PASSES = 6_000, 64
SERIAL = {
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    "xla_gpu_graph_min_graph_size": 1,
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Medians per call, microseconds: on the device or waiting for the host, and the host's own."""

    us: float
    host_us: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """How often a case is called.

    Attributes:
        copies: of its arrays.
        calls: in a graph.
        passes: of the loop that a program is, whose body is the graph.
    """

    copies: int
    calls: int
    passes: int = 1


def plan(operation: Operation, arrays: Inputs, out: Any, nbytes: int, calls: int) -> Plan:
    """Copies that outgrow the cache and the memory allows; calls and passes worth a launch.

    What is too small to outgrow the cache stays in it, as activations do in a decode round.
    """
    own = {name: value for name, value in arrays.items() if name not in operation.shared}
    # a graph of some 20 ms is long enough
    least_us = max(nbytes / 4e6, 1.5)
    calls = min(calls, max(4, math.ceil(20_000 / least_us)))
    copies = min(math.ceil(COLD / max(nbytes, 1)), max(1, int(ROOM / max(size(own), 1))))
    if nbytes * calls < COLD / 2:
        copies = 4
    calls = min(calls, max(2, int(ROOM / max(size(operation.results(out)), 1))))
    copies = max(min(copies, calls), min(2, calls))
    calls = copies * math.ceil(calls / copies)
    return Plan(copies, calls, min(math.ceil(LOOP_US / (calls * least_us)), MOST_PASSES))


def compile_options() -> dict | None:
    """Of a program that is one graph of serial kernels, on the device that is compiled for."""
    return None if registry.device_kind() == "cpu" else SERIAL


def chain(operation: Operation, call: Callable[[Inputs], Any], plan: Plan) -> Any:
    """`program(carried, fixed, sinks) -> (carried, results)` of a plan's calls, not compiled yet.

    `carried` and `fixed` are lists of copies; `sinks` are buffers for the results.
    """
    one = jax.jit(lambda arrays: operation.kept(call(arrays)))

    def graph(carried: list[Inputs], fixed: list[Inputs]) -> tuple[list[Inputs], list[Any]]:
        carried, results, before = list(carried), [], None
        for j in range(plan.calls):
            i = j % len(fixed)
            given = fixed[i]
            if before is not None:
                # XLA drops what a barrier gives that is not used: results are kept as it gives them
                last, value = before
                given, value = jax.lax.optimization_barrier((given, value))
                _keep(operation, carried, results, last, value)
            before = i, one(carried[i] | given)
        if before is not None:
            _keep(operation, carried, results, *before)
        return carried, results

    def program(carried: list[Inputs], fixed: list[Inputs], sinks: list[Any]):
        again = lambda _, state: graph(state[0], fixed)  # noqa: E731
        return jax.lax.fori_loop(0, plan.passes, again, (list(carried), sinks))

    return jax.jit(program, donate_argnums=(0, 2), keep_unused=True)


def _keep(operation: Operation, carried: list, results: list, place: int, value: Any) -> None:
    replaced, result = value
    if operation.carry:
        carried[place] = replaced
    results.append(result)


def abstract(tree: Any) -> Any:
    """Shapes of arrays; shapes stay, with the place that they may have."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        given = isinstance(x, jax.ShapeDtypeStruct)
        return x if given else jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(one, tree)


def divide(operation: Operation, arrays: Inputs) -> tuple[Inputs, Inputs]:
    """(carried, fixed) arrays."""
    carried = {name: arrays[name] for name in arrays if name in operation.carry}
    return carried, {name: arrays[name] for name in arrays if name not in carried}


def sinks(operation: Operation, out: Any, calls: int) -> list[Any]:
    """Shapes of the results' buffers."""
    return [abstract(operation.results(out))] * calls


def compile_chain(
    operation: Operation, call: Callable[[Inputs], Any], arrays: Inputs, out: Any, plan: Plan
) -> Any:
    """The compiled program of a case; arrays and results may be shapes."""
    carried, fixed = divide(operation, abstract(arrays))
    program = chain(operation, call, plan)
    given = [carried] * plan.copies, [fixed] * plan.copies, sinks(operation, out, plan.calls)
    return program.lower(*given).compile(compile_options())


def run_chain(
    program: Any, operation: Operation, arrays: Inputs, out: Any, plan: Plan, quick: bool
) -> Measured:
    """Times a compiled program on copies of `arrays`."""
    carried, fixed, buffers = [], [], []
    for _ in range(plan.copies):
        rotated = {n: v for n, v in arrays.items() if n not in operation.shared}
        own, rest = divide(operation, arrays | copies(rotated))
        carried.append(own)
        fixed.append(rest)
    for sink in sinks(operation, out, plan.calls):
        buffers.append(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sink))
    run = lambda state: program(state[0], fixed, state[1])  # noqa: E731
    return per_call(run, (carried, buffers), plan.calls * plan.passes, quick)


@jax.jit
def copies(tree: Any) -> Any:
    """The same values in other memory."""
    return jax.tree.map(jnp.copy, tree)


def per_call(run: Callable[[Any], Any], state: Any, calls: int, quick: bool = False) -> Measured:
    """Median over groups of queued programs `state = run(state)` of `calls` calls each."""
    for _ in range(2):
        state = run(state)
    jax.block_until_ready(state)
    begun = time.perf_counter()
    state = jax.block_until_ready(run(state))
    once = time.perf_counter() - begun
    queued = int(min(max((0.006 if quick else 0.02) / once, 2), 40))
    walls, hosts = [], []
    for _ in range(3 if quick else 7):
        begun = time.perf_counter()
        for _ in range(queued):
            state = run(state)
        host = time.perf_counter()
        jax.block_until_ready(state)
        walls.append((time.perf_counter() - begun) / queued / calls)
        hosts.append((host - begun) / queued / calls)
    return Measured(statistics.median(walls) * 1e6, statistics.median(hosts) * 1e6)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of the faster of two large copies in this process."""
    length = (1 << 22) if jax.default_backend() == "cpu" else (1 << 28)
    source = [jax.random.bits(jax.random.key(i), (length,), jnp.uint32) for i in range(2)]
    best = 0.0
    for copy in (jnp.copy, lambda x: x ^ jnp.uint32(1)):

        def program(source, into):
            del into
            return [copy(x) for x in source]  # noqa: B023

        compiled = (
            jax.jit(program, donate_argnums=1, keep_unused=True)
            .lower(source, source)
            .compile(compile_options())
        )
        into = [jnp.zeros_like(x) for x in source]
        run = lambda state: compiled(source, state)  # noqa: B023, E731
        us = per_call(run, into, len(source), quick=True).us
        best = max(best, 2 * source[0].nbytes / us * 1e6)
    return best
