"""All measured rounds and kernels of a device as tables.

python -m bench.report > bench/results/nvidia-h200/README.md
"""

import argparse
import json

from bench import kernel_table
from bench.roofline import RESULTS, newest, table

COLUMNS = (
    ("batch", "batch"),
    ("context", "context"),
    ("draft", "N"),
    ("tokens_per_round", "tokens/round"),
    ("round_ms", "round ms"),
    ("host_ms", "host ms"),
    ("tokens_per_s_per_user", "tokens/s per user"),
    ("tokens_per_s", "tokens/s"),
    ("floor_ms", "floor ms"),
    ("floor_fraction", "share of floor"),
    ("kernels", "kernels"),
    ("graph_segments", "graph segments"),
    ("compile_s", "compile s"),
    ("commit", "commit"),
)


def rounds(device: str) -> str:
    """Every line of `decode.jsonl` in Markdown."""
    lines = (RESULTS / device / "decode.jsonl").read_text().splitlines()
    rows = ["| " + " | ".join(title for _, title in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for record in map(json.loads, lines):
        rows.append("| " + " | ".join(str(record[key]) for key, _ in COLUMNS) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="nvidia-h200")
    device = parser.parse_args().device
    record = newest(device)
    print(f"# Measured on one {record['device']}\n")
    print("Made by `python -m bench.report` from `decode.jsonl`; method in `bench/decode.py`.\n")
    print("## Rounds\n")
    print(rounds(device))
    print("\n## Where the time goes\n")
    print(table(record))
    print("\n![roofline](roofline.png)")
    if kernels := kernel_table.section(device):
        print(f"\n## Kernels\n\n{kernels}\n\n![kernels](kernels.png)")


if __name__ == "__main__":
    main()
