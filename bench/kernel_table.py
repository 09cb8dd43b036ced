"""The measured kernels of a device: a table per operation and a picture.

    python -m bench.kernel_table --device nvidia-h200

Of `kernels.jsonl` the newest line of each operation, case and implementation counts. A row shows
the fastest implementation, the XLA reference beside it, and the best public kernel of its run.
"""

import argparse
import json
from pathlib import Path

from bench.operations import operations
from bench.record import RESULTS

_TITLES = "case rows MB us share-of-copy implementation XLA public public-kernel faster".split()


def newest(device: str) -> dict[tuple[str, str, str], dict]:
    """(operation, case, implementation) -> line; empty where nothing was measured."""
    file = RESULTS / device / "kernels.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    return {(line["op"], line["case"], line["implementation"]): line for line in lines}


def ranked(lines: dict[tuple[str, str, str], dict]) -> dict[str, list[dict]]:
    """Operation -> rows in the order of its cases: the fastest line, with `xla_us` added."""
    known = operations()
    order = {
        name: [case.name for case in operation.cases if case.device_only]
        for name, operation in known.items()
    }
    # what is gone is history
    lines = {
        key: line
        for key, line in lines.items()
        if key[0] not in known or key[2] in known[key[0]].implementations
    }
    found: dict[str, list[dict]] = {}
    for op in dict.fromkeys(key[0] for key in lines):
        cases = dict.fromkeys(key[1] for key in lines if key[0] == op)
        # of an operation with cases, the small ones are for tests
        kept = [case for case in order[op] if case in cases] if op in order else list(cases)
        for case in kept:
            own = {key[2]: line for key, line in lines.items() if key[:2] == (op, case)}
            fastest = min(own.values(), key=lambda line: line["us"])
            reference = own.get("reference")
            row = fastest | {"xla_us": reference["us"] if reference else None}
            peers = [line for line in own.values() if line["peer_us"]]
            if peers:
                row |= {name: peers[-1][name] for name in ("peer", "peer_us")}
            found.setdefault(op, []).append(row)
    return found


def table(rows: list[dict]) -> str:
    """One operation in Markdown."""
    head = [title.replace("-", " ") for title in _TITLES]
    text = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        other = row["peer_us"] or row["xla_us"]
        cells = [
            row["case"],
            str(row["rows"]),
            f"{row['bytes'] / 1e6:.2f}",
            # where the host is as slow, the device may be faster
            f"**{'≤ ' if row.get('host_us', 0) > 0.85 * row['us'] else ''}{row['us']:.2f}**",
            f"{row['bandwidth_fraction']:.0%}",
            row["implementation"],
            f"{row['xla_us']:.2f}" if row["xla_us"] else "",
            f"{row['peer_us']:.2f}" if row["peer_us"] else "",
            row["peer"] or "",
            f"{other / row['us']:.1f}x" if other else "",
        ]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def section(device: str) -> str:
    """All operations in Markdown; empty where nothing was measured."""
    found = ranked(newest(device))
    if not found:
        return ""
    text = [
        "Median microseconds of a call in a CUDA graph of many, weights cold; `share of copy` is "
        "of a large copy's bandwidth in the same process; `faster` against the public kernel, or "
        "against XLA where there is none; `≤` where the host was as slow as the device. Method in "
        "`bench/kernels.py` and `bench/timing.py`."
    ]
    for op, rows in found.items():
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
        text.append(f"### {op}\n\nCommit {commits}.\n\n{table(rows)}")
    return "\n\n".join(text)


def picture(found: dict[str, list[dict]], file: Path) -> None:
    """Per row: our time, XLA's and the public kernel's, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(f"{op} {row['case']}", row) for op, own in found.items() for row in own][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.2 * len(rows) + 1.2))
    marks = (("us", "o", "ours"), ("xla_us", "|", "XLA"), ("peer_us", "x", "public"))
    for name, mark, label in marks:
        shown = [(row[name], place) for place, (_, row) in enumerate(rows) if row[name]]
        if shown:
            us, places = zip(*shown, strict=True)
            axes.plot(us, places, mark, label=label, markersize=5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=6)
    axes.set_ylim(-0.8, len(rows) - 0.2)
    axes.set_xscale("log")
    axes.set_xlabel("us")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="nvidia-h200", help="folder under bench/results")
    device = parser.parse_args(argv).device
    found = ranked(newest(device))
    if not found:
        raise SystemExit(f"{RESULTS / device / 'kernels.jsonl'}: no lines")
    print(section(device))
    file = RESULTS / device / "kernels.png"
    picture(found, file)
    print(f"\npicture: {file}")


if __name__ == "__main__":
    main()
