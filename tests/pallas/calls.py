"""Each operation's cases against each of its implementations."""

import contextlib
import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from qwen4jax.pallas import registry
from qwen4jax.pallas.cases import Case

# largest error of a value rounded to a dtype, as a share of the value
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}


def over_cases(cases: Iterable[Case], function: str, implementations: Mapping[str, Any]) -> Any:
    """Parametrises a test with (case, implementation) of one function."""
    chosen = [
        pytest.param(case, name, id=f"{case.name}-{name}")
        for case in cases
        if case.function == function and not case.device_only
        for name in implementations
        if name == registry.REFERENCE or _takes(implementations, function, case, name)
    ]
    assert chosen, f"no case of {function}"
    return pytest.mark.parametrize(("case", "implementation"), chosen)


def _takes(implementations: Any, function: str, case: Case, name: str) -> bool:
    """Whether an implementation of a kernel language takes this case, on the device it is for.

    Every process of a run asks this of every case before its first test, so nothing is computed:
    the call is traced with shapes, up to where the kernel would begin.
    """
    package = importlib.import_module(f"qwen4jax.pallas.{implementations.name.partition('.')[0]}")
    leaves, inputs_of = _shapes(case)
    run = functools.partial(getattr(package, function), implementation=name)
    try:
        with (
            registry.using(device="NVIDIA H200"),
            mock.patch.object(registry.Kernel, "__call__", _begun),
        ):
            jax.eval_shape(lambda leaves: run(**inputs_of(leaves)), leaves)
    except NotImplementedError:
        return False
    except _BegunError:
        pass
    return True


@functools.cache
def _shapes(case: Case) -> tuple[list[Any], Any]:
    """Shapes of the arrays of a case's inputs, and what makes the inputs of such arrays."""
    kept: list[Any] = []

    def build() -> list[Any]:
        inputs = case.inputs()
        there = {k: v for k, v in inputs.items() if jax.tree.leaves(v) and _traced(v)}
        leaves, tree = jax.tree.flatten(there)
        kept.extend((tree, {k: v for k, v in inputs.items() if k not in there}))
        return leaves

    shapes = jax.eval_shape(build)
    tree, static = kept
    return shapes, lambda leaves: tree.unflatten(leaves) | static


class _BegunError(Exception):
    """An implementation did not refuse."""


def _begun(*_: Any, **__: Any) -> None:
    raise _BegunError


def call(function: Any, inputs: Mapping[str, Any], implementation: str | None = None) -> Any:
    """`function(**inputs)` compiled: arrays are arguments, the rest is static."""
    with runs_here(implementation):
        arrays = {k: v for k, v in inputs.items() if jax.tree.leaves(v) and _traced(v)}
        static = {k: v for k, v in inputs.items() if k not in arrays}
        run = functools.partial(function, **static, implementation=implementation)
        return jax.jit(lambda given: run(**given))(arrays)


def runs_here(implementation: str | None) -> contextlib.AbstractContextManager[None]:
    """Lets an implementation in a kernel language run on the CPU, interpreted."""
    language = (implementation or "").split("_")[0]
    if language == "triton":
        from tests.pallas.triton_interpreter import interpreted

        return interpreted()
    if language == "mosaic":
        return _both()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _both() -> Iterator[None]:
    """Mosaic's kernels, and those in Triton that some of them are used with."""
    from tests.pallas.mosaic_simulator import simulated
    from tests.pallas.triton_interpreter import interpreted

    with interpreted(), simulated():
        yield


def _traced(value: Any) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def f64(x: Any) -> np.ndarray:
    """Any array as float64."""
    return np.asarray(x).astype(np.float64)


def assert_matches(got: Any, want: np.ndarray, *, share: float = 2e-6, steps: float = 1.0) -> None:
    """Within `steps` roundings of the result's dtype and `share` of the largest value."""
    assert got.shape == want.shape
    values = f64(got)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(want))
    allowed = share * np.nanmax(np.abs(want), initial=0.0)
    allowed = allowed + steps * ROUNDING[np.dtype(got.dtype).name] * np.abs(want)
    excess = np.abs(values - want) - allowed
    assert not np.any(excess > 0), f"over by {np.nanmax(excess)}"
