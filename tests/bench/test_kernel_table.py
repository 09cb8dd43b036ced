"""The table of measured kernels."""

import json
from pathlib import Path

from bench import kernel_table


def test_the_table_compares_the_default_with_its_own_run(monkeypatch, tmp_path: Path):
    line = dict(op="skinny_matmul", case="lm_head_4", rows=4, bytes=10**9, device="NVIDIA H200")
    line |= dict(bandwidth_fraction=0.5, peer=None, peer_us=None, commit="new")
    public = dict(peer="theirs", peer_us=500.0)
    given = [
        line | dict(implementation="triton", us=100.0),
        line | dict(implementation="reference", us=400.0),
        line | dict(implementation="mosaic_hopper", us=200.0),
        line | dict(implementation="triton", us=250.0),
        line | dict(case="lm_head_1", implementation="triton", us=9.0, commit="old") | public,
        line | dict(case="lm_head_1", implementation="reference", us=90.0, commit="old") | public,
        line | dict(case="lm_head_1", implementation="triton", us=30.0),
        line | dict(case="lm_head_32", implementation="reference", us=7.0, commit="old"),
        line | dict(case="delta_out_4", implementation="triton", us=11.0, compiled="ahead"),
        line | dict(case="delta_out_4", implementation="reference", us=33.0, compiled="ahead"),
        line | dict(case="one_row", implementation="triton", us=1.0),
        line | dict(op="gated_delta.chain", implementation="default", us=10.0),
        line | dict(op="gated_delta.chain", implementation="reference", us=30.0),
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "a/kernels.jsonl").write_text("\n".join(map(json.dumps, given)))
    monkeypatch.setattr(kernel_table, "RESULTS", tmp_path)
    text = kernel_table.section("a")
    # the newest of what runs by default, and what beat it
    assert (
        "| **250.00** | 50% | triton | new | 400.00 |  |  | 1.6x | mosaic_hopper 200.00 |" in text
    )
    # times of another run say whose they are, and nothing is faster
    assert "| **30.00** | 50% | triton | new | 90.00 (old) | 500.00 (old) | theirs |  |  |" in text
    assert "| **7.00** | 50% | reference (not the default) | old |  |  |  |  |  |" in text
    assert "| **10.00** | 50% | default | new | 30.00 |  |  | 3.0x |  |" in text
    # XLA had nothing to tune on
    assert "| **11.00** | 50% | triton | new | 33.00 untuned |  |  |  |  |" in text
    assert "one_row" not in text
    assert kernel_table.section("b") == ""
    kernel_table.picture(kernel_table.ranked(kernel_table.measured("a")), tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 1000
