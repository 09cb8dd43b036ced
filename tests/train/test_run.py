"""A whole run: it learns, and being killed changes nothing of it."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train import small_run

ROOT = Path(__file__).parent.parent.parent


class Runs:
    """Runs of one text in processes of their own, which compile once for all of them."""

    def __init__(self, folder: Path):
        self.folder, self.text = folder, folder / "text"
        self.unigram = small_run.write_text(self.text)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Begins a run, or goes on with it."""
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "tests.train.small_run", self.folder / name, self.text]
        with (self.folder / f"{name}.txt").open("ab") as out:
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | cache, stdout=out, stderr=subprocess.STDOUT
            )

    def log(self, name: str) -> str:
        return (self.folder / name / "log.jsonl").read_text()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """With one run, `whole`, that nobody disturbed."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    assert made.start("whole").wait() == 0, made.said("whole")
    return made


def test_it_learns(runs: Runs):
    lines = [json.loads(line) for line in runs.log("whole").splitlines()]
    steps = [line for line in lines if "heldout" not in line]
    assert [line["step"] for line in steps] == list(range(1, small_run.STEPS + 1))
    assert {line["phase"] for line in steps} == {0, 1}
    last = lines[-1]["heldout"]
    assert last["bits_per_byte"] < 0.85 * runs.unigram
    assert last["draft_loss"][0] < 0.85 * lines[0]["draft_loss"][0]
    # half of the blocks that dense attention looks at most, where a query may see far more
    assert last["index_overlap"] > 0.5


def test_a_killed_run_goes_on_to_the_same_curve(runs: Runs):
    delay = random.SystemRandom().uniform(0, 2)
    while not _killed(runs, delay):
        # it was over before: the next one is killed as soon as it may be
        delay = 0.0
        shutil.rmtree(runs.folder / "killed")
    before = runs.log("killed")
    assert runs.start("killed").wait() == 0, runs.said("killed")
    assert "going on after step" in runs.said("killed")
    assert runs.log("killed") == runs.log("whole"), f"killed after {delay:.2f} s, with {before!r}"


def _killed(runs: Runs, delay: float) -> bool:
    """Starts a run and kills it so long after its first checkpoint; False if it was over."""
    process, kept = runs.start("killed"), runs.folder / "killed" / "checkpoints"
    # a checkpoint gets its name, a number, once it is complete
    while process.poll() is None and not any(f.name.isdigit() for f in _files(kept)):
        time.sleep(0.02)
    time.sleep(delay)
    process.kill()
    return process.wait() != 0


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []
