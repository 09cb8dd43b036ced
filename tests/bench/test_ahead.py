"""Programs that were compiled before are found by what they are of, or refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from bench import ahead, chains, check, decode, kernels, scenarios
from bench.ahead import Kept, Store
from bench.released import build, filled_state, tiny_config
from bench.round_program import Run, compile_round
from qwen4jax.decode.burst import Sent, empty, fields_of
from tests.bench.test_kernels import lines

ROWS = "--op skinny_matmul --op index_topk --implementation reference|triton --quick".split()
ROWS += "--calls 3 --jobs 2 --repeats 2".split()


def compiled_now(monkeypatch) -> list[str]:
    """The operations of which a row is compiled from now on."""
    seen = []
    real = check.compile_once
    monkeypatch.setattr(
        check, "compile_once", lambda o, *given: seen.append(o.name) or real(o, *given)
    )
    return seen


def test_rows_are_loaded_and_what_is_missing_is_compiled(tmp_path: Path, monkeypatch, capsys):
    folder = ["--programs", str(tmp_path / "programs")]
    kernels.main([*ROWS, "--case", "^one_row$", *folder, "--compile-for", "cpu"])
    assert "one_row                      reference           compiled" in capsys.readouterr().out
    seen = compiled_now(monkeypatch)
    # again: nothing is to do
    kernels.main([*ROWS, "--case", "^one_row$", *folder, "--compile-for", "cpu"])
    assert seen == []
    assert "skipped: skinny_matmul: 'triton' needs an NVIDIA GPU" in capsys.readouterr().out
    kernels.main([*ROWS, "--case", "^(one_row|ratio_8)$", *folder, "--out", str(tmp_path)])
    assert seen == ["index_topk"]
    loaded, compiled = lines(tmp_path)
    assert (loaded["case"], loaded["compiled"]) == ("one_row", "ahead")
    assert (compiled["case"], compiled["compiled"]) == ("ratio_8", "here")
    assert list(loaded) == list(compiled)
    assert loaded["us"] > 0
    # what a kernel refused is not asked again
    assert "skipped: skinny_matmul: 'triton' needs an NVIDIA GPU" in capsys.readouterr().out


def test_chains_are_loaded(tmp_path: Path, monkeypatch):
    arguments = "--small --quick --repeats 2 --chain delta --requests 1 --case ^decode".split()
    arguments += ["--programs", str(tmp_path / "programs")]
    chains.main([*arguments, "--compile-for", "cpu"])
    seen = compiled_now(monkeypatch)
    chains.main([*arguments, "--out", str(tmp_path)])
    assert seen == []
    (line,) = lines(tmp_path)
    assert line["compiled"] == "ahead"
    assert line["error"] > 0


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the program `double`."""
    double = jax.jit(lambda x: {"twice": 2 * x}).lower(jnp.arange(3)).compile()
    Store(tmp_path, "cpu").get(("double",), lambda: Kept(dict(run=double), dict(by=2)))
    return tmp_path


def never() -> Kept:
    raise AssertionError("compiled")


def test_a_program_gives_what_it_gave(programs: Path):
    kept = Store(programs).get(("double",), never)
    assert kept.facts == {"by": 2}
    assert kept.ahead
    np.testing.assert_array_equal(kept.programs["run"](jnp.arange(3))["twice"], [0, 2, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(jax="0.1"), "jax was '0.1' and is '"),
        (dict(device="NVIDIA H200"), "device was 'NVIDIA H200' and is 'cpu'"),
        (dict(XLA_FLAGS="--xla_x=1"), "XLA_FLAGS was '--xla_x=1' and is "),
        (
            dict(sources={"bench/timing.py": "0"}),
            r"changed since: bench/__init__\.py, .* and \d+ more",
        ),
    ],
)
@pytest.mark.parametrize("target", [None, "cpu"])
def test_programs_of_something_else_are_refused(programs: Path, change, message, target):
    record = programs / "made.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | change))
    with pytest.raises(SystemExit, match=f"its programs are of another making: {message}"):
        Store(programs, target)


def test_a_changed_source_is_named(programs: Path):
    record = programs / "made.json"
    made = json.loads(record.read_text())
    made["sources"]["qwen4jax/pallas/measured.py"] = "0"
    record.write_text(json.dumps(made))
    with pytest.raises(SystemExit, match=r"changed since: qwen4jax/pallas/measured\.py$"):
        Store(programs)


def test_what_is_not_installed_here_does_not_differ(programs: Path, monkeypatch):
    record = programs / "made.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | dict(triton="9")))
    monkeypatch.setattr(ahead, "_version", lambda name: None)
    Store(programs)


def test_a_file_of_another_folder_or_key_is_refused(programs: Path, tmp_path: Path):
    store = Store(programs)
    (file,) = programs.glob("*.xz")
    shutil.copy(file, store._file(("half",)))
    with pytest.raises(ValueError, match=r"it is of \('double',\), not of \('half',\)"):
        store.get(("half",), never)
    record = programs / "made.json"
    record.write_text(record.read_text() + "\n")
    with pytest.raises(ValueError, match=r"not made with made\.json"):
        Store(programs).get(("double",), never)


def test_a_folder_is_needed(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"no made\.json"):
        kernels.main(["--programs", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="--programs names no folder"):
        decode.main("--config tiny --compile-for cpu".split())


def test_a_table_in_pinned_memory_is_not_compiled_elsewhere(capsys):
    with pytest.raises(SystemExit, match="2"):
        scenarios.parse(["--table", "pinned", "--compile-for", "NVIDIA H200"])
    assert "--compile-for: a table in pinned memory" in capsys.readouterr().err


@pytest.fixture
def unchecked():
    """`lower` puts what are no arrays in the place of a burst's."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.mark.usefixtures("unchecked")
def test_a_loaded_round_gives_the_same_ids(tmp_path: Path):
    (args,) = scenarios.scenarios(scenarios.parse("--config tiny --context 40 --draft 0".split()))
    run = Run(args, tiny_config())
    params = build(run.config)
    given = compile_round(run, jax.eval_shape(lambda: params))
    Store(tmp_path, "cpu").get(run.key, lambda: given)
    loaded = Store(tmp_path).get(run.key, never)
    assert loaded.facts == given.facts

    def ids(kept: Kept) -> list[np.ndarray]:
        room = empty(1, 0)
        state = filled_state(run.config, run.shapes, 40)
        carry = (state, run.controls(), jnp.ones(1, bool), jnp.int32(0), room)
        found = []
        for _ in range(3):
            carry, words = kept.programs["round"](params, *carry)
            found.append(Sent(words, fields_of(carry[-1])).read()["tokens"])
        return found

    np.testing.assert_array_equal(ids(loaded), ids(given))
    assert "verify" in json.dumps(given.facts["scopes"])
