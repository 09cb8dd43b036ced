"""Whether an implementation computes the operation: against the reference in float32.

Fresh inputs of the case, results in buffers full of NaN (integers: a number no result has), and the
same bits in every repeat. The reference gets the inputs in float32; what is stored in 8 or 4 bits
stays so, since it is converted exactly.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.operations import Inputs, Operation
from bench.timing import abstract, copies, divide
from bench.traffic import size
from qwen4jax.pallas.registry import REFERENCE
from qwen4jax.quant import Quantized

_POISON = -123456789
# a race between programs shows in one run of many: results are compared as often as takes no time
_CHEAP, _OFTEN, _SELDOM = 64 << 20, 20, 3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Largest relative error of a result (Frobenius), and what is wrong, if anything."""

    error: float
    wrong: str = ""


def widen(tree: Any) -> Any:
    """Bfloat16 arrays as float32."""

    def one(x: Any) -> Any:
        if isinstance(x, Quantized) or x.dtype != jnp.bfloat16:
            return x
        return x.astype(jnp.float32)

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Quantized))


def compile_judge(operation: Operation, static: Inputs, arrays: Inputs, out: Any) -> Any:
    """`judge(arrays, got)`: per leaf (relative error, largest error, entries of another kind)."""

    def judge(arrays: Inputs, got: Any) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        want = operation.function(**widen(arrays), **static, implementation="reference")
        got, want = (operation.compared(arrays, result) for result in (got, want))
        leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        return [compare(a, b, operation.unordered) for a, b in leaves]

    with jax.default_matmul_precision("highest"):
        return jax.jit(judge).lower(abstract(arrays), abstract(out)).compile()


def compare(
    got: jax.Array, want: jax.Array, unordered: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(relative error, largest error, entries of another kind) of one result."""
    zero = jnp.float32(0)
    if got.shape != want.shape:
        return jnp.inf + zero, jnp.inf + zero, jnp.int32(got.size)
    if not got.size:
        return zero, zero, jnp.int32(0)
    if jnp.issubdtype(got.dtype, jnp.integer):
        if unordered:
            got, want = jnp.sort(got, axis=-1), jnp.sort(want, axis=-1)
        return zero, zero, jnp.sum(got != want)
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    finite = jnp.isfinite(want)
    same = (jnp.isfinite(got) & finite) | (got == want) | (jnp.isnan(got) & jnp.isnan(want))
    counted = finite & jnp.isfinite(got)
    difference = jnp.where(counted, got - want, 0)
    want = jnp.where(counted, want, 0)
    tiny = jnp.float32(1e-30)
    norm = jnp.linalg.norm(difference.ravel()) / jnp.maximum(jnp.linalg.norm(want.ravel()), tiny)
    largest = jnp.max(jnp.abs(difference)) / jnp.maximum(jnp.max(jnp.abs(want)), tiny)
    return norm, largest, jnp.sum(~same)


def compile_once(
    operation: Operation, call: Callable[[Inputs], Any], arrays: Inputs, out: Any
) -> Any:
    """`once(carried, fixed, poison) -> results`, written over what is given first and last."""

    def once(carried: Inputs, fixed: Inputs, poison: Any) -> Any:
        del poison
        return call(carried | fixed)

    carried, fixed = divide(operation, abstract(arrays))
    program = jax.jit(once, donate_argnums=(0, 2), keep_unused=True)
    return program.lower(carried, fixed, abstract(_written(operation, out))).compile()


def _written(operation: Operation, out: Any) -> Any:
    """The results that are not in the place of an argument."""
    if not operation.carry:
        return out
    inside = {id(leaf) for leaf in jax.tree.leaves(operation.replaces(out))}
    return [leaf for leaf in jax.tree.leaves(out) if id(leaf) not in inside]


def _poison(out: Any) -> Any:
    def one(x: Any) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.full(x.shape, jnp.nan if floating else _POISON, x.dtype)

    return jax.tree.map(one, out)


def check(
    operation: Operation, once: Any, judge: Any, arrays: Inputs, out: Any, repeats: int
) -> Verdict:
    """Runs `once` on poisoned buffers and has it judged."""
    carried, fixed = divide(operation, arrays)

    def run() -> Any:
        return once(copies(carried), fixed, _poison(_written(operation, out)))

    got = run()
    norm, largest = _tolerance(arrays, out)
    found = [tuple(map(float, leaf)) for leaf in judge(arrays, got)]
    error = max(leaf[0] for leaf in found)
    if others := int(sum(leaf[2] for leaf in found)):
        return Verdict(error, f"{others} entries are not finite where they should be, or differ")
    if not error <= norm:
        return Verdict(error, f"relative error {error:.1e}")
    if not max(leaf[1] for leaf in found) <= largest:
        return Verdict(error, f"an entry is off by {max(leaf[1] for leaf in found):.1e}")
    first = _bits(got)
    for _ in range(repeats - 1):
        if _bits(run()) != first:
            return Verdict(error, "repeats differ")
    return Verdict(error)


def repeats(out: Any, implementation: str) -> int:
    """Runs that must agree bit for bit: 20 of a kernel, 3 of the slow reference or over 64 MiB."""
    return _OFTEN if size(out) <= _CHEAP and implementation != REFERENCE else _SELDOM


def _tolerance(arrays: Inputs, out: Any) -> tuple[float, float]:
    """Relative error of a result's norm, and of an entry against the largest."""
    results = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
    if any(x.dtype.itemsize == 1 for x in results):
        # what is near the middle of two of its values may round to either: one step of e4m3
        return 2.5e-2, 0.13
    narrow = any(x.dtype.itemsize < 4 for x in jax.tree.leaves((arrays, out)))
    return (1e-2, 5e-2) if narrow else (2e-4, 2e-3)


def _bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
