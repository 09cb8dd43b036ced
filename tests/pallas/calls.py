"""Each operation's cases against each of its implementations."""

import contextlib
import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

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
    """Whether an implementation of a kernel language takes this case, on the device it is for."""
    package = importlib.import_module(f"qwen4jax.pallas.{implementations.name.partition('.')[0]}")
    try:
        with registry.using(device="NVIDIA H200"):
            trace = lambda f, x: jax.make_jaxpr(f)(x)  # noqa: E731
            _evaluate(trace, getattr(package, function), case.inputs(), name)
    except NotImplementedError:
        return False
    return True


def call(function: Any, inputs: Mapping[str, Any], implementation: str | None = None) -> Any:
    """`function(**inputs)` compiled: arrays are arguments, the rest is static."""
    with runs_here(implementation):
        return _evaluate(lambda f, x: jax.jit(f)(x), function, inputs, implementation)


def _evaluate(how: Any, function: Any, inputs: Mapping[str, Any], implementation: Any) -> Any:
    arrays = {k: v for k, v in inputs.items() if jax.tree.leaves(v) and _traced(v)}
    static = {k: v for k, v in inputs.items() if k not in arrays}
    run = functools.partial(function, **static, implementation=implementation)
    return how(lambda given: run(**given), arrays)


def runs_here(implementation: str | None) -> contextlib.AbstractContextManager[None]:
    """Lets an implementation in a kernel language run on the CPU, interpreted."""
    language = (implementation or "").split("_")[0]
    if language == "triton":
        from tests.pallas.triton_interpreter import interpreted

        return interpreted()
    if language == "mosaic":
        from tests.pallas.mosaic_simulator import simulated

        return simulated()
    return contextlib.nullcontext()


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
