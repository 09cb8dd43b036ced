"""Write a small checkpoint of random weights: `python checkpoints/random_tiny.py DIR`.

It has every mechanism of the model and knows nothing: a stand-in to try the commands with.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # run by its path: in this folder an inspect.py hides Python's own
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import json
from pathlib import Path

from qwen4jax.config import LINEAR, SPARSE, Config
from qwen4jax.params import init_params
from qwen4jax.weights.save import save

LABEL = "random-tiny (random weights)"


def config() -> Config:
    """The tiny model, two groups of layers deep."""
    return Config.tiny(
        num_hidden_layers=8,
        layer_types=(LINEAR, LINEAR, LINEAR, SPARSE) * 2,
        dtype="bfloat16",
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a small checkpoint of random weights.")
    parser.add_argument("directory", type=Path, help="an earlier one that stands there is replaced")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    path = options.directory.absolute()
    save(init_params(config(), options.seed), path, label=LABEL, overwrite=_is_ours(path))
    print(f"wrote {path}: random weights, seed {options.seed}")


def _is_ours(path: Path) -> bool:
    """Whether `path` is what an earlier run wrote."""
    file = path / "config.json"
    return file.exists() and json.loads(file.read_text()).get("_name_or_path") == LABEL


if __name__ == "__main__":
    main()
