"""The operations of `qwen4jax.pallas` as the benchmarks see them.

An operation's cases and implementations are its package's own. Here stands what only a benchmark
asks: the rows of a case, the bytes that it must move, which results the model reads, and which
argument the result replaces in place.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.traffic import BYTES
from qwen4jax.pallas import registry
from qwen4jax.pallas.cases import Case

Inputs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One function of one package.

    Attributes:
        name: package, or package.function.
        function: the public one; takes `implementation=`.
        implementations: names, the reference among them.
        cases: of the function.
        carry: arguments that those of `replaces` take the places of, donated.
        replaces: the parts of the result that do.
        results: the other part that a decode round reads; the rest is not timed.
        shared: arguments too large to copy, of which a call touches little.
        unordered: whether the last axis is a set.
        compared: the result without the places whose values have no meaning.
    """

    name: str
    function: Callable[..., Any]
    implementations: tuple[str, ...]
    cases: tuple[Case, ...]
    carry: tuple[str, ...] = ()
    replaces: Callable[[Any], tuple[Any, ...]] = lambda out: (out,)
    results: Callable[[Any], Any] = lambda out: out
    shared: tuple[str, ...] = ()
    unordered: bool = False
    compared: Callable[[Inputs, Any], Any] = lambda inputs, out: out

    def rows(self, inputs: Inputs, out: Any) -> int:
        """Tokens of a call."""
        name, axes = _ROWS[self.name]
        leaf = out if name == "out" else inputs[name]
        if name == "factors":
            leaf = leaf[0].decay
        return math.prod(leaf.shape[:-1] if axes is None else leaf.shape[:axes])

    def kept(self, out: Any) -> tuple[Any, Any]:
        """(what replaces the carried arguments, by name; the results that are read)."""
        replaced = self.replaces(out) if self.carry else ()
        return dict(zip(self.carry, replaced, strict=True)), self.results(out)

    def nbytes(self, inputs: Inputs, out: Any) -> int:
        """Least bytes moved: what is read of the inputs, and what is written."""
        return int(BYTES[self.name](inputs, self.kept(out)))


def _counted(inputs: Inputs, result: Any) -> Any:
    """Outputs of a chunk up to each row's count, and the state."""
    out, state = result
    there = jnp.arange(out.shape[1]) < inputs["count"][:, None]
    return jnp.where(there[..., None], out, 0), state


def _without_counter(inputs: Inputs, result: Any) -> Any:
    """What a boundary computes."""
    return result[:3]


# argument whose leading axes are tokens, and how many axes; None is all but the last
_ROWS: dict[str, tuple[str, int | None]] = {
    "skinny_matmul": ("x", None),
    "skinny_matmul.projections": ("x", None),
    "skinny_matmul.argmax": ("x", None),
    "gated_residual.boundary": ("streams", 2),
    "gated_residual.mix": ("streams", 2),
    "gated_residual.update": ("streams", 2),
    "moe.router": ("x", 1),
    "moe.route": ("logits", 1),
    "moe.experts": ("x", 1),
    "index_score": ("query", 2),
    "index_topk": ("scores", 2),
    "sparse_attention": ("query", 2),
    "compress_and_store.prepare": ("x", 2),
    "compress_and_store.store": ("key", 2),
    "compress_and_store.compress": ("raw_key", 2),
    "compress_and_store.prepare_and_store": ("query_gate", 2),
    "gated_delta.step": ("qkv", 2),
    "gated_delta.commit": ("factors", 2),
    "gated_delta.chunks": ("qkv", 2),
    "ple.ngram_rows": ("out", 2),
    "ple.gather": ("rows", 2),
    "ple.embed": ("out", 2),
    "ple.mix": ("value", 2),
}
_MORE: dict[str, dict[str, Any]] = {
    "gated_residual.boundary": dict(
        carry=("streams", "counter"),
        replaces=lambda out: (out[0], out[3]),
        results=lambda out: out[1:3],
        compared=_without_counter,
    ),
    # the gates are for ablation studies
    "gated_residual.mix": dict(results=lambda out: out[:2]),
    "gated_residual.update": dict(carry=("streams",), results=lambda out: None),
    "compress_and_store.store": dict(carry=("cache",), results=lambda out: None),
    "compress_and_store.compress": dict(carry=("cache",), results=lambda out: None),
    "compress_and_store.prepare_and_store": dict(
        carry=("cache",), replaces=lambda out: out[:1], results=lambda out: out[1:]
    ),
    "moe.router": dict(
        carry=("counter",), replaces=lambda out: out[1:], results=lambda out: out[0]
    ),
    "gated_delta.commit": dict(carry=("states",), results=lambda out: None),
    "gated_delta.chunks": dict(compared=_counted),
    "ple.gather": dict(shared=("table",)),
    "ple.embed": dict(shared=("table",)),
    "index_topk": dict(unordered=True),
}


def operations() -> dict[str, Operation]:
    """All that have cases, by name."""
    return {name: found for name in _ROWS if (found := _operation(name)) is not None}


def _operation(name: str) -> Operation | None:
    package, _, function = name.partition(".")
    module = importlib.import_module(f"qwen4jax.pallas.{package}")
    cases = importlib.import_module(f"qwen4jax.pallas.{package}.cases").CASES
    own = tuple(case for case in cases if case.function == (function or package))
    if not own:
        return None
    return Operation(
        name,
        getattr(module, function or package),
        tuple(registry.operations()[name]),
        own,
        **_MORE.get(name, {}),
    )


def named(name: str, given: list[str] | None) -> bool:
    """Whether an operation, or its package, is among those given; None and nothing are all."""
    return not given or any(name == one or name.startswith(one + ".") for one in given)


def split(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """(arrays, static): what is traced and what is part of the program."""
    arrays = {name: value for name, value in inputs.items() if _traced(value)}
    return arrays, {name: value for name, value in inputs.items() if name not in arrays}


def _traced(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)


def draw(case: Case, seed: int | None = None) -> Inputs:
    """The case's inputs; with a seed, other ones of the same shapes."""
    return case.inputs() if seed is None else case.build(np.random.default_rng(seed))
