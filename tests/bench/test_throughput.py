"""All users' tokens per second against one's."""

import json
from pathlib import Path

from bench import throughput

LINE = dict(
    config="flash_next layers=48 experts=nvfp4 index_share=share kv=bf16",
    batch=1,
    context=65536,
    draft=3,
    tokens_per_round=3.2,
    tokens_per_s_per_user=100.0,
    tokens_per_s=100.0,
    device="NVIDIA H200",
    commit="old",
)


def test_what_others_publish_has_a_source():
    assert all(one["source"].startswith("https://") for one in throughput.published())


def test_the_newest_line_of_each_batch_counts(monkeypatch, tmp_path: Path):
    new = LINE | dict(tokens_per_s_per_user=200.0, tokens_per_s=200.0, commit="new")
    lines = [
        LINE | dict(batch=32, config=LINE["config"].replace("bf16", "e4m3")),
        LINE,
        new,
        new | dict(config=LINE["config"].replace("share kv", "fresh kv"), commit="fresh"),
        new | dict(config=LINE["config"] + " draft_weights=fp8", commit="fp8"),
        new | dict(context=4096, commit="short"),
        new | dict(draft=0, commit="no drafts"),
        new | dict(mode="server", commit="server"),
    ]
    other = dict(engine="theirs", hardware="4 x GPU", users=1, per_user=3, total=3)
    other |= dict(differs="all", source="https://a.test/1")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/decode.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "published.jsonl").write_text(json.dumps(other))
    monkeypatch.setattr(throughput, "RESULTS", tmp_path)
    found = [(line["batch"], line["commit"]) for line in throughput.by_batch("a")]
    assert found == [(1, "new"), (32, "old")]
    text = throughput.table("a")
    assert "| qwen4jax new | 1 x H200 | 1 | **200.0** | **200.0** | 3.2 tokens per round" in text
    assert "| [theirs](https://a.test/1) | 4 x GPU | 1 | 3 | 3 | all |" in text
    throughput.picture("a", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
