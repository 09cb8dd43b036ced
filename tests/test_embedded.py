"""The checkpoint that comes with the package: what it is, and that its draft head is worth it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen4jax.weights import embedded
from qwen4jax.weights.checkpoint import survey
from qwen4jax.weights.embedded import embedded_checkpoint

ROOT = Path(__file__).parent.parent
TINY = ROOT / "checkpoints" / "tiny"
MOST_BYTES = 20_000_000


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, Any]]:
    """What `embedded_run` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.embedded_run"],
        cwd=ROOT,
        # it runs ten times as long as it compiles unless loops are optimised
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tokens_per_round(found: dict[str, Any]) -> float:
    return 1 + float(np.mean(found["accepted"]))


def test_the_files_are_those_of_the_manifest():
    said = json.loads((TINY / "manifest.json").read_text())
    for name, digest in said["files"].items():
        assert hashlib.sha256((TINY / name).read_bytes()).hexdigest() == digest, name
    assert said["text"] == json.loads((ROOT / "checkpoints" / "tiny_text.json").read_text())
    for source in said["text"]["sources"]:
        assert all(source[field] for field in ("package", "version", "licence"))
        assert len(source["sha256"]) == 64
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= MOST_BYTES


def test_it_has_every_mechanism():
    assert embedded_checkpoint() == TINY
    config = survey(TINY).config
    assert set(config.layer_types) == {"linear_attention", "qwen_sparse_attention"}
    assert config.hc_count == 4
    assert config.ple_layer_ids == (2,)
    assert config.num_experts == 16
    assert config.mtp_num_hidden_layers == 1
    assert config.quantization.ngram_embedding == "fp8"


def test_without_it_the_error_says_where_it_was_looked_for(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(embedded, "_PLACES", (tmp_path / "one", tmp_path / "other"))
    with pytest.raises(FileNotFoundError, match=r"one or .*other; install the package again"):
        embedded_checkpoint()


def test_speculation_gives_the_ids_of_plain_decoding(served):
    """SPC-22 too: greedy and sampled requests, every answer is the one it has without drafts."""
    assert served["plain"]["ids"] == served["drafted"]["ids"]


def test_drafts_go_on_being_accepted(served):
    """SPC-22: in no 20 rounds on end, across requests that come and go, is everything refused."""
    accepted = served["drafted"]["accepted"]
    assert len(accepted) > 40
    assert min(sum(accepted[i : i + 20]) for i in range(len(accepted) - 20)) > 0
    assert tokens_per_round(served["drafted"]) > 2.0


@pytest.mark.parametrize("mutant", ["swapped", "normed"])
def test_a_wrong_draft_head_shows_in_acceptance_alone(served, mutant: str):
    """SPC-13: the ids are right all the same, and only a floor can tell."""
    assert served[mutant]["ids"] == served["drafted"]["ids"]
    right, wrong = (np.mean(served[name]["accepted"]) for name in ("drafted", mutant))
    assert wrong < 0.82 * right
