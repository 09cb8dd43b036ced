"""The kernels of a round by place and kind, from XLA's program for it.

    export DUMP_DIR=. PYTHONPATH=.
    python tests/compiled/compile_round.py "NVIDIA H200" share greedy > round.json
    python -m bench.launches --device nvidia-h200 < round.json

writes `launches.json` of the device's results; a test holds that file to the compiled round. No GPU
is needed.
"""

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterable, Sequence

from bench.record import RESULTS

NAME = "launches.json"
# what each layer has, whatever its kind
_LAYER = {"linear_attention": "GDN layer", "qwen_sparse_attention": "QSA layer"}
# scopes of the program, the first that applies
_PLACES = (
    (r"/ple/", "n-gram embedding"),
    (r"/layer(\d+)/", ""),
    (r"/verify/|/accept/", "end of verification"),
    (r"/draft_extend/", "first draft step"),
    (r"/draft_\d+/", "later draft step"),
    (r"/commit/", "commit"),
)


def launches(
    kernels: Iterable[tuple[str, str]], layer_types: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Place -> kind of kernel -> launches, of a layer or a draft step where there are several.

    Args:
        kernels: (scope, name) of each in a round with an n-gram layer and a draft head.
        layer_types: of its layers.

    Raises:
        ValueError: two layers of a kind, or two later draft steps, have other kernels.
    """
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seen: dict[str, set[str]] = collections.defaultdict(set)
    for scope, kernel in kernels:
        place, one = _place(scope, layer_types)
        # what stands behind the kind are sizes
        found[place][re.sub(r"_\d+(x\d+)*(__\d+)?$", "", kernel)] += 1
        seen[place].add(one)
    counts = {}
    for place in ("GDN layer", "QSA layer", *(name for _, name in _PLACES if name)):
        number = len(seen[place])
        odd = [kind for kind, total in found[place].items() if total % number]
        if odd:
            raise ValueError(f"{place}: {odd} are not in each of {sorted(seen[place])}")
        counts[place] = {kind: total // number for kind, total in found[place].items()}
    return counts


def _place(scope: str, layer_types: Sequence[str]) -> tuple[str, str]:
    """(place, which of those alike) of a kernel."""
    for pattern, name in _PLACES:
        if match := re.search(pattern, scope):
            if name:
                return name, match.group() if name == "later draft step" else ""
            return _LAYER[layer_types[int(match.group(1))]], match.group()
    raise ValueError(f"{scope}: no place of a round")


def table(counts: dict[str, dict[str, int]]) -> str:
    """The launches in Markdown, in the order of the program."""
    rows = ["| place | launches | kernels |", "|---|---|---|"]
    for place, kinds in counts.items():
        names = ", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in kinds.items())
        rows.append(f"| {place} | {sum(kinds.values())} | {names} |")
    return "\n".join(rows)


def section(device: str) -> str:
    """What is known of a device's rounds; empty where nothing is."""
    file = RESULTS / device / NAME
    if not file.exists():
        return ""
    counts = json.loads(file.read_text())
    each = {place: sum(kinds.values()) for place, kinds in counts.items()}
    # the released model: 36 and 12 layers, N = 3
    times = {"GDN layer": 36, "QSA layer": 12, "later draft step": 2}
    total = sum(n * times.get(place, 1) for place, n in each.items())
    return (
        "A layer's, or a draft step's, at batch 1, N = 3 and shared selection, from the round that "
        "`tests/compiled` compiles without a device, which holds this table to it. Of the released "
        f"model's round they are {total} launches, all in one CUDA graph; what a round above has "
        f"beyond them are XLA's own small ones.\n\n{table(counts)}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="nvidia-h200", help="folder under bench/results")
    device = parser.parse_args(argv).device
    found = json.load(sys.stdin)
    counts = launches(found["triton"], found["layer_types"])
    (RESULTS / device / NAME).write_text(json.dumps(counts, indent=1) + "\n")
    print(table(counts))


if __name__ == "__main__":
    main()
