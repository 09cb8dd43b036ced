"""The benchmarks on a CPU: the byte budget, a line of every field, reports equal to their data."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import acceptance, decode, report, roofline
from bench.record import PLAIN

ROOT = Path(__file__).parents[2]
FIELDS = (
    "config devices batch context draft mode acceptance round_ms verify_ms draft_ms commit_ms "
    "host_ms tokens_per_s_per_user tokens_per_s floor_ms floor_fraction kernels graph_segments "
    "bytes_weights bytes_state bytes_table bytes_peak device commit"
).split()


def run(*arguments: str) -> str:
    """Standard output of a module of bench/, in a process of its own: it sets XLA's flags."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_byte_budget_is_that_of_the_design():
    table = run("bench.roofline", "--floor-only")
    found = {n: float(gb) for n, gb in re.findall(r"\| \**([\w -]+?)\** \| \**([\d.]+)", table)}
    # design.md section 6, in GB
    expected = {
        "GDN projections": 4.17,
        "QSA projections": 1.23,
        "gated residual": 1.27,
        "lm_head": 1.27,
        # routed 5.15, shared 0.47
        "experts": 5.62,
        "verify": 14.2,
        "commit": 0.2,
        "draft": 4.9,
    }
    for name, gigabytes in expected.items():
        assert abs(found[name] - gigabytes) < max(0.02 * gigabytes, 0.05), name


def test_a_run_writes_a_line_with_every_field(tmp_path: Path):
    run(
        *"bench.decode --config tiny --batch 2 --context 100 --rounds 20 --profile 0".split(),
        "--run=mode=server,live=1",
        "--out",
        str(tmp_path),
    )
    (line,) = (tmp_path / "decode.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert set(FIELDS) <= set(record)
    assert record["device"] == "cpu"
    assert record["mode"] == "server"
    # of the one slot of two that runs
    assert "live=1" in record["config"].split()
    assert 3 <= record["tokens_per_round"] <= 4
    assert record["round_ms"] > 0
    # whole groups of 12, no fewer rounds than asked
    assert record["rounds"] == 24


@pytest.mark.parametrize("live", [0, 3])
def test_slots_that_run_are_some_of_the_batch(live: int):
    with pytest.raises(SystemExit, match=rf"--live: {live} is not in 1\.\.2, the batch"):
        decode.scenarios(decode.parse(["--run", f"batch=2,live={live}"]))


def test_a_run_of_an_unknown_mode_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        decode.parse(["--run", "mode=beam"])
    assert "'mode=beam' is not one of greedy, sampled, server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--drafts fp4", "--drafts: 'fp4' is not one of stored, fp8, nvfp4"),
        ("--drafts fp8:x", "--drafts: 'fp8:x': 'x' is no number of ids"),
        ("--modes share,none", "--modes: ['none'] not in share, share_frozen"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments: str, message: str):
    with pytest.raises(SystemExit, match="2"):
        acceptance.main(["--text", "absent", *arguments.split()])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--draft-vocab", "--table-rows"])
def test_some_options_are_of_the_released_geometry(option: str):
    done = subprocess.run(
        [sys.executable, "-m", *f"bench.decode --config tiny {option} 9".split()],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--draft-weights, --draft-vocab, --table-rows: are of flash_next" in done.stderr


def test_the_drafted_vocabulary_and_the_mode_stand_in_the_report():
    assert report._stored("x layers=4 kv=bf16 draft_vocab=9") == "kv=bf16 draft_vocab=9"
    # lines are older than modes
    assert report._mode({"mode": "server"}) == ["mode=server"]
    assert report._mode({"mode": "greedy"}) == report._mode({}) == []


def test_where_a_round_was_compiled_stands_in_the_report():
    assert report._ahead({"compiled": "ahead"}) == ["compiled=ahead"]
    assert report._ahead({"compiled": "here"}) == report._ahead({}) == []


def test_rounds_of_other_modes_are_not_mixed_with_greedy_ones(monkeypatch, tmp_path: Path):
    sizes = dict(
        config=PLAIN + "bf16", batch=1, context=65536, draft=3, parts_ms={"a (verify)": 1.0}
    )
    lines = [sizes, sizes | {"mode": "greedy"}, sizes | {"mode": "server"}]
    lines += [
        sizes | {"config": f"{sizes['config']} {more}"} for more in ("table=pinned", "live=1")
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "decode.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    for module in (report, roofline):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert roofline.newest("a") == lines[1]
    assert list(report.measured_runs("a").values()) == [lines[:2], *([line] for line in lines[2:])]


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    code = (
        "from bench.released import *; from qwen4jax.decode.capacity import plan_memory;"
        "c = released_config(); n = released_config(table_rows=7000000).ngram_hash(0).rows;"
        "assert 0 <= n - 16 * 7000000 < 10000, n;"
        "s = state_shapes(c, batch=32, context=65536, drafts=3, kv_dtype=None, room=64);"
        "require_memory(plan_memory(c, **s), int(138e9))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(
        r"does not fit: weights 83\.1 \+ .* = 1\d\d\.\d GB is over 138\.0 GB", done.stderr
    )


def test_the_report_is_made_of_the_results():
    committed = (ROOT / "bench/results/nvidia-h200/README.md").read_text()
    assert run("bench.report", "--device", "nvidia-h200") == committed


def test_resources_of_a_kernel_without_a_device():
    text = run(*"bench.resources --op skinny_matmul --small --case ^bfloat16_tiles$".split())
    (line,) = text.splitlines()
    assert "triton skinny_matmul_5x48x256: grid (1, 3, 1), 1 warps: " in line
    assert ", 0 B stack, " in line
