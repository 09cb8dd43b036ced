"""What the trained model makes of held-out text: sparse attention against dense, and yardsticks.

    python -m bench.heldout --text build/tiny --out bench/results/cpu

Windows of the held-out ids, one beside the other, through the trainer's forward pass (equal to
decoding's, `tests/train`) in float32: once with the indexers' hard selection and once with the same
weights attending to everything before a query. The difference is paired, token by token; its
standard error is over windows. Bits per byte count the bytes of a mean held-out token. The
yardsticks (each token's own frequency, xz alone and after the training text) are those of
`text.json`.
"""

import argparse
import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.acceptance import TINY
from qwen4jax import load
from qwen4jax.params import Params
from qwen4jax.train.forward import main_streams, read_out
from qwen4jax.train.head import token_nats
from qwen4jax.train.windows import bytes_per_token, held_out_windows

NAME = "heldout.jsonl"


@jax.jit
def nats_of(params: Params, window: jax.Array, dense: jax.Array) -> jax.Array:
    """Mean nats of every token but the first, by row."""
    streams, _ = main_streams(params, window[:, :-1], dense=dense)
    head = params.embed_tokens if params.lm_head is None else params.lm_head
    return jnp.mean(token_nats(read_out(params, streams), head, window[:, 1:])[0], axis=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Held-out loss, sparse and dense.")
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--text", type=Path, required=True, help="folder of tiny_text.py")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--out", help="folder of results")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    params = load(options.model, dtype="float32", progress=False)
    batches = held_out_windows(
        options.text / "heldout.npy",
        length=options.length + 1,
        batch=2,
        batches=options.windows // 2,
        stride=options.length,
    )
    found = {}
    for name, dense in (("sparse", False), ("dense", True)):
        each = [nats_of(params, jnp.asarray(b), jnp.asarray(dense)) for b in batches]
        found[name] = np.concatenate(each).astype(np.float64)
    per_byte = 1 / math.log(2) / bytes_per_token(options.text, "heldout")
    change = (found["sparse"] - found["dense"]) / found["dense"].mean()
    line = {
        "length": options.length,
        "windows": len(change),
        "tokens": len(change) * options.length,
        "nats_per_token": {name: round(x.mean(), 5) for name, x in found.items()},
        "bits_per_byte": {name: round(x.mean() * per_byte, 5) for name, x in found.items()},
        "sparse_above_dense": round(change.mean(), 5),
        "standard_error": round(change.std(ddof=1) / math.sqrt(len(change)), 5),
        "yardsticks": json.loads((options.text / "text.json").read_text())["bits_per_byte"],
        "seconds": round(time.monotonic() - began, 1),
    }
    line |= record.stamp()
    print(json.dumps(line))
    record.append([line], NAME, options.out)


if __name__ == "__main__":
    main()
