"""The kernel benchmark on a CPU: right results are timed, wrong ones are not, peers are found."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import check, kernels, timing
from bench.operations import draw, operations, split
from qwen4jax.pallas import skinny_matmul

FIELDS = (
    "op case rows implementation us bytes bandwidth_fraction peer peer_us device commit".split()
)
QUICK = "--quick --calls 3 --jobs 2 --repeats 2".split()


def lines(folder: Path) -> list[dict]:
    file = folder / "kernels.jsonl"
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def result(operation, inputs, implementation="reference"):
    """Shapes of an operation's result."""
    arrays, static = split(inputs)
    call = lambda given: operation.function(**given, **static, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, arrays)


def test_every_function_with_cases_is_measured():
    """A new operation gets a row in `bench/operations.py`."""
    known = operations()
    folder = Path(kernels.__file__).parents[1] / "qwen4jax/pallas"
    for file in folder.glob("*/cases.py"):
        package = file.parent.name
        for case in importlib.import_module(f"qwen4jax.pallas.{package}.cases").CASES:
            name = package if case.function == package else f"{package}.{case.function}"
            assert case in known[name].cases
    for operation in known.values():
        assert operation.cases, operation.name
        assert "reference" in operation.implementations


def test_small_cases_give_a_line_each(tmp_path: Path):
    """One result, a carried argument, integers of a set, stored forms; nothing to time."""
    kernels.main(
        [
            *"--op skinny_matmul --op gated_residual --op index_topk --op moe.experts".split(),
            *"--op compress_and_store.store --implementation reference".split(),
            *(
                "--case",
                "^(bfloat16|no_rows|ratio_8|nvfp4_few|bfloat16_rounds_once|bfloat16_to_e4m3)$",
                *QUICK,
            ),
            *("--out", str(tmp_path)),
        ]
    )
    written = lines(tmp_path)
    assert {(line["op"], line["case"]) for line in written} == {
        ("skinny_matmul", "bfloat16"),
        ("gated_residual.boundary", "bfloat16"),
        ("gated_residual.mix", "bfloat16"),
        ("gated_residual.update", "bfloat16_rounds_once"),
        ("index_topk", "ratio_8"),
        ("moe.experts", "nvfp4_few"),
        ("compress_and_store.store", "bfloat16_to_e4m3"),
    }
    for line in written:
        assert list(line)[: len(FIELDS)] == FIELDS
        assert line["us"] > 0
        assert line["device"] == "cpu"
        assert line["bandwidth_fraction"] > 0
        assert line["error"] < 1e-2
        assert line["peer"] is None
        assert line["peer_us"] is None


@pytest.fixture
def implementations(monkeypatch):
    """Implementations of the projection: right, wrong in one column, unsteady, and refusing."""
    calls = []

    def wrong(x, w, bias, *, out_dtype):
        right = skinny_matmul.reference.skinny_matmul(x, w, bias, out_dtype=out_dtype)
        return right.at[..., -1].add(jnp.asarray(0.5, right.dtype))

    def unwritten(x, w, bias, *, out_dtype):
        right = skinny_matmul.reference.skinny_matmul(x, w, bias, out_dtype=out_dtype)
        return right.at[..., 0].set(jnp.nan)

    def unsteady(x, w, bias, *, out_dtype):
        right = skinny_matmul.reference.skinny_matmul(x, w, bias, out_dtype=out_dtype)
        step = jax.pure_callback(
            lambda: calls.append(0) or np.float32(len(calls) % 2 * 1e-6),
            jax.ShapeDtypeStruct((), np.float32),
        )
        return right * (1 + step.astype(right.dtype))

    def refusing(x, w, bias, *, out_dtype):
        raise NotImplementedError("x has an odd number of rows")

    table = dict(wrong=wrong, unwritten=unwritten, unsteady=unsteady, refusing=refusing)
    table["reference"] = skinny_matmul.reference.skinny_matmul

    def run(x, w, bias=None, *, out_dtype=None, implementation=None):
        return table[implementation](x, w, bias, out_dtype=out_dtype or x.dtype)

    original = operations()["skinny_matmul"]
    changed = kernels.Operation("skinny_matmul", run, tuple(table), original.cases)
    monkeypatch.setattr(kernels, "operations", lambda: {"skinny_matmul": changed})


@pytest.mark.usefixtures("implementations")
def test_a_wrong_result_has_no_time(tmp_path: Path, capsys):
    with pytest.raises(SystemExit, match="3 rows are wrong or failed"):
        kernels.main(["--case", "^one_row$", *QUICK, "--out", str(tmp_path)])
    (line,) = lines(tmp_path)
    assert line["implementation"] == "reference"
    printed = {
        row.split()[2]: row for row in capsys.readouterr().out.splitlines() if "one_row" in row
    }
    assert "WRONG: relative error" in printed["wrong"]
    assert "WRONG: 1 entries are not finite" in printed["unwritten"]
    assert "WRONG: repeats differ" in printed["unsteady"]
    assert "skipped: x has an odd number of rows" in printed["refusing"]
    for name in ("wrong", "unwritten", "unsteady", "refusing"):
        assert " us " not in printed[name]


@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [
        # one row in, 48 outputs, float32
        ("skinny_matmul", "one_row", 4 * (32 + 48 * 32 + 48)),
        # weights, gain, streams, input and injection weights; the gates are not counted
        ("gated_residual.mix", "bfloat16", 2 * (20 * 128 + 128 + 6 * 128 + 6 * 32) + 4 * 24),
        # streams in and out of all but the first sublayer, whose streams are only read
        ("gated_residual.boundary", "bfloat16", 2 * (20 * 128 + 128 + 12 * 128 + 12 * 32) + 8 * 24),
        ("gated_residual.boundary", "bfloat16_first", 2 * (20 * 128 + 128 + 5 * 160) + 4 * 20),
        ("gated_residual.update", "bfloat16_rounds_once", 2 * 6 * (128 + 128 + 32) + 4 * 24),
        # one of 8 experts
        ("moe.experts", "one_expert_for_all", 4 * (3 * 8 * 16 + 3 * 16 + 3 + 3 + 3 * 16)),
        # 5 blocks of a row, a page table of 3
        ("index_score", "one_query", 4 * (5 * 16 + 2 * 16 + 3 + 1 + 6)),
        # nothing selected: queries, gates, slots and zeros
        ("sparse_attention", "nothing_selected", 4 * (3 * 4 * 64 + 4 * 11)),
        # 24 tokens of 2 channels as rows of 160 bytes would be; here 8 float32
        ("ple.gather", "float32", 4 * (24 + 24 * 8 + 24 * 8)),
    ],
)
def test_bytes_that_must_move(name, case, expected):
    operation = operations()[name]
    inputs = draw(next(c for c in operation.cases if c.name == case))
    assert operation.nbytes(inputs, result(operation, inputs)) == expected


def test_tokens_of_equal_number_in_two_requests_are_two():
    operation = operations()["sparse_attention"]
    inputs = draw(next(c for c in operation.cases if c.name == "paged"))
    both = inputs | dict(slots=jnp.full_like(inputs["slots"], 3))
    # rows, places, heads, channels; 19 selected; keys and values of two heads
    rest = 4 * (3 * 2 * 3 * 4 * 16 + 2 * 3 * 19)
    expected = rest + 2 * 4 * 2 * 2 * 16
    assert operation.nbytes(both, result(operation, both)) == expected
    # on a page that is not assigned
    none = inputs | dict(
        slots=jnp.full_like(inputs["slots"], inputs["page_table"].shape[1] * 8 - 1)
    )
    assert operation.nbytes(none, result(operation, none)) == rest


def test_cheap_results_are_compared_often():
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    few = shape(4, 10240), shape(512)
    assert check.repeats(few, "triton") == 20
    assert check.repeats(few, "reference") == 3
    assert check.repeats((shape(4096, 8192), shape(1)), "triton") == 3


def test_only_what_changes_of_a_state_counts():
    """Rows with no accepted token are neither read nor written."""
    operation = operations()["gated_delta.commit"]
    inputs = draw(next(c for c in operation.cases if c.name == "every_count"))
    (state,), (factors,) = inputs["states"], inputs["factors"]
    row = (state.conv.nbytes + state.recurrent.nbytes) // 5
    token = sum(getattr(factors, part).nbytes for part in ("key", "delta", "decay")) // 20
    assert operation.nbytes(inputs, result(operation, inputs)) == 2 * 4 * row + 10 * token
    assert operation.rows(inputs, None) == 20


def test_rotation_outgrows_the_cache():
    operation = operations()["skinny_matmul"]
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    for outputs, inputs in ((10240, 2560), (512, 2560), (248320, 2560)):
        arrays = dict(x=shape(4, inputs), w=shape(outputs, inputs))
        nbytes = 2 * outputs * inputs
        plan = timing.plan(operation, arrays, shape(4, outputs), nbytes, 64)
        assert plan.copies * nbytes > 120e6
        assert plan.calls % plan.copies == 0
        assert plan.calls >= 4
    small = timing.plan(operation, dict(x=shape(4, 16), w=shape(8, 16)), shape(4, 8), 400, 64)
    assert small == timing.Plan(4, 64, 63)


def test_a_chain_calls_as_often_as_it_says():
    """XLA must neither merge equal calls nor drop results: the time is divided by their number."""
    operation = operations()["gated_residual.update"]
    case = next(c for c in operation.cases if c.name == "float32")
    arrays, static = split(draw(case))
    call = lambda given: operation.function(**given, **static, implementation="reference")  # noqa: E731
    program = timing.compile_chain(operation, call, arrays, None, timing.Plan(2, 6, passes=2))
    carried, fixed = timing.divide(operation, arrays)
    states, _ = program([timing.copies(carried) for _ in range(2)], [fixed] * 2, [None] * 6)
    want = arrays["streams"] + 6 * arrays["inject"][..., None] * arrays["y"][..., None, :]
    for state in states:
        np.testing.assert_allclose(
            np.asarray(state["streams"]), np.asarray(want), rtol=1e-5, atol=1e-4
        )
