"""The commands under checkpoints/, run as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.weights.edit import GOLDEN, copy_of

ROOT = Path(__file__).parent.parent.parent


def inspected(path: Path, *, as_module: bool = False) -> subprocess.CompletedProcess[str]:
    how = ["-m", "checkpoints.inspect"] if as_module else [ROOT / "checkpoints" / "inspect.py"]
    return subprocess.run(
        [sys.executable, "-W", "error", *how, path], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("as_module", [True, False])
def test_inspect_says_what_is_there(as_module: bool):
    run = inspected(GOLDEN / "nvfp4" / "checkpoint", as_module=as_module)
    assert run.returncode == 0
    assert not run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "loads"
    text = " ".join(run.stdout.split())
    assert "files 9, 906 tensors" in text
    assert "experts 16, 4 per token, nvfp4" in text
    assert "n-gram 1 table, fp8" in text
    assert "draft head 1 layer, experts plain" in text
    assert "all 906 1,197,994" in text


def test_inspect_says_why_not(tmp_path: Path):
    path = copy_of("t0", tmp_path)
    (path / "model-mtp.safetensors").unlink()
    run = inspected(path)
    assert run.returncode == 1
    assert "problem: model-mtp.safetensors: the file is missing" in run.stdout
    assert run.stdout.splitlines()[-1] == "does not load"
    assert not run.stderr


def test_inspect_of_no_checkpoint(tmp_path: Path):
    for path, why in ((tmp_path, "config.json"), (tmp_path / "absent", "no such directory")):
        run = inspected(path)
        assert run.returncode == 1
        assert why in run.stdout
        assert not run.stderr
