"""The kernels of a round by place and kind."""

import json
from pathlib import Path

import pytest

from bench import launches

LAYERS = ("linear_attention", "linear_attention", "qwen_sparse_attention")


def round_of(*more: tuple[str, str]) -> list[tuple[str, str]]:
    scopes = (
        *("verify/layer00/router/k", "verify/layer01/ple/k", "verify/layer01/router/k"),
        *("verify/layer02/router/k", "accept/lm_head/k", "draft_extend/mtp/router/k"),
        *("draft_1/mtp/router/k", "draft_2/mtp/router/k", "commit/k"),
    )
    return [*((f"jit(next_round)/{scope}", "router_4x64x2560__1") for scope in scopes), *more]


def test_kernels_are_counted_where_they_are():
    last = ("jit(next_round)/verify/layer02/index_topk/k", "index_topk_1x4x16576")
    found = launches.launches(round_of(last, last), LAYERS)
    assert found.pop("QSA layer") == {"router": 1, "index_topk": 2}
    assert set(map(str, found.values())) == {"{'router': 1}"}
    assert list(found) == [
        *("GDN layer", "n-gram embedding", "end of verification"),
        *("first draft step", "later draft step", "commit"),
    ]


def test_layers_that_differ_are_named():
    odd = ("jit(next_round)/verify/layer01/experts/k", "experts_down_nvfp4_4x10x2560x640")
    with pytest.raises(ValueError, match=r"GDN layer: \['experts_down_nvfp4'\] are not in each of"):
        launches.launches(round_of(odd), LAYERS)
    with pytest.raises(ValueError, match=r"jit\(f\)/x: no place of a round"):
        launches.launches(round_of(("jit(f)/x", "router_1")), LAYERS)


def test_the_report_of_a_description(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(launches, "RESULTS", tmp_path)
    assert launches.section("a") == ""
    (tmp_path / "a").mkdir()
    given = tmp_path / "description.json"
    given.write_text(json.dumps({"triton": round_of(), "layer_types": LAYERS}))
    with given.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        launches.main(["--device", "a"])
    assert "| QSA layer | 1 | router |" in capsys.readouterr().out
    # 36 and 12 layers, two later steps, and four places of one
    assert " 54 launches" in launches.section("a")
