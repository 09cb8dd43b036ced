"""Where a round's time goes against the bytes it must move: a table and a picture.

    python -m bench.roofline                 # the newest measured line of batch 1, 64k, N = 3
    python -m bench.roofline --floor-only    # design arithmetic alone, no measurement

The floor of a part is its bytes over 4.3 TB/s, the rate at which a long kernel reads on an H200;
the measured time of a part is the sum of its kernels' durations in a profile of the round.
"""

import argparse
import json
from pathlib import Path

from bench.parts import READ_BANDWIDTH, Part, floor_parts
from bench.record import RESULTS, is_plain
from qwen4jax.config import Config, Quantization


def losses(record: dict) -> list[tuple[str, float, float]]:
    """(part, measured ms, floor ms) of a result line, largest loss first."""
    names = set(record["parts_ms"]) | set(record["floor_parts_ms"])
    rows = [
        (n, record["parts_ms"].get(n, 0.0), record["floor_parts_ms"].get(n, 0.0)) for n in names
    ]
    # what is printed alike stands in the order of names: a set has none
    return sorted(rows, key=lambda row: (round(row[2] - row[1], 3), row[0]))


def table(record: dict) -> str:
    """The ranked table in Markdown."""
    lines = [
        f"{record['config']}, batch {record['batch']}, context {record['context']}, "
        f"N = {record['draft']}, {record['tokens_per_round']} tokens per round, "
        f"{record['device']}, commit {record['commit']}:",
        "",
        "| part | measured ms | floor ms | loss ms | share of floor |",
        "|---|---|---|---|---|",
    ]
    for name, measured, floor in losses(record):
        share = f"{floor / measured:.0%}" if measured else ""
        lines.append(
            f"| {name} | {measured:.3f} | {floor:.3f} | {measured - floor:.3f} | {share} |"
        )
    total = sum(record["parts_ms"].values())
    lines += [
        f"| **kernels** | **{total:.2f}** | **{record['floor_ms']:.2f}** | | |",
        f"| **round (wall)** | **{record['round_ms']:.2f}** | | | "
        f"**{record['floor_fraction']:.0%}** |",
    ]
    return "\n".join(lines)


def floor_table(parts: list[Part]) -> str:
    """The byte budget in Markdown."""
    lines = [f"| part | GB | ms at {READ_BANDWIDTH / 1e12:.1f} TB/s |", "|---|---|---|"]
    for phase in ("verify", "commit", "draft"):
        own = [p for p in parts if p.phase == phase]
        lines += [f"| {p.name} | {p.nbytes / 1e9:.2f} | {p.floor_ms:.3f} |" for p in own]
        nbytes, ms = sum(p.nbytes for p in own), sum(p.floor_ms for p in own)
        lines.append(f"| **{phase}** | **{nbytes / 1e9:.2f}** | **{ms:.2f}** |")
    lines.append(f"| **round** | | **{sum(p.floor_ms for p in parts):.2f}** |")
    return "\n".join(lines)


def picture(record: dict, file: Path) -> None:
    """Bars of measured time and floor per part, largest loss on top."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = losses(record)[::-1]
    names = [r[0] for r in rows]
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(rows) + 1.4))
    axes.barh(names, [r[1] for r in rows], color="#c9d6e8", label="measured (kernels)")
    axes.barh(names, [r[2] for r in rows], color="#1f4e8c", height=0.45, label="byte floor")
    axes.set_xlabel("ms per round")
    axes.set_title(
        f"batch {record['batch']}, {record['context'] // 1024}k context, N = {record['draft']}: "
        f"{record['round_ms']:.1f} ms, floor {record['floor_ms']:.1f} ms",
        fontsize=10,
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def newest(device: str, batch: int = 1, context: int = 65536, draft: int = 3) -> dict:
    """The last line of a device for rounds of these sizes that `is_plain`, with parts."""
    sizes = dict(batch=batch, context=context, draft=draft)
    lines = (RESULTS / device / "decode.jsonl").read_text().splitlines()
    measured = [
        r
        for r in map(json.loads, lines)
        if r["parts_ms"] and is_plain(r) and all(r[name] == n for name, n in sizes.items())
    ]
    if not measured:
        raise SystemExit(
            f"{RESULTS / device / 'decode.jsonl'}: no line of {sizes} has measured parts"
        )
    return measured[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="nvidia-h200", help="folder under bench/results")
    parser.add_argument("--floor-only", action="store_true")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--draft", type=int, default=3)
    args = parser.parse_args()
    if args.floor_only:
        config = Config.flash_next(
            quantization=Quantization(experts="nvfp4", ngram_embedding="fp8")
        )
        parts = floor_parts(config, batch=args.batch, context=args.context, drafts=args.draft)
        print(floor_table(parts))
        return
    record = newest(args.device, args.batch, args.context, args.draft)
    print(table(record))
    file = RESULTS / args.device / "roofline.png"
    picture(record, file)
    print(f"\npicture: {file}")


if __name__ == "__main__":
    main()
