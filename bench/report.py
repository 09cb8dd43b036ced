"""All measured rounds and kernels of a device as tables.

python -m bench.report > bench/results/nvidia-h200/README.md
"""

import argparse
import json

from bench import ahead, kernel_table, launches, throughput
from bench.record import RESULTS
from bench.roofline import newest, table

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

ABOUT = (
    "Made by `python -m bench.report` from `decode.jsonl`; method in `bench/decode.py`.\n\n"
    "The rounds are of the released geometry with random weights, their acceptance given. Unless "
    "the last column says otherwise they are greedy, and the n-gram table is a stand-in of 3.2 GB "
    "on the device (`bytes_table`); the released one has 51 GB. The column says, too, how later "
    "draft steps select tokens: most lines are of `share`, while a `Config` says `fresh` unless "
    "told otherwise. `compiled=ahead`: on a machine without a GPU (`bench/ahead.py`), of which the "
    "seconds of compilation are.\n\n"
    "The lines of `prefill.jsonl` are by a script that is not in the repository, at the commits "
    "that they name; `bench.prefill`, which does the same, was not yet run on a device."
)
THROUGHPUT = (
    "The newest line of each batch at 64k tokens of context, N = 3, beside what public engines "
    "publish of the same model. No figure of another engine was measured here: hardware, formats, "
    "text and acceptance differ, as the last column says."
)
TUNING = (
    "`tuning.jsonl` has what tiles were chosen by: runs of the kernels of their commit with other"
    " constants. Names of projections: m0 weights left, m1 tokens left; n outputs, k inputs, w "
    "warps and s stages of a program. Of experts: g and d steps ahead of gate/up and down, c "
    "columns of the sum; `packed` reads as many bytes in the order of the tiles, so that its time"
    " tells and its result does not (error 9.99). Of the commit: k rows of a state and w warps of"
    " a program. Projections are since cut as v_m0n16k256w1s5, the selection as v_warps8, the "
    "commit as v_k32_w8; experts' weights are packed where v_packed tells why. Experts from 9 "
    "tokens on ask ahead as v_g2_d3; the boundary is v_few_asks up to 8 rows and v_many_quiet "
    "above, from 17 rows on as v_many_apart. Since then: bf16 experts as v_b_a4win, the commit as "
    "v_128_16, the boundary of up to 8 rows in one launch, projections of 33 to 128 rows in "
    "tiles of their own. Lines of d752f55 call today's `triton` of the boundary `triton_many`. Of "
    "29f4491 on, attention, scoring and selection: `v_before` is what they were in the same run, "
    "`v_a`, `v_c128` and `v_g` with a number other merges, `v_s` and `v_l` other tiles and loops "
    "of scoring; `triton` of 702a5b3 is the attention of today but for its merge. What won "
    "nowhere is what was tried against the defaults of its date.\n\n"
    "`choices.jsonl` has rounds of 46c1bc5 at batch 1 with named implementations, what is too "
    "short to be timed alone: with the router in one launch a round takes 8.20 ms, in two 8.34; "
    "with the boundary as v_few_asks 8.18, as v_many_quiet 8.26 and 106 kernels more. Of d70c843: "
    "with the boundary in one launch 7.63, in two 7.73.\n\n"
    "`peers.jsonl` has what `.peers/scripts/bench_peers.py` timed of the public kernels of the "
    "residual, Gated DeltaNet and the experts, on the machine and in the lease of the rounds of "
    "bcc2444; our kernels of that lease are the profiles of those rounds. Its later lines, from "
    "the second of Gated DeltaNet on, are of a lease just before that of the rounds of 8b78c1a, "
    "with the experts of 32 and 8,192 rows added. Lines of `kernels.jsonl` from 5fd66dd on are "
    "of graphs in a loop: before, calls of under about 30 us waited for the "
    "host, and are slower there than they were."
)


def _stored(config: str) -> str:
    """What of a line's configuration says how drafts select and what is stored how."""
    told = ("index_share=", "kv=", "draft_weights=", "draft_vocab=", "live=", "table")
    return " ".join(part for part in config.split() if part.startswith(told))


def _mode(record: dict) -> list[str]:
    """How a line's rounds sampled, if not greedily as those of lines that are older than modes."""
    mode = record.get("mode", "greedy")
    return [] if mode == "greedy" else [f"mode={mode}"]


def _ahead(record: dict) -> list[str]:
    """Whether a line's seconds of compilation are another machine's; lines are older than that."""
    return ["compiled=ahead"] if record.get("compiled") == ahead.AHEAD else []


def rounds(device: str) -> str:
    """Every line of `decode.jsonl` in Markdown."""
    lines = (RESULTS / device / "decode.jsonl").read_text().splitlines()
    titles = [*(title for _, title in COLUMNS), "drafts' selection, stored"]
    rows = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for record in map(json.loads, lines):
        # a run without a profile knows no number of kernels
        values = ("" if record[key] is None else str(record[key]) for key, _ in COLUMNS)
        cells = [*values, " ".join([_stored(record["config"]), *_mode(record), *_ahead(record)])]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def measured_runs(device: str) -> dict[tuple, list[dict]]:
    """(config, batch, context, drafts, mode) -> lines with parts resolved, oldest first."""
    found: dict[tuple, list[dict]] = {}
    for record in map(json.loads, (RESULTS / device / "decode.jsonl").read_text().splitlines()):
        if record["parts_ms"]:
            sizes = tuple(record[name] for name in ("config", "batch", "context", "draft"))
            found.setdefault((*sizes, *_mode(record)), []).append(record)
    return found


def progress(lines: list[dict]) -> str:
    """The parts of the first line that has the newest's configuration, and of the newest."""
    first, last = lines[0], lines[-1]
    names = dict.fromkeys([*first["parts_ms"], *last["parts_ms"]])
    rows = [
        f"| part | ms at {first['commit']} | ms at {last['commit']} | floor ms |",
        "|---|---|---|---|",
    ]
    for name in sorted(names, key=lambda n: -first["parts_ms"].get(n, 0.0)):
        before, after, floor = (
            f"{of[name]:.3f}" if name in of else ""
            for of in (first["parts_ms"], last["parts_ms"], last["floor_parts_ms"])
        )
        rows.append(f"| {name} | {before} | {after} | {floor} |")
    rows.append(
        f"| **round (wall)** | **{first['round_ms']:.2f}** | **{last['round_ms']:.2f}** "
        f"| **{last['floor_ms']:.2f}** |"
    )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="nvidia-h200")
    device = parser.parse_args().device
    record = newest(device)
    print(f"# Measured on one {record['device']}\n")
    print(ABOUT)
    print("\n## Rounds\n")
    print(rounds(device))
    print("\n## Throughput\n")
    print(THROUGHPUT)
    print(f"\n{throughput.table(device)}\n\n![throughput](throughput.png)")
    if kernels := launches.section(device):
        print(f"\n## Launches\n\n{kernels}")
    print("\n## Where the time goes\n")
    print(table(record))
    print("\n![roofline](roofline.png)")
    for lines in measured_runs(device).values():
        last = lines[-1]
        title = ", ".join([f"Batch {last['batch']}", f"N = {last['draft']}", *_mode(last)])
        if len(lines) > 1:
            print(f"\n### {title}: progress\n")
            print(progress(lines))
        if last != record:
            print(f"\n### {title}\n")
            print(table(last))
    if kernels := kernel_table.section(device):
        print(f"\n## Kernels\n\n{kernels}\n\n![kernels](kernels.png)")
    if (RESULTS / device / "tuning.jsonl").exists():
        print(f"\n{TUNING}")


if __name__ == "__main__":
    main()
