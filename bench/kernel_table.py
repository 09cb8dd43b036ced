"""The measured kernels of a device: a table per operation and a picture.

    python -m bench.kernel_table --device nvidia-h200

A row shows what runs by default for its number of rows, as last measured. Only a line of the same
run, which is a commit on a device, is compared with it: XLA's or a public kernel's time of another
run stands there with its commit, and says nothing about which is faster.
"""

import argparse
import json
from pathlib import Path

from bench import ahead
from bench.operations import operations
from bench.record import RESULTS
from qwen4jax.pallas import registry

_TITLES = (
    *("case", "rows", "MB", "us", "share of copy", "implementation", "commit", "XLA", "public"),
    *("public kernel", "faster", "faster when named"),
)


def measured(device: str) -> list[dict]:
    """All lines, oldest first; empty where nothing was measured."""
    file = RESULTS / device / "kernels.jsonl"
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def ranked(lines: list[dict]) -> dict[str, list[dict]]:
    """Operation -> rows in the order of its cases, each the line of what runs by default.

    Beside what a line has: `default` (False where the default was never timed, and the fastest
    stands for it), `xla` and `public` (the newest lines that have one), `faster` (how many times,
    by the same run's public kernel or XLA), `named` (lines of the same run that were faster).
    """
    known = operations()
    order = {
        name: [case.name for case in operation.cases if case.device_only]
        for name, operation in known.items()
    }
    # what is gone is history
    lines = [
        line
        for line in lines
        if line["op"] not in known or line["implementation"] in known[line["op"]].implementations
    ]
    found: dict[str, list[dict]] = {}
    for op in dict.fromkeys(line["op"] for line in lines):
        cases = dict.fromkeys(line["case"] for line in lines if line["op"] == op)
        # of an operation with cases, the small ones are for tests
        kept = [case for case in order[op] if case in cases] if op in order else list(cases)
        for case in kept:
            own = [line for line in lines if (line["op"], line["case"]) == (op, case)]
            found.setdefault(op, []).append(_row(own))
    return found


def _row(lines: list[dict]) -> dict:
    """One row of `ranked` from all lines of a case, oldest first."""
    preferred = _preferred(lines[-1])
    by_name = {line["implementation"]: line for line in lines}
    name = next((name for name in preferred if name in by_name), None)
    row = by_name[name] if name else min(by_name.values(), key=lambda line: line["us"])
    same = {line["implementation"]: line for line in lines if line["commit"] == row["commit"]}
    xla = same.get("reference") or by_name.get("reference")
    public = next((line for line in (*same.values(), *reversed(lines)) if line["peer_us"]), None)
    if row["implementation"] == "reference":
        xla = None
    beside = [(public, "peer_us")]
    if xla and not untuned(xla):
        beside.append((xla, "us"))
    fair = [line[us] for line, us in beside if line and line["commit"] == row["commit"]]
    named = [line for line in same.values() if line["us"] < row["us"]]
    return row | {
        "default": row["implementation"] == preferred[0],
        "xla": xla,
        "public": public,
        "faster": fair[0] / row["us"] if fair else None,
        "named": sorted(named, key=lambda line: line["us"]),
    }


def untuned(line: dict) -> bool:
    """Whether XLA could not time its alternatives; lines are older than such compilations."""
    return line.get("compiled") == ahead.AHEAD


def _preferred(line: dict) -> list[str]:
    """What is tried on the line's device for its number of rows, best first."""
    operation = registry.operations().get(line["op"])
    # a chain is of several operations, each by what is preferred for it
    names = operation.order(line["device"], line["rows"]) if operation else ["default"]
    return [*names, registry.REFERENCE]


def table(rows: list[dict]) -> str:
    """One operation in Markdown."""
    text = ["| " + " | ".join(_TITLES) + " |", "|---" * len(_TITLES) + "|"]
    for row in rows:
        xla, public = row["xla"], row["public"]
        cells = [
            row["case"],
            str(row["rows"]),
            f"{row['bytes'] / 1e6:.2f}",
            # where the host is as slow, the device may be faster
            f"**{'≤ ' if row.get('host_us', 0) > 0.85 * row['us'] else ''}{row['us']:.2f}**",
            f"{row['bandwidth_fraction']:.0%}",
            row["implementation"] + ("" if row["default"] else " (not the default)"),
            row["commit"],
            _other(row, xla, "us") + (" untuned" if xla and untuned(xla) else ""),
            _other(row, public, "peer_us"),
            public["peer"] if public else "",
            f"{row['faster']:.1f}x" if row["faster"] else "",
            ", ".join(f"{line['implementation']} {line['us']:.2f}" for line in row["named"]),
        ]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def _other(row: dict, line: dict | None, name: str) -> str:
    """A time that stands beside a row's, with its commit if that is another."""
    if line is None:
        return ""
    return f"{line[name]:.2f}" + ("" if line["commit"] == row["commit"] else f" ({line['commit']})")


def section(device: str) -> str:
    """All operations in Markdown; empty where nothing was measured."""
    found = ranked(measured(device))
    if not found:
        return ""
    text = [
        "Median microseconds of a call in a CUDA graph of many, weights cold, of what runs by "
        "default for so many rows; `share of copy` is of a large copy's bandwidth in the same "
        "process; `≤` where the host was as slow as the device. `faster` is against the public "
        "kernel, or against XLA where there is none, of the same commit and device alone: times of "
        "another run have their commit in brackets and are compared with nothing, nor is what XLA "
        "compiled before, without the device to tune for (`untuned`). `faster when "
        "named` has the other implementations that took less in the same run. Method in "
        "`bench/kernels.py` and `bench/timing.py`."
    ]
    text += [f"### {op}\n\n{table(rows)}" for op, rows in found.items()]
    return "\n\n".join(text)


def picture(found: dict[str, list[dict]], file: Path) -> None:
    """Per row: our time, XLA's and the public kernel's if of the same run, logarithmically."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(f"{op} {row['case']}", row) for op, own in found.items() for row in own][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.2 * len(rows) + 1.2))
    marks = (("ours", "us", "o"), ("xla", "us", "|"), ("public", "peer_us", "x"))
    for label, name, mark in marks:
        lines = [(row, row if label == "ours" else row[label]) for _, row in rows]
        shown = [
            (line[name], place)
            for place, (row, line) in enumerate(lines)
            if line and line["commit"] == row["commit"]
        ]
        if shown:
            us, places = zip(*shown, strict=True)
            axes.plot(us, places, mark, label=label.replace("xla", "XLA"), markersize=5)
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
    found = ranked(measured(device))
    if not found:
        raise SystemExit(f"{RESULTS / device / 'kernels.jsonl'}: no lines")
    print(section(device))
    file = RESULTS / device / "kernels.png"
    picture(found, file)
    print(f"\npicture: {file}")


if __name__ == "__main__":
    main()
