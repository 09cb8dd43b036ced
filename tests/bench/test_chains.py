"""Chains of operations on a CPU: a line of each, and no time for what is wrong."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import chain_attention, chains, peers
from qwen4jax.config import Config
from tests.bench.public_rows import kinds

FIELDS = (
    "op case rows implementation us bytes bandwidth_fraction peer peer_us device commit".split()
)
CONFIG = Config.tiny()
# one case of each
CASES = r"^(1|1_rows_1k|verify_commit_1)$"


def lines(folder: Path) -> list[dict]:
    file = folder / "kernels.jsonl"
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def run(folder: Path, *arguments: str) -> None:
    common = "--small --quick --repeats 2 --jobs 2 --rows 1 --requests 1".split()
    chains.main([*common, "--out", str(folder), *arguments])


def test_a_line_of_each(tmp_path: Path):
    run(tmp_path, "--case", CASES, "--implementation", "default")
    written = lines(tmp_path)
    assert [(line["op"], line["case"], line["rows"]) for line in written] == [
        ("gated_residual.chain", "small_1", 1),
        ("index_topk.select", "small_1_rows_1k", 4),
        ("sparse_attention.chain", "small_1_rows_1k", 4),
        ("gated_delta.chain", "small_verify_commit_1", 4),
    ]
    for line in written:
        assert list(line)[: len(FIELDS)] == FIELDS
        assert line["us"] > 0
        assert line["bandwidth_fraction"] > 0
    # a kernel's arithmetic, of which the selection has none
    assert [line["error"] > 0 for line in written] == [True, False, True, True]


def test_a_name_that_no_operation_has_is_no_chain(tmp_path: Path):
    with pytest.raises(SystemExit, match="none is left"):
        run(tmp_path, "--chain", "select", "--implementation", "separate")
    assert lines(tmp_path) == []


def test_what_a_kernel_refuses_is_skipped(tmp_path: Path, capsys):
    run(tmp_path, "--chain", "select", "--implementation", "triton")
    assert "skipped: index_score: 'triton' needs an NVIDIA GPU" in capsys.readouterr().out
    assert lines(tmp_path) == []


def test_a_wrong_selection_has_no_time(tmp_path: Path, monkeypatch, capsys):
    select = chain_attention.select

    def late(*arguments, **static):
        """The open block's tail and the best blocks, one of them a token further."""
        selected = select(*arguments, **static)
        return selected.at[0, 2, 5].add(1)

    monkeypatch.setattr(chain_attention, "select", late)
    with pytest.raises(SystemExit, match="1 rows are wrong"):
        run(tmp_path, "--chain", "select", "--implementation", "default")
    assert "WRONG: 1 entries" in capsys.readouterr().out
    assert lines(tmp_path) == []


@pytest.fixture(scope="module")
def chosen() -> tuple[dict, dict, jax.Array]:
    """(a layer, what layers share, its selection): 256 blocks, 4 of them chosen, and a tail."""
    chain = chain_attention.selection(CONFIG, 2, 1024)
    _, (span, (own,)) = chain.draw(jax.random.key(0, impl="rbg"), 1, 1)
    span = span | dict(index=span["index"] - 2, complete=(span["index"] - 1) // 4)
    return own, span, chain.run(None, (span, (own,)), 1)[0]


def test_the_best_blocks_are_a_right_selection(chosen):
    own, span, selected = chosen
    assert chain_attention.wrong_rows(CONFIG, own, span, selected) == 0
    shuffled = jax.random.permutation(jax.random.key(0), selected, axis=2)
    assert chain_attention.wrong_rows(CONFIG, own, span, shuffled) == 0


def _other_block(row):
    """A block that is not among the chosen."""
    other = next(b for b in range(200) if b * 4 not in row)
    return np.where(row // 4 == row[0] // 4, other * 4 + row % 4, row)


@pytest.mark.parametrize(
    "change",
    [
        _other_block,
        lambda row: np.where(np.arange(len(row)) == 1, row[0], row),
        lambda row: np.where(np.arange(len(row)) < 4, -1, row),
        lambda row: np.where(row == row.max(), -1, row),
        lambda row: np.where(row == -1, row.max() + 1, row),
    ],
    ids=["worse_block", "token_twice", "too_few", "no_tail", "beyond_the_query"],
)
def test_another_selection_is_wrong(chosen, change):
    own, span, selected = chosen
    changed = np.array(selected)
    changed[1, 2] = change(changed[1, 2])
    assert (changed != np.asarray(selected)).any()
    assert chain_attention.wrong_rows(CONFIG, own, span, jnp.asarray(changed)) == 1


def test_released_chains_have_public_rows_but_one_of_each():
    args = chains.parse([])
    found = {
        (chain.name, chain.case): peers.terms(chain.name, f"released_{chain.case}", chain.rows)
        for chain in chains.chains(args)
    }
    assert [case for case, terms in found.items() if not terms] == [
        ("sparse_attention.chain", "16_rows_56k"),
        ("gated_delta.chain", "verify_commit_16"),
    ]
    named = {(term.group, term.case) for terms in found.values() for term in terms}
    assert named <= kinds()


def test_links_outgrow_the_cache_and_fit():
    for chain in chains.chains(chains.parse(["--requests", "1", "16", "32"])):
        given = chains.shapes(chain, chain.links, chain.passes)
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(given))
        assert 110e6 < nbytes < 20e9, (chain.name, chain.case)
