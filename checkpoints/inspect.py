"""Print what a checkpoint directory holds and whether it loads, from headers alone.

`python checkpoints/inspect.py DIR`; the exit status is 1 if it does not load.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # run by its path: in this folder this very file hides Python's own `inspect`
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import collections
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from qwen4jax.config import SPARSE
from qwen4jax.hf_fields import ConfigError
from qwen4jax.params import count_parameters
from qwen4jax.weights.checkpoint import Survey, survey
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.names import MTP, VISION
from qwen4jax.weights.safetensors import Entry

_PARTS = (
    (re.compile(re.escape(VISION)), "vision (skipped)"),
    (re.compile(rf"{re.escape(MTP)}.*\.mlp\.experts\."), "draft head, routed experts"),
    (re.compile(re.escape(MTP)), "draft head, the rest"),
    (re.compile(r".*\.mlp\.experts\."), "routed experts"),
    (re.compile(r".*\.ple\.ple_embedding\."), "n-gram tables"),
    (re.compile(r".*embed_tokens\.|lm_head\."), "embedding and head"),
)
_REST = "everything else"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print what a checkpoint directory holds.")
    parser.add_argument("directory", type=Path)
    path = parser.parse_args(arguments).directory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = survey(path)
        except (CheckpointError, ConfigError) as e:
            print(f"{e}\n\ndoes not load")
            return 1
    print("\n".join(describe(found, [str(w.message) for w in caught])))
    return 1 if found.problems else 0


def describe(found: Survey, warned: list[str]) -> Iterator[str]:
    """The report, line by line."""
    c, entries = found.config, found.directory.entries
    sparse = sum(kind == SPARSE for kind in c.layer_types)
    q = c.quantization

    def form(stored: str) -> str:
        return "plain" if stored == "bf16" else stored

    yield f"{found.directory.path}"
    yield f"  files        {len(found.directory.files)}, {len(entries)} tensors"
    yield f"  layers       {c.num_hidden_layers}, {sparse} of them sparse attention"
    yield f"  hidden size  {c.hidden_size} in {c.hc_count} streams"
    yield f"  vocabulary   {c.vocab_size}"
    yield f"  experts      {c.num_experts}, {c.num_experts_per_tok} per token, {form(q.experts)}"
    plural = "s" if len(c.ple_layer_ids) > 1 else ""
    tables = f"{len(c.ple_layer_ids)} table{plural}, {form(q.ngram_embedding)}"
    yield f"  n-gram       {tables if c.ple_layer_ids else 'none'}"
    draft = f"{c.mtp_num_hidden_layers} layer, experts {form(q.mtp_experts)}"
    yield f"  draft head   {draft if c.mtp_num_hidden_layers else 'none'}"
    yield f"  parameters   {count_parameters(found.declared):,} in the configured model"
    yield f"  dtype        {c.dtype}, names begin with {found.naming.prefix!r}"
    yield ""
    yield f"  {'part':28} {'tensors':>8} {'bytes':>17}  dtypes"
    for part, members in _by_part(entries).items():
        size = sum(e.nbytes for e in members)
        dtypes = collections.Counter(e.dtype for e in members)
        kinds = ", ".join(f"{label} {n}" for label, n in dtypes.most_common())
        yield f"  {part:28} {len(members):>8,} {size:>17,}  {kinds}"
    yield f"  {'all':28} {len(entries):>8,} {sum(e.nbytes for e in entries.values()):>17,}"
    yield ""
    yield from (f"  note: {note}" for note in (*warned, *found.notes))
    yield from (f"  problem: {problem}" for problem in found.problems)
    yield "does not load" if found.problems else "loads"


def _by_part(entries: dict[str, Entry]) -> dict[str, list[Entry]]:
    parts: dict[str, list[Entry]] = {name: [] for _, name in _PARTS} | {_REST: []}
    for name, entry in entries.items():
        part = next((label for pattern, label in _PARTS if pattern.match(name)), _REST)
        parts[part].append(entry)
    return {label: members for label, members in parts.items() if members}


if __name__ == "__main__":
    sys.exit(main())
