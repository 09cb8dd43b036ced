"""What public kernels are compared with our cases: rows that their benchmark has, or a reason."""

import json
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from bench import peers
from bench.operations import operations
from tests.bench.public_rows import kinds


class Ones(np.random.Generator):
    """Draws normal values, of which only the shape is asked, at no cost."""

    def standard_normal(self, size=None):
        return np.ones(size)


def rows_of(operation, case) -> int:
    """Tokens of a call of released size, whose arrays are not made."""
    found = []

    def run():
        inputs = case.build(Ones(np.random.PCG64(0)))
        found.append(
            operation.rows(inputs, operation.function(**inputs, implementation="reference"))
        )

    jax.eval_shape(run)
    return found[0]


def compared() -> list:
    return [op for op in operations().values() if peers.groups(op.name)]


@pytest.mark.parametrize("operation", compared(), ids=lambda operation: operation.name)
def test_released_cases_have_a_public_row_or_a_reason(operation):
    known = kinds()
    for case in operation.cases:
        if not case.device_only or peers.without(operation.name, case.name):
            continue
        terms = peers.terms(operation.name, case.name, rows_of(operation, case))
        assert terms, case.name
        named = [(group, term.case) for term in terms for group in (term.group, *term.others)]
        assert set(named) <= known, case.name
        assert len(set(named)) == len(named), case.name


def test_no_reason_is_left_over():
    """Each row of reasons is that of a case, of which no row is asked."""
    chains = {
        "gated_delta.chain": ["released_verify_commit_16"],
        "sparse_attention.chain": ["released_16_rows_56k"],
    }
    cases = {op.name: [c.name for c in op.cases if c.device_only] for op in compared()} | chains
    for pattern in peers._NONE:
        with mock.patch.object(peers, "_NONE", (pattern,)):
            assert any(peers.without(op, case) for op in cases for case in cases[op]), pattern
    for op, names in cases.items():
        assert not any(peers.terms(op, n, 4) for n in names if peers.without(op, n))


SAMPLE = [
    dict(group="mix", case="4 rows", peer="a", us=19.2, note=""),
    dict(group="mix", case="4 rows", peer="b", us=15.0, note=""),
    dict(group="mix", case="4 rows", peer="c", us=1.0, note="computes nothing WRONG"),
    dict(group="mix", case="4 rows", peer="d", fail="RuntimeError: no", note=""),
    dict(group="norm", case="4 rows", peer="n", us=1.34, note=""),
    dict(group="chain", case="4 rows", peer="whole", us=20.29, note=""),
    dict(group="qsa_score", case="1 req x 4 q, 56k tokens", peer="s", us=3.94, note=""),
    dict(group="attention", case="TP1 24q/2kv, 4 rows", peer="t1", us=19.5, note=""),
    dict(group="attention", case="TP4 6q/1kv, 4 rows", peer="t4", us=14.4, note=""),
    dict(group="moe_4bit", case="TP1 inter 640, 4 rows", peer="four", us=69.9, note=""),
    dict(group="moe_fp8", case="TP1 inter 640, 4 rows", peer="eight", us=63.0, note=""),
    dict(group="moe_4bit", case="TP1 inter 640, 8192 rows", peer="four", us=3000.0, note=""),
    dict(group="moe_fp8", case="TP1 inter 640, 8192 rows", peer="eight", us=2000.0, note=""),
    dict(group="gdn", case="TP1 batch 1, commit 3 of 4, 36 layers", peer="r", us=90.0, note=""),
]


@pytest.mark.parametrize(
    ("operation", "case", "rows", "expected"),
    [
        ("gated_residual.mix", "released_4", 4, ("n + b", 16.34)),
        ("gated_residual.mix", "released_32", 32, (None, None)),
        ("gated_residual.mix", "bfloat16", 4, (None, None)),
        ("gated_residual.chain", "released_4", 4, ("whole", 20.29)),
        ("index_score", "released_1_rows_56k", 4, ("s", 3.94)),
        ("index_score", "released_1_rows_64k", 4, (None, None)),
        ("sparse_attention", "released_1_rows", 4, ("t1", 19.5)),
        ("sparse_attention", "released_rank_of_4", 4, ("t4", 14.4)),
        ("moe.experts", "released_nvfp4_4", 4, ("eight", 63.0)),
        ("moe.experts", "released_fp8_4", 4, ("eight", 63.0)),
        ("moe.experts", "released_shared_nvfp4_4", 4, ("eight (no shared expert)", 63.0)),
        ("moe.experts", "released_shared_nvfp4_8192", 8192, ("four (no shared expert)", 3000.0)),
        ("moe.experts", "released_shared_fp8_8192", 8192, ("eight (no shared expert)", 2000.0)),
        ("moe.experts", "released_shared_fp8_2048", 2048, (None, None)),
        ("gated_delta.commit", "released_1", 4, ("r", 2.5)),
        ("skinny_matmul", "lm_head_4", 4, (None, None)),
    ],
)
def test_the_best_public_kernel(tmp_path: Path, operation, case, rows, expected):
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(SAMPLE))
    assert peers.best(peers.load(file), peers.terms(operation, case, rows)) == expected


def test_no_peers_without_their_folder(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    assert peers.folder() is None
    assert peers.run(["residual"], tmp_path / "peers.json") == []
