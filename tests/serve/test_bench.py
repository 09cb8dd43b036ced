"""`bench/serve.py` against a server: a line per concurrency, and a picture of them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import ROOT, RunningServer


def loaded() -> Any:
    """The module without its package, which sets XLA's flags for the whole process."""
    spec = importlib.util.spec_from_file_location("bench_serve", ROOT / "bench" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_per_concurrency(server: RunningServer, tmp_path: Path):
    sizes = "--concurrency 1,3 --requests 6 --prompt-tokens 20 --output-tokens 12 --spread 0.25"
    command = [sys.executable, "-m", "bench.serve", "--target", server.target, *sizes.split()]
    drawn = importlib.util.find_spec("matplotlib") is not None
    done = subprocess.run(
        [*command, "--out", str(tmp_path), *(["--plot"] if drawn else [])],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    assert [line["concurrency"] for line in lines] == [1, 3]
    for line in lines:
        assert (line["completed"], line["failed"], line["device"]) == (6, 0, "cpu")
        assert 0 < line["ttft_p50_ms"] <= line["ttft_p90_ms"] <= line["ttft_p99_ms"]
        assert 0 < line["inter_token_p50_ms"] <= line["inter_token_p90_ms"]
        # it is written in tenths, which are more than a hundredth of it on a busy machine
        interactivity = pytest.approx(1e3 / line["inter_token_p90_ms"], rel=0.01, abs=0.06)
        assert line["interactivity"] == interactivity
        assert line["output_tokens_per_s"] > 0
        assert 1 <= line["tokens_per_round"] <= 4
    assert not drawn or (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_known_calls():
    """The first token is no interval, what failed counts for nothing but itself."""
    bench = loaded()
    Call, Seen, figures, percentiles = bench.Call, bench.Seen, bench.figures, bench.percentiles
    calls = [Call(0.0, [5], 3, 0), Call(0.5, [5], 3, 0), Call(0.5, [5], 99, 0)]
    seen = [
        Seen(0.1, 0.5, [0.2, 0.2], 2.0),
        Seen(0.3, 0.5, [0.1, 0.1], 1.0),
        Seen(error="INTERNAL"),
    ]
    line = figures(calls, seen, 2.0)
    assert (line["completed"], line["failed"], line["output_tokens_per_s"]) == (2, 1, 3.0)
    assert (line["ttft_p50_ms"], line["inter_token_p50_ms"]) == (200.0, 150.0)
    assert line["interactivity"] == 5.0
    assert line["tokens_per_round"] == 1.5
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
