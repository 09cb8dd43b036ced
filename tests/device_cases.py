"""An implementation against its operation's cases, as `bench.kernels` checks it before it times.

One program computes a case, written over buffers full of NaN, and one judges it by the reference in
float32; a case's judge serves all implementations. Repeats are compared bit for bit.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from bench import check
from bench.operations import Inputs, Operation, draw, split
from bench.timing import abstract
from qwen4jax.pallas.cases import Case
from qwen4jax.pallas.index_score.cases import EDGES as SCORE_EDGES
from qwen4jax.pallas.index_topk.cases import EDGES as TOPK_EDGES
from qwen4jax.pallas.sparse_attention.cases import EDGES as ATTENTION_EDGES

REPEATS = 20
EDGES = (*SCORE_EDGES, *TOPK_EDGES, *ATTENTION_EDGES)
_RELEASED_EDGES = ("ties", "all_equal", "one_bin", "half_range")


class Outcome(NamedTuple):
    """What became of a case.

    Attributes:
        case: its name.
        refused: why the implementation does not take it, if it does not.
        wrong: what is wrong with the result, or what was raised, if anything.
        error: largest relative error of a result.
    """

    case: str
    refused: str = ""
    wrong: str = ""
    error: float = 0.0


def cases_of(operation: Operation) -> list[Case]:
    """All small cases, those of released sizes in which scores tie or crowd, and `EDGES`."""
    function = operation.cases[0].function
    small = [case for case in operation.cases if not case.device_only]
    crowded = [
        case
        for case in operation.cases
        if case.device_only and any(name in case.name for name in _RELEASED_EDGES)
    ]
    return [*small, *crowded, *(case for case in EDGES if case.function == function)]


def outcomes(
    operation: Operation,
    implementation: str,
    cases: Iterable[Case],
    *,
    repeats: int = REPEATS,
    each: Callable[..., Iterable[Any]] = map,
) -> Iterator[Outcome]:
    """What becomes of each case, in order.

    Args:
        operation: to call.
        implementation: its name.
        cases: of the operation.
        repeats: runs of which each gives the same bits.
        each: `map`, or one that compiles several cases side by side.
    """
    chosen = list(cases)
    prepared = each(functools.partial(_prepare, operation, implementation), chosen)
    for case, programs in zip(chosen, prepared, strict=True):
        if isinstance(programs, Outcome):
            yield programs
            continue
        once, judge, out = programs
        try:
            arrays, _ = split(draw(case))
            verdict = check.check(operation, once, judge, arrays, out, repeats)
        except Exception as e:  # of a launch: the other cases go on
            yield Outcome(case.name, wrong=_in_a_line(e))
        else:
            yield Outcome(case.name, wrong=verdict.wrong, error=verdict.error)


def _prepare(operation: Operation, implementation: str, case: Case) -> Any:
    """(call, judge, shapes of the result), or the outcome where there are none."""
    arrays, static = split(draw(case))
    arrays = abstract(arrays)

    def call(given: Inputs, name: str = implementation) -> Any:
        return operation.function(**given, **static, implementation=name)

    try:
        out = jax.eval_shape(call, arrays)
        once = check.compile_once(operation, call, arrays, out)
        return once, _judge(operation.name, case.name, operation, static, arrays), out
    except NotImplementedError as e:
        return Outcome(case.name, refused=str(e))
    except Exception as e:  # of a compiler: the other cases go on
        return Outcome(case.name, wrong=_in_a_line(e))


_judges: dict[tuple[str, str], Any] = {}


def _judge(name: str, case: str, operation: Operation, static: Inputs, arrays: Inputs) -> Any:
    """The compiled comparison of a case, which is as long as this process keeps it."""
    if (name, case) not in _judges:
        reference = functools.partial(operation.function, **static, implementation="reference")
        out = jax.eval_shape(lambda given: reference(**given), arrays)
        _judges[name, case] = check.compile_judge(operation, static, arrays, out)
    return _judges[name, case]


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
