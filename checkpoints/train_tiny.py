"""Train the model of `checkpoints/tiny`: `python checkpoints/train_tiny.py RUN --text DIR`.

RUN is the folder of the run; a run that was stopped, or killed, goes on from its last checkpoint
with the same command. `--fit MINUTES` times a few steps first and plans as many as fit.
`--export DIR` writes the weights in Hugging Face's layout at the end, or when time is up (exit
code 3). The text comes from `checkpoints/tiny_text.py`.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # run by its path: in this folder an inspect.py hides Python's own
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import dataclasses
import json
import math
import shutil
import time
from pathlib import Path

import jax

from checkpoints.tiny_tokenizer import FILES
from qwen4jax.config import LINEAR, SPARSE, Config, Quantization, RopeParameters
from qwen4jax.train.loop import Schedule, Trainer
from qwen4jax.train.recipe import Phase, Recipe
from qwen4jax.train.step import exported
from qwen4jax.weights.save import save

LABEL = "tiny (trained on Python's standard library)"


def config() -> Config:
    """The released architecture's ratios at a hidden size of 192; every mechanism is there."""
    return Config(
        vocab_size=4096,
        hidden_size=192,
        num_hidden_layers=8,
        layer_types=(LINEAR, LINEAR, LINEAR, SPARSE) * 2,
        max_position_embeddings=16384,
        eos_token_id=0,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters=RopeParameters(mrope_section=(3, 3, 2)),
        indexer_n_heads=4,
        indexer_head_dim=32,
        indexer_budget=256,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        hc_lowrank=32,
        ple_embed_dim=192,
        heads_per_ngram=8,
        ngram_vocab_size_base=12_500,
        split_ngram_parts=4,
        quantization=Quantization(ngram_embedding="fp8"),
    )


def recipe(*, dense: bool = False, batch: int = 16, seed: int = 0) -> Recipe:
    """The shipped model's recipe, or that of its dense counterpart.

    The indexers look on while attention is dense; then the hard selection decides; the last phase
    has contexts of which a query reads a thirtieth.
    """
    weight = 0.0 if dense else 1.0
    phases = (
        Phase(0.1, 2048, batch, dense=True, indexer_weight=weight),
        Phase(0.88, 2048, batch, dense=dense, indexer_weight=weight),
        Phase(1.0, 8192, max(1, batch // 4), dense=dense, indexer_weight=weight),
    )
    return Recipe(phases, seed=seed)


def smoke(of: Recipe) -> tuple[Config, Recipe]:
    """A model and a recipe for minutes on a CPU."""
    small = Config.tiny(
        vocab_size=4096, eos_token_id=0, quantization=Quantization(ngram_embedding="fp8")
    )
    shapes = ((128, 8), (128, 8), (256, 4))
    phases = tuple(
        dataclasses.replace(p, length=length, batch=batch)
        for p, (length, batch) in zip(of.phases, shapes, strict=True)
    )
    return small, dataclasses.replace(of, phases=phases, learning_rate=1e-2)


def export(trainer: Trainer, state, directory: Path) -> None:
    """Writes the weights, the tokenizer's files, and what was trained on what."""
    save(exported(state.masters, trainer.config), directory, label=LABEL, overwrite=True)
    for name in FILES:
        shutil.copyfile(trainer.text / name, directory / name)
    kept = {"plan.json": trainer.folder, "log.jsonl": trainer.folder, "text.json": trainer.text}
    for name, folder in kept.items():
        shutil.copyfile(folder / name, directory / name)


def main(arguments: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--text", type=Path, required=True, help="folder of tiny_text.py")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="of the whole run")
    length.add_argument("--fit", type=float, metavar="MINUTES", help="plan what fits from now on")
    parser.add_argument(
        "--stop-at", type=int, metavar="STEP", help="end there, export all the same"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="save and stop after these")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 2,048 tokens per step")
    parser.add_argument("--dense", action="store_true", help="dense attention, no indexer")
    parser.add_argument("--smoke", action="store_true", help="a smaller model, for a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    model, how = config(), recipe(dense=options.dense, batch=options.batch, seed=options.seed)
    if options.smoke:
        model, how = smoke(how)
    note = lambda line: print(line, flush=True)  # noqa: E731
    note(f"{jax.devices()[0].device_kind}: compiling")
    trainer = Trainer(model, how, options.text, options.run)
    steps = options.steps
    if steps is None and not (options.run / "plan.json").exists():
        trainer.wait()
        spent = time.monotonic() - began
        note(f"compiled after {spent:.1f} s")
        # a twentieth for measurements and checkpoints, and what the timing itself takes
        steps = trainer.steps_that_fit(0.93 * (options.fit * 60 - spent) - 10)
        note(f"{steps} steps fit, {time.monotonic() - began:.1f} s are gone")
    every = max(1, (steps or 1) // 25)
    schedule = Schedule(steps or 1, evaluate_every=every, save_every=max(1, (steps or 1) // 4))
    seconds = 60 * options.minutes - (time.monotonic() - began)
    state, complete = trainer.run(schedule, stop_at=options.stop_at, seconds=seconds, note=note)
    if options.export is not None:
        export(trainer, state, options.export)
        sizes = {f.name: f.stat().st_size for f in sorted(options.export.iterdir())}
        note(json.dumps(sizes))
    note(f"{time.monotonic() - began:.1f} s in all")
    # weights of a run that is not complete are exported, but nobody shall take them for the others
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
