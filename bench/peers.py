"""Public kernels of the same operations, timed in the same device run.

    python -m bench.peers --op gated_residual --json peers.json

The scripts that time them are not part of this repository: a folder `PEERS_DIR`, by default
`.peers` of the checkout, holds them (`scripts`) and the public packages, unpacked or as
`bundle.txz`. Without the folder no peer is printed. A peer that failed or was wrong counts for
nothing, and only cases of equal size are compared. Where a peer does less than the case, or reads
from another place, its name says so in brackets; several are a sum of parts that were timed alone.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.operations import named

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Term:
    """One row of the peers' table.

    Attributes:
        group: of the row.
        case: of the row.
        share: of its time that counts.
        others: groups whose rows of the same case may be faster.
        note: what differs from our case.
    """

    group: str
    case: str
    share: float = 1.0
    others: tuple[str, ...] = ()
    note: str = ""


def folder() -> Path | None:
    """Where the peers are, if they are."""
    given = Path(os.environ.get("PEERS_DIR", ROOT / ".peers"))
    return given.resolve() if (given / "scripts/bench_peers.py").exists() else None


def run(groups: Iterable[str], file: Path, *, quick: bool = False) -> list[dict]:
    """Rows of some groups, timed now by a process of their own; empty without peers."""
    at = folder()
    wanted = sorted(set(groups))
    if at is None or not wanted:
        return []
    if (at / "bundle.txz").exists() and not (at / "tokenspeed_kernel").exists():
        subprocess.run(["tar", "xJf", "bundle.txz"], cwd=at, check=True)
    command = [sys.executable, str(at / "scripts/bench_peers.py"), "--only", ",".join(wanted)]
    command += ["--json", str(file)] + ["--quick"] * quick + ["--in-process"] * (len(wanted) == 1)
    subprocess.run(command, env=os.environ | {"PEERS_DIR": str(at)}, check=False)
    return load(file) if file.exists() else []


def load(file: Path) -> list[dict]:
    """Rows that a run wrote."""
    return json.loads(file.read_text())


def groups(operation: str) -> list[str]:
    """Groups of the peers' benchmark that an operation is compared with."""
    return _GROUPS.get(operation, [])


def best(rows: list[dict], terms: Iterable[Term]) -> tuple[str | None, float | None]:
    """(name, microseconds) of the fastest peer of every term, summed; None if a term has none."""
    names, total = [], 0.0
    for term in terms:
        found = [
            (row["us"] * term.share, row["peer"])
            for row in rows
            if row["group"] in (term.group, *term.others)
            and row["case"] == term.case
            and _valid(row)
        ]
        if not found:
            return None, None
        us, name = min(found)
        names.append(name + (f" ({term.note})" if term.note else ""))
        total += us
    return (" + ".join(names), round(total, 3)) if names else (None, None)


def _valid(row: dict) -> bool:
    return "fail" not in row and "WRONG" not in row.get("note", "") and bool(row.get("us"))


def terms(operation: str, case: str, rows: int) -> list[Term]:
    """The peers' rows that do what one of our cases does; empty where none does."""
    make = _TERMS.get(operation)
    if make is None or not case.startswith("released") or without(operation, case):
        return []
    return make(case, rows)


def without(operation: str, case: str) -> str | None:
    """Why no public kernel is compared with a case of an operation that has some."""
    for operations, cases, reason in _NONE:
        if re.fullmatch(operations, operation) and re.search(cases, case):
            return reason
    return None


def _mix(case: str, rows: int) -> list[Term]:
    return [Term("norm", f"{rows} rows"), Term("mix", f"{rows} rows")]


def _update(case: str, rows: int) -> list[Term]:
    return [Term("combine", f"{rows} rows")]


def _chain(case: str, rows: int) -> list[Term]:
    return [Term("chain", f"{rows} rows")]


def _context(requests: int, thousands: int) -> str:
    return f"{requests} req x 4 q, {thousands}k tokens"


def _indexer(group: str) -> Callable[[str, int], list[Term]]:
    """Cases that end in the thousands of tokens."""
    return lambda case, rows: [
        Term(group, _context(rows // 4, int(case.removesuffix("k").rpartition("_")[2])))
    ]


def _index_topk(case: str, rows: int) -> list[Term]:
    blocks = int(case.rpartition("_")[2])
    return [Term("qsa_topk", _context(rows // 4, blocks * 4 // 1024))]


def _attention(case: str, rows: int) -> list[Term]:
    heads = "TP4 6q/1kv" if "rank_of_4" in case else "TP1 24q/2kv"
    return [Term("attention", f"{heads}, {rows} rows")]


def _attention_chain(case: str, rows: int) -> list[Term]:
    selected = [Term(group, _context(rows // 4, 56)) for group in ("qsa_both", "qsa_slots")]
    return selected + _attention(case, rows)


def _prepare(case: str, rows: int) -> list[Term]:
    at = f"{rows} rows ({rows // 4} req x 4)"
    return [Term("qsa_prep", at, note="the indexer's part only")]


def _rank(case: str) -> tuple[str, str]:
    """Heads of the recurrence and of its norm as the peers name them."""
    return ("TP4 4k/12v", "TP4 12v") if "rank_of_4" in case else ("TP1 16k/48v", "TP1 48v")


def _step(case: str, rows: int) -> list[Term]:
    heads, norm = _rank(case)
    decode = "decode" in case
    batch, what = (rows, "decode") if decode else (rows // 4, "verify 4")
    note = "no convolution" + (", the state written" if decode else "")
    return [
        Term("gdn", f"{heads}, batch {batch}, {what}", note=note),
        Term("gdn_norm", f"{norm}, {rows} tokens"),
    ]


def _commit(case: str, rows: int) -> list[Term]:
    layers = int(case.rpartition("_layers_")[2]) if "_layers_" in case else 1
    rank = _rank(case)[0].partition(" ")[0]
    return [Term("gdn", f"{rank} batch {rows // 4}, commit 3 of 4, 36 layers", layers / 36)]


def _delta_chain(case: str, rows: int) -> list[Term]:
    return _step(case, rows) + (_commit(case, rows) if "commit" in case else [])


def _chunks(case: str, rows: int) -> list[Term]:
    at = f"{_rank(case)[0]}, {rows} tokens"
    return [Term("gdn_prefill", at, note="the rule only")]


def _tokens(rows: int) -> str:
    return f"{rows} tokens ({math.ceil(rows / 4)} req x {min(rows, 4)})"


def _ngram(group: str) -> Callable[[str, int], list[Term]]:
    return lambda case, rows: [Term(group, _tokens(rows))]


def _gather(case: str, rows: int) -> list[Term]:
    return [Term("ple_gather", f"{_tokens(rows)} fp8", note="1.9 GB pinned")]


def _embed(case: str, rows: int) -> list[Term]:
    return _ngram("ple_ids")(case, rows) + _gather(case, rows)


def _table(case: str, rows: int) -> list[Term]:
    return [
        *_ngram("ple_ids")(case, rows),
        Term("ple_scale", f"{rows} tokens, fp8 table 32 GiB", note="32 GiB"),
    ]


def _ple_mix(case: str, rows: int) -> list[Term]:
    return _ngram("ple_gate")(case, rows) + _ngram("ple_conv")(case, rows)


# forms of the experts, and what they are to be ahead of: the same precision, NVFP4 of any where the
# weights' bytes decide
_PRECISIONS = {
    "plain": ("moe_bf16",),
    "fp8": ("moe_fp8", "moe_int8"),
    "nvfp4": ("moe_4bit", "moe_fp8", "moe_int8", "moe_bf16"),
}
# tokens of a round; with more, tensor cores decide, which are faster with fewer bits
_MOST_BY_BYTES = 128


def _experts(case: str, rows: int) -> list[Term]:
    form = next(form for form in _PRECISIONS if f"_{form}_" in case)
    group, *others = _PRECISIONS[form]
    if form == "nvfp4" and rows > _MOST_BY_BYTES:
        others = []
    note = "no shared expert" if "_shared_" in case else ""
    return [Term(group, f"TP1 inter 640, {rows} rows", others=tuple(others), note=note)]


_TERMS: dict[str, Callable[[str, int], list[Term]]] = {
    "gated_residual.mix": _mix,
    "gated_residual.update": _update,
    "gated_residual.boundary": _chain,
    "gated_residual.chain": _chain,
    "index_score": _indexer("qsa_score"),
    "index_topk": _index_topk,
    "index_topk.select": _indexer("qsa_both"),
    "sparse_attention": _attention,
    "sparse_attention.chain": _attention_chain,
    "compress_and_store.prepare_and_store": _prepare,
    "gated_delta.step": _step,
    "gated_delta.commit": _commit,
    "gated_delta.chain": _delta_chain,
    "gated_delta.chunks": _chunks,
    "ple.ngram_rows": _ngram("ple_ids"),
    "ple.gather": _gather,
    "ple.embed": _embed,
    "table": _table,
    "ple.mix": _ple_mix,
    "moe.experts": _experts,
}
# (operation, cases, why no peer's row is of their kind)
_NONE = (
    (r"gated_residual\.(mix|update)", "chunk", "timed up to 2,048 rows"),
    (r"gated_residual\.boundary", "_(512|8192)$", "timed at 256 and 2,048 rows"),
    (r"moe\.experts", "same_ten|one_in_all", "timed with tokens that choose at random"),
    (
        r"moe\.experts",
        r"_(8|256|512|1024|2048|4096)$",
        "timed at 1, 4, 16, 32, 64, 128 and 8,192 rows",
    ),
    (r"index_score", r"_8k$|_64k$|chunk", "timed at 4k, 16k, 56k and 256k tokens"),
    (r"index_topk", r"_2048$|_16384$|_16640$|chunk", "timed at 4k, 16k, 56k and 256k tokens"),
    (r"index_topk", "ties|all_equal|one_bin|half_range|in_a_run", "timed with random scores"),
    (r"index_topk", "vocabulary", "none selects single ids of a vocabulary"),
    (r"sparse_attention", "e4m3", "none reads an e4m3 cache"),
    (r"sparse_attention", r"chunk|_8_rows$", "timed at 1, 4, 16 and 128 rows that choose apart"),
    (r"sparse_attention\.chain", r"_16_rows_", "scoring is timed for 1 and 32 requests"),
    (r".*prepare_and_store", r"_8_rows$|e4m3|chunk|tokens", "timed for 1 and 32 requests, in bf16"),
    (r"gated_delta\.step", r"_8$", "timed for 1, 4, 16 and 32 requests"),
    (r"gated_delta\.commit", r"_(8|32)(_layers_\d+)?$", "timed for 1 and 4 requests"),
    (r"gated_delta\.chain", r"_commit_16$", "its commit is timed for 1 and 4 requests"),
    (r"gated_delta\.chunks", r"_(512|2048|4096|1024)$", "timed for one request of 8,192 tokens"),
    (r"ple\..*", r"chunk|4096", "timed up to 128 tokens"),
)
# functions of their script that time an operation's rows
_GROUPS: dict[str, list[str]] = {
    "gated_residual.mix": ["residual"],
    "gated_residual.update": ["residual"],
    "gated_residual.boundary": ["residual"],
    "gated_residual.chain": ["residual"],
    "index_score": ["qsa_score"],
    "index_topk": ["qsa_topk"],
    "index_topk.select": ["qsa_topk"],
    "sparse_attention": ["attention"],
    "sparse_attention.chain": ["qsa_topk", "attention"],
    "compress_and_store.prepare_and_store": ["qsa_prep"],
    "gated_delta.step": ["gdn"],
    "gated_delta.commit": ["gdn"],
    "gated_delta.chain": ["gdn"],
    "gated_delta.chunks": ["gdn_prefill"],
    "ple.ngram_rows": ["ple"],
    "ple.gather": ["ple"],
    "ple.embed": ["ple"],
    "table": ["ple", "ple_scale"],
    "ple.mix": ["ple"],
    "moe.experts": ["moe"],
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--op", action="append", help="operation or package; by default all but table"
    )
    parser.add_argument("--json", required=True, type=Path, help="file for their rows")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and replays")
    args = parser.parse_args(argv)
    if folder() is None:
        raise SystemExit("no peers: neither PEERS_DIR nor .peers holds scripts/bench_peers.py")
    # 32 GiB are pinned for the table, so it has to be named
    asked = args.op or [name for name in _GROUPS if name != "table"]
    wanted = [g for name, own in _GROUPS.items() if named(name, asked) for g in own]
    rows = run(wanted, args.json, quick=args.quick)
    print(f"{len(rows)} rows, {sum(map(_valid, rows))} of them timed and right")


if __name__ == "__main__":
    main()
