"""Tokens per second of all users against those of each, beside what public engines publish.

    python -m bench.throughput --device nvidia-h200

Of `decode.jsonl` the newest line of each batch counts that is of the released geometry as stored,
64k tokens of context, N = 3 and shared selection. `results/published.jsonl` has the others'
figures with their sources; none of them was measured here.
"""

import argparse
import json
from pathlib import Path

from bench.record import PLAIN, RESULTS, is_plain


def by_batch(device: str) -> list[dict]:
    """The newest line of each batch, smallest first."""
    found: dict[int, dict] = {}
    for line in map(json.loads, (RESULTS / device / "decode.jsonl").read_text().splitlines()):
        if is_plain(line) and (line["context"], line["draft"]) == (65536, 3):
            found[line["batch"]] = line
    return [found[batch] for batch in sorted(found)]


def published() -> list[dict]:
    """What others say of their engines and this model."""
    return list(map(json.loads, (RESULTS / "published.jsonl").read_text().splitlines()))


def table(device: str) -> str:
    """Ours and theirs in Markdown."""
    rows = [
        "| engine | hardware | users | tokens/s per user | tokens/s | what differs |",
        "|---|---|---|---|---|---|",
    ]
    for line in by_batch(device):
        kv = line["config"].removeprefix(PLAIN)
        rows.append(
            f"| qwen4jax {line['commit']} | 1 x {line['device'].removeprefix('NVIDIA ')} "
            f"| {line['batch']} | **{line['tokens_per_s_per_user']}** | **{line['tokens_per_s']}** "
            f"| {line['tokens_per_round']} tokens per round given; {kv} keys and values |"
        )
    for other in published():
        name = f"[{other['engine']}]({other['source']})"
        rows.append(
            f"| {name} | {other['hardware']} | {other['users']} | {other['per_user']} "
            f"| {other['total']} | {other['differs']} |"
        )
    return "\n".join(rows)


def picture(device: str, file: Path) -> None:
    """A curve over the batches and a point for each of the others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours = by_batch(device)
    figure, axes = plt.subplots(figsize=(8, 5))
    users = [line["tokens_per_s_per_user"] for line in ours]
    total = [line["tokens_per_s"] for line in ours]
    label = f"qwen4jax, one {ours[0]['device']}, by batch"
    axes.plot(users, total, "o-", color="#1f4e8c", label=label)
    for line, x, y in zip(ours, users, total, strict=True):
        axes.annotate(str(line["batch"]), (x, y), xytext=(5, 5), textcoords="offset points")
    for number, other in enumerate(published()):
        axes.plot(other["per_user"], other["total"], "x", color="#8c3b1f")
        axes.annotate(
            f"{other['hardware']}, {other['users']}",
            (other["per_user"], other["total"]),
            # neighbours above and below, or their names would lie on each other
            xytext=(5, 4 if number % 2 else -11),
            textcoords="offset points",
            fontsize=8,
            color="#8c3b1f",
        )
    axes.plot([], [], "x", color="#8c3b1f", label="published: other GPUs and formats, users")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([50, 100, 200, 400, 800], ["50", "100", "200", "400", "800"], minor=False)
    axes.set_yticks([100, 300, 1000, 3000], ["100", "300", "1,000", "3,000"], minor=False)
    axes.minorticks_off()
    axes.margins(0.16)
    axes.set_xlabel("tokens/s per user")
    axes.set_ylabel("tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="nvidia-h200", help="folder under bench/results")
    device = parser.parse_args(argv).device
    print(table(device))
    file = RESULTS / device / "throughput.png"
    picture(device, file)
    print(f"\npicture: {file}")


if __name__ == "__main__":
    main()
