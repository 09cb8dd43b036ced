"""The command line, the package's public names, and the notebook."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qwen4jax
from qwen4jax import __main__ as command
from qwen4jax.decode.running import Delta
from qwen4jax.decode.text import Tokenizer
from qwen4jax.weights import embedded, load
from qwen4jax.weights.save import save
from tests.decode.sample_tokenizers import write
from tests.decode.small import EOS, GREEDY, MODEL, one_bucket, params, plain

ROOT = Path(__file__).parent.parent
SHORT = dataclasses.replace(GREEDY, max_new_tokens=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """The small model in a directory, with a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint") / "small"
    save(params(), path)
    write(path)
    return str(path)


def test_ids_are_streamed(checkpoint: str, capsys):
    assert command.main([checkpoint, "--ids", "5,6,7", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    (want,) = plain([[5, 6, 7]], [SHORT], eos_ids=(MODEL.eos_token_id,))
    assert [int(word) for word in out.split()] == want.ids
    lines = err.splitlines()
    assert lines[0].startswith(f"{checkpoint}: ")
    assert "compiling" in lines
    assert re.match(
        rf"{len(want.ids)} tokens \({want.reason}\) in [\d.]+ s with compiling; decoding [\d.]+ "
        r"tokens/s, [\d.]+ tokens per round$",
        lines[-1],
    )


def test_options_of_the_model_reach_the_loader(checkpoint: str, capsys, monkeypatch):
    """What the loader makes of them is its own tests' subject."""
    given: dict[str, Any] = {}

    def loaded(_: str, **options: Any):
        given.update(options)
        raise ValueError("enough")

    monkeypatch.setattr(load, "load_and_report", loaded)
    options = "--draft-vocab 100 --draft-weights fp8 --table host --dtype float32".split()
    assert command.main([checkpoint, "--ids", "5,6,7", *options]) == 2
    assert "enough" in capsys.readouterr().err
    assert given == dict(draft_vocab=100, draft_weights="fp8", table="host", dtype="float32")


@pytest.mark.parametrize(
    ("arguments", "chat"),
    [(["ab"], False), (["--chat", "ab"], True)],
)
def test_text_is_streamed(checkpoint: str, capsys, monkeypatch, arguments: list[str], chat: bool):
    one_bucket(monkeypatch)
    assert command.main([checkpoint, *arguments, "--max-new-tokens", "8"]) == 0
    known = Tokenizer.load(checkpoint)
    prompt = known.chat_ids([{"role": "user", "content": "ab"}]) if chat else known.encode("ab")
    (want,) = plain([prompt], [SHORT], eos_ids=(EOS,))
    new = want.ids[:-1] if want.reason == "stop" else want.ids
    assert capsys.readouterr().out == known.decode(new) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of PROMPT, --chat and --ids"),
        ([""], "give one of PROMPT, --chat and --ids"),
        (["HERE"], "give one of PROMPT, --chat and --ids"),
        (["HERE", "Hello", "--ids", "5"], "give one of PROMPT, --chat and --ids"),
        (["HERE", "--chat", "Hello", "--ids", "5"], "give one of PROMPT, --chat and --ids"),
        (["HERE", "--ids", "5,x"], "--ids: '5,x' is no list of integers"),
        (["HERE", "--ids", ""], "--ids: '' is no list of integers"),
        (["HERE", "Hello", "--draft", "x"], "argument --draft: invalid int value: 'x'"),
        (["HERE", "Hello", "--index-share", "x"], "argument --index-share: invalid choice"),
    ],
)
def test_a_wrong_command_line_exits_with_2(tmp_path: Path, capsys, arguments: Any, message: str):
    with pytest.raises(SystemExit) as stopped:
        command.main([str(tmp_path) if word == "HERE" else word for word in arguments])
    assert stopped.value.code == 2
    assert f"python -m qwen4jax: error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "5,408"], r"prompts\[1\]: id 408 is not in \[0, 408\)"),
        (["--ids", "5", "--temperature", "-1"], "temperature must be"),
        (["--ids", "5", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--ids", "5", "--draft", "8"], "draft: 8 is not in 0..7"),
        (["--ids", "5", "--table", "pinned"], "table='pinned' is for GPUs, this is a cpu"),
        (["--ids", "5", "--draft-vocab", "0"], r"draft_vocab: 0 is not in 1..408"),
        (["--ids", "5", "--draft-vocab", "409"], r"draft_vocab: 409 is not in 1..408"),
        ([""], "prompts: is empty"),
    ],
)
def test_a_bad_value_is_one_line_and_2(checkpoint: str, capsys, arguments: Any, message: str):
    assert command.main([checkpoint, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.match(f"qwen4jax: {message}.*\n$", err)


def test_a_directory_without_files_is_one_line_and_2(tmp_path: Path, capsys):
    for arguments in (["--ids", "5"], ["Hello"]):
        assert command.main([str(tmp_path), *arguments]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert re.match(f"qwen4jax: {tmp_path}", err)
    assert command.main([str(tmp_path / "absent"), "--ids", "5"]) == 2


@pytest.mark.parametrize(
    ("ends", "code"),
    [("stop", 0), ("length", 0), ("error", 1), ("interrupted", 130)],
)
def test_the_exit_code_says_how_it_ended(monkeypatch, capsys, ends: str, code: int):
    def deltas():
        yield Delta(0, [5], None, "é")
        # nothing is certain of this one yet: its ids are no text
        yield Delta(0, [6], None, "")
        if ends == "interrupted":
            raise KeyboardInterrupt
        yield Delta(0, [7], None, "a", ends)

    monkeypatch.setattr(command, "_begin", lambda args: (deltas(), True, ["a note"]))
    assert command.main(["DIR", "Hello"]) == code
    out, err = capsys.readouterr()
    assert out == ("é\n" if ends == "interrupted" else "éa\n")
    assert f"({ends})" in err


def test_help_is_short_and_quick():
    """Grouped, and nothing heavy is imported for it."""
    program = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--help']\n"
        "try: runpy.run_module('qwen4jax', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'numpy', 'tokenizers', 'flax'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert {"prompt:", "sampling:", "model:"} <= set(lines)


def test_public_names_are_there():
    for name in qwen4jax.__all__:
        assert getattr(qwen4jax, name).__name__ == name
    assert set(qwen4jax.__all__) <= set(dir(qwen4jax))
    assert sorted(qwen4jax.__all__) == qwen4jax.__all__
    with pytest.raises(AttributeError, match="module 'qwen4jax' has no attribute 'genrate'"):
        _ = qwen4jax.genrate


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["def f"], "def f"), (["a/b c"], "a/b c"), (["--ids", "5"], None), (["--chat", "Hi"], None)],
)
def test_the_embedded_checkpoint_is_the_default(arguments: list[str], text: str | None):
    args = command.parse(arguments)
    assert Path(args.model) == ROOT / "checkpoints" / "tiny"
    assert args.text == text


def test_a_missing_default_is_an_error_that_says_so(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(embedded, "_PLACES", (tmp_path,))
    with pytest.raises(SystemExit) as stopped:
        command.main(["def f"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert (
        "error: DIR: is not given, and the checkpoint that comes with the package is missing" in err
    )


def test_the_notebook_runs(monkeypatch, capsys, checkpoint: str):
    """Every cell in turn, on a smaller model in one bucket."""
    one_bucket(monkeypatch)
    monkeypatch.setattr(embedded, "_PLACES", (Path(checkpoint),))
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    assert all(not cell["outputs"] for cell in notebook["cells"] if "outputs" in cell)
    sources = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(sources):
        exec(compile(source, f"quickstart cell {number}", "exec"), namespace)
    out = capsys.readouterr().out
    state = re.findall(r"cached_tokens=\d+\) (\[.*\])", out)
    assert f"as given whole: {state[-2]}" in out
    shares = re.findall(r"^(fresh|share) +[\d.]+ tokens per round, (.*)$", out, re.MULTILINE)
    assert [name for name, _ in shares] == ["fresh", "share"]
    assert shares[0][1] == shares[1][1]
