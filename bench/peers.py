"""Public kernels of the same operations, timed in the same device run.

    python -m bench.peers --op gated_residual --json peers.json

The scripts that time them are not part of this repository: a folder `PEERS_DIR`, by default
`.peers` of the checkout, holds them (`scripts`) and the public packages, unpacked or as
`bundle.txz`. Without the folder no peer is printed. A peer that failed or was wrong counts for
nothing, and only its own case is compared: the sizes are equal but for the index, where the peers'
64k row is 56k tokens long and the name says so.
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
    """One row of the peers' table: a group and a case; `share` of its time counts."""

    group: str
    case: str
    share: float = 1.0


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
            if (row["group"], row["case"]) == (term.group, term.case) and _valid(row)
        ]
        if not found:
            return None, None
        us, name = min(found)
        names.append(name + (" (56k)" if "56k" in term.case else ""))
        total += us
    return (" + ".join(names), round(total, 3)) if names else (None, None)


def _valid(row: dict) -> bool:
    return "fail" not in row and "WRONG" not in row.get("note", "") and bool(row.get("us"))


def terms(operation: str, case: str, rows: int) -> list[Term]:
    """The peers' rows that do what one of our cases does; empty where none does."""
    make = _TERMS.get(operation)
    return make(case, rows) if make and case.startswith("released") else []


def _mix(case: str, rows: int) -> list[Term]:
    return [Term("norm", f"{rows} rows"), Term("mix", f"{rows} rows")]


def _update(case: str, rows: int) -> list[Term]:
    return [Term("combine", f"{rows} rows")]


def _chain(case: str, rows: int) -> list[Term]:
    return [Term("chain", f"{rows} rows")]


def _context(requests: int, tokens: int) -> str:
    length = 56 if tokens == 65536 else tokens // 1024
    return f"{requests} req x 4 q, {length}k tokens"


def _index_score(case: str, rows: int) -> list[Term]:
    found = re.search(r"_(\d+)k$", case)
    return [Term("qsa_score", _context(rows // 4, int(found[1]) * 1024))] if found else []


def _index_topk(case: str, rows: int) -> list[Term]:
    found = re.search(r"rows_(\d+)$", case)
    return [Term("qsa_topk", _context(rows // 4, int(found[1]) * 4))] if found else []


def _sparse_attention(case: str, rows: int) -> list[Term]:
    # none of them reads an e4m3 cache
    return [] if "e4m3" in case else [Term("attention", f"TP1 24q/2kv, {rows} rows")]


def _step(case: str, rows: int) -> list[Term]:
    batch = rows // 4
    return [
        Term("gdn", f"TP1 16k/48v, batch {batch}, verify 4"),
        Term("gdn_norm", f"TP1 48v, {rows} tokens"),
    ]


def _commit(case: str, rows: int) -> list[Term]:
    layers = int(case.rpartition("_layers_")[2]) if "_layers_" in case else 1
    return [Term("gdn", f"TP1 batch {rows // 4}, commit 3 of 4, 36 layers", layers / 36)]


def _ngram(group: str) -> Callable[[str, int], list[Term]]:
    return lambda case, rows: [Term(group, f"{rows} tokens ({math.ceil(rows / 4)} req x 4)")]


def _ple_mix(case: str, rows: int) -> list[Term]:
    return _ngram("ple_gate")(case, rows) + _ngram("ple_conv")(case, rows)


def _experts(case: str, rows: int) -> list[Term]:
    for form, group in (("plain", "moe_bf16"), ("fp8", "moe_fp8"), ("nvfp4", "moe_4bit")):
        if form in case:
            return [Term(group, f"TP1 inter 640, {rows} rows")]
    return []


_TERMS: dict[str, Callable[[str, int], list[Term]]] = {
    "gated_residual.mix": _mix,
    "gated_residual.update": _update,
    "gated_residual.boundary": _chain,
    "gated_residual.chain": _chain,
    "index_score": _index_score,
    "index_topk": _index_topk,
    "sparse_attention": _sparse_attention,
    "gated_delta.step": _step,
    "gated_delta.commit": _commit,
    "ple.ngram_rows": _ngram("ple_ids"),
    "ple.mix": _ple_mix,
    "moe.experts": _experts,
}
_GROUPS: dict[str, list[str]] = {
    "gated_residual.mix": ["residual"],
    "gated_residual.update": ["residual"],
    "gated_residual.boundary": ["residual"],
    "gated_residual.chain": ["residual"],
    "index_score": ["qsa_score"],
    "index_topk": ["qsa_topk"],
    "sparse_attention": ["attention"],
    "gated_delta.step": ["gdn"],
    "gated_delta.commit": ["gdn"],
    "ple.ngram_rows": ["ple"],
    "ple.mix": ["ple"],
    "moe.experts": ["moe"],
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--op", action="append", help="operation or package; by default all")
    parser.add_argument("--json", required=True, type=Path, help="file for their rows")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and replays")
    args = parser.parse_args(argv)
    if folder() is None:
        raise SystemExit("no peers: neither PEERS_DIR nor .peers holds scripts/bench_peers.py")
    wanted = [g for name, own in _GROUPS.items() if named(name, args.op) for g in own]
    rows = run(wanted, args.json, quick=args.quick)
    print(f"{len(rows)} rows, {sum(map(_valid, rows))} of them timed and right")


if __name__ == "__main__":
    main()
