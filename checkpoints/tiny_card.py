"""Write what stands beside the tiny model's weights: log, curves, held-out prompts, manifest.

`python checkpoints/tiny_card.py --run RUN --dense RUN --text DIR`: the runs are what
`checkpoints/train_tiny.py --export` wrote, the text is that of `checkpoints/tiny_text.py`.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # run by its path: in this folder an inspect.py hides Python's own
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

TINY = Path(__file__).resolve().parent / "tiny"
# steps between those that are kept of a log, besides every held-out measurement
KEPT = 16
# prompts, and the characters of each: more tokens than an indexer may select
PROMPTS, CHARACTERS = 10, 2000
HASHED = ("model.safetensors", "config.json", "tokenizer.json", "heldout.jsonl")


def thinned(file: Path) -> list[dict[str, Any]]:
    """Held-out measurements and every `KEPT`-th step, numbers to five places."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [_rounded(x) for x in lines if "heldout" in x or x["step"] % KEPT in (0, 1)]


def held_out_prompts(text: Path) -> list[str]:
    """Beginnings of lines and what follows them, from documents spread over the held-out ids."""
    ids = np.load(text / "heldout.npy")
    tokenizer = tokenizers.Tokenizer.from_file(str(text / "tokenizer.json"))
    ends = np.nonzero(ids == tokenizer.token_to_id("<|endoftext|>"))[0]
    whole = [tokenizer.decode(d.tolist()) for d in np.split(ids, ends)]
    long = [d for d in whole if len(d) >= 3 * CHARACTERS]
    chosen = [long[i] for i in np.linspace(0, len(long) - 1, PROMPTS).astype(int)]
    starts = [d.index("\n", len(d) // 3) + 1 for d in chosen]
    return [d[s : s + CHARACTERS] for d, s in zip(chosen, starts, strict=True)]


def draw(main: list[dict], dense: list[dict], yardsticks: dict[str, float], file: Path) -> None:
    """The curves of a run beside its dense counterpart."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [x for x in main if "heldout" not in x]
    held, other = ([x for x in run if "heldout" in x] for run in (main, dense))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    at = lambda lines: [x["step"] for x in lines]  # noqa: E731
    of = lambda lines, name: [x["heldout"][name] for x in lines]  # noqa: E731
    loss, accepted, index = axes
    loss.plot(at(steps), [x["bits_per_byte"] for x in steps], color="0.8", label="training")
    loss.plot(at(held), of(held, "bits_per_byte"), color="C0", label="held out")
    loss.plot(at(other), of(other, "bits_per_byte"), "C1--", label="held out, dense attention")
    for (name, value), style in zip(yardsticks.items(), (":", "-.", "--"), strict=True):
        loss.axhline(value, color="0.5", linewidth=0.8, linestyle=style)
        loss.text(at(steps)[-1], value + 0.02, name.replace("_", " "), ha="right", fontsize=8)
    loss.set(title="bits per byte", xlabel="step", ylim=(0.6, 3.2))
    for number in range(len(held[0]["heldout"]["accepted"])):
        shares = [x[number] for x in of(held, "accepted")]
        accepted.plot(at(held), shares, label=f"{number + 1} draft" + "s" * (number > 0))
    accepted.set(title="chains accepted (teacher forced)", xlabel="step", ylim=(0, 1))
    index.plot(at(held), of(held, "index_overlap"), label="dense attention's best blocks selected")
    index.plot(at(held), of(held, "index_captured"), label="attention mass selected")
    index.plot(
        at(held), [x / 16 for x in of(held, "largest_load")], "0.6", label="largest expert's load"
    )
    index.set(title="indexer and router", xlabel="step", ylim=(0, 1))
    ends = [next(x["step"] for x in steps if x["phase"] == p) for p in (1, 2)]
    for axis in axes:
        axis.grid(alpha=0.2)
        axis.legend(fontsize=8)
        for end in ends:
            axis.axvline(end, color="0.7", linewidth=0.6)
    figure.savefig(file, dpi=90)
    plt.close(figure)


def manifest(text: Path) -> dict[str, Any]:
    """The text's manifest, and the hashes of the files that make the model."""
    files = {name: hashlib.sha256((TINY / name).read_bytes()).hexdigest() for name in HASHED}
    return {"files": files, "text": json.loads((text / "text.json").read_text())}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the files beside the tiny model.")
    parser.add_argument("--run", type=Path, required=True, help="export of the model's run")
    parser.add_argument("--dense", type=Path, required=True, help="export of its counterpart")
    parser.add_argument("--text", type=Path, required=True, help="folder of tiny_text.py")
    options = parser.parse_args(arguments)
    runs = {"log": options.run, "dense-log": options.dense}
    logs = {name: thinned(run / "log.jsonl") for name, run in runs.items()}
    for name, lines in logs.items():
        _write_lines(TINY / f"{name}.jsonl", lines)
    prompts = held_out_prompts(options.text)
    _write_lines(TINY / "heldout.jsonl", [{"text": text} for text in prompts])
    made = manifest(options.text)
    (TINY / "manifest.json").write_text(json.dumps(made, indent=1) + "\n")
    plan = json.loads((options.run / "plan.json").read_text())
    (TINY / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
    draw(logs["log"], logs["dense-log"], made["text"]["bits_per_byte"], TINY / "curves.png")
    sizes = {f.name: f.stat().st_size for f in sorted(TINY.iterdir())}
    print(json.dumps(sizes), sum(sizes.values()))


if __name__ == "__main__":
    main()
