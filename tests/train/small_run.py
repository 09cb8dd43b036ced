"""A training run of seconds: `python -m tests.train.small_run RUN TEXT`, and the text for it.

The text is bytes of Python's own library, so that no tokenizer takes part.
"""

import json
import sys
import sysconfig
from pathlib import Path

import numpy as np

from qwen4jax.config import LINEAR, SPARSE, Config
from qwen4jax.train.loop import Schedule, Trainer
from qwen4jax.train.recipe import Phase, Recipe
from qwen4jax.train.step import TrainState

STEPS, EVERY = 48, 12
CONFIG = Config.tiny(
    vocab_size=256,
    num_experts=8,
    eos_token_id=0,
    num_hidden_layers=2,
    layer_types=(LINEAR, SPARSE),
    ple_layer_ids=(1,),
)
# all of one shape, of which compiling is most: dense first, then the hard selection
LENGTH, BATCH = 64, 8
PHASES = Phase(0.25, LENGTH, BATCH, dense=True), Phase(1.0, LENGTH, BATCH)
RECIPE = Recipe(PHASES, learning_rate=1e-2, drafts=2)


def write_text(folder: Path) -> float:
    """Writes a text; returns the bits per byte of each held-out byte's own frequency."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("[a-j]*.py"))[:60]
    data = np.frombuffer(b"\0".join(f.read_bytes() for f in files), np.uint8).astype(np.int32)
    parts = {"train": data[:-20_000], "heldout": data[-20_000:]}
    folder.mkdir(parents=True)
    for name, ids in parts.items():
        np.save(folder / f"{name}.npy", ids)
    facts = {name: {"bytes": len(ids), "tokens": len(ids)} for name, ids in parts.items()}
    (folder / "text.json").write_text(json.dumps(facts))
    counts = np.bincount(parts["train"], minlength=256) + 1
    return float(-np.log2(counts / counts.sum())[parts["heldout"]].mean())


def train(folder: Path, text: Path, stop_at: int | None = None) -> TrainState:
    """Trains to the end, or goes on to it."""
    schedule = Schedule(STEPS, evaluate_every=EVERY, evaluate_batches=2, save_every=EVERY)
    note = lambda line: print(line, flush=True)  # noqa: E731
    return Trainer(CONFIG, RECIPE, text, folder).run(schedule, stop_at=stop_at, note=note)[0]


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
