"""What runs an operation's cases on a device, here in Triton's interpreter."""

import dataclasses

import jax
import pytest

from bench.operations import Operation, operations
from qwen4jax.pallas.registry import REFERENCE
from tests.device_cases import EDGES, cases_of, outcomes
from tests.pallas.calls import runs_here


def named(operation: Operation, *names: str):
    chosen = [case for case in cases_of(operation) if case.name in names]
    assert len(chosen) == len(names)
    return chosen


@pytest.mark.parametrize(
    ("operation", "implementation", "cases", "refused"),
    [
        ("index_topk", "triton", ["empty_places", "all_tie"], []),
        ("index_score", "triton", ["pages_not_assigned", "bfloat16"], []),
        ("sparse_attention", "triton_together", ["one_query", "paged"], ["one_query"]),
    ],
)
def test_right_results_and_refusals(operation, implementation, cases, refused):
    tested = operations()[operation]
    with runs_here(implementation):
        found = list(outcomes(tested, implementation, named(tested, *cases), repeats=2))
    assert [one.case for one in found if not one.refused] == [c for c in cases if c not in refused]
    assert [one.case for one in found if one.refused] == refused
    assert not [one for one in found if one.wrong]
    assert all(one.error < 1e-2 for one in found)


def test_a_wrong_result_is_told_by_its_case():
    """One that is off in a case, one that is never the same twice, one that raises."""
    tested = operations()["gated_residual.update"]
    right = tested.function
    runs = []

    def off(streams, inject, y, implementation=None):
        out = right(streams, inject, y, implementation=REFERENCE)
        return out if implementation == REFERENCE else out.at[..., -1].multiply(1.2)

    def unsteady(streams, inject, y, implementation=None):
        out = right(streams, inject, y, implementation=REFERENCE)
        if implementation == REFERENCE:
            return out
        number = jax.pure_callback(
            lambda: runs.append(1) or len(runs) * 1e-4, jax.ShapeDtypeStruct((), "float32")
        )
        return (out * (1 + number)).astype(out.dtype)

    def broken(*_, implementation=None, **__):
        raise RuntimeError("no such instruction")

    case = cases_of(tested)[0]
    for function, told in (
        (off, "relative error"),
        (unsteady, "repeats differ"),
        (broken, "RuntimeError: no such instruction"),
    ):
        wrong = dataclasses.replace(tested, function=function)
        (found,) = outcomes(wrong, "triton", [case], repeats=2)
        assert found.case == case.name
        assert told in found.wrong, found


def test_the_edges_have_names_of_their_own():
    for operation in operations().values():
        every = {id(case): case.name for case in (*operation.cases, *cases_of(operation))}
        assert len(set(every.values())) == len(every)
    assert {case.function for case in EDGES} == {"index_score", "index_topk", "sparse_attention"}
