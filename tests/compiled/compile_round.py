"""Compiles the speculative round for a GPU that is not there and describes the program.

Run in a process of its own: `python compile_round.py KIND INDEX_SHARE MODE`, with KIND of
`bench/targets.py`, MODE `greedy` or `server`, and XLA_FLAGS dumping to DUMP_DIR. Prints one JSON
object.
"""

import collections
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.targets import place_on
from qwen4jax.ablation import Ablation
from qwen4jax.config import LINEAR, SPARSE, Config, Quantization
from qwen4jax.decode.burst import empty
from qwen4jax.decode.round import next_round
from qwen4jax.decode.stopping import Controls
from qwen4jax.pallas import registry
from qwen4jax.params import declare
from qwen4jax.serve.model import every_option
from qwen4jax.state import abstract_state
from qwen4jax.weights.arrange import tiled


def main(kind: str, index_share: str, mode: str) -> None:
    here = place_on(kind)
    # released widths, so that XLA's choices are the real ones; fewer layers, experts and ids
    config = Config.flash_next(
        num_hidden_layers=4,
        layer_types=(LINEAR, LINEAR, LINEAR, SPARSE),
        num_experts=64,
        # in the server's mode more than the candidates' groups hold
        vocab_size=8192 if mode == "greedy" else 20480,
        eos_token_id=0,
        ngram_vocab_size_base=10_000,
        quantization=Quantization(experts="nvfp4", ngram_embedding="fp8"),
        ablation=Ablation(index_share=index_share),
    )
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)  # noqa: E731
    # in the order that `load` gives the experts on a GPU
    params = jax.tree.map(place, jax.eval_shape(tiled, jax.tree.map(place, declare(config))))
    state = jax.tree.map(place, abstract_state(config, slots=1, max_length=16384, drafts=3))
    controls = Controls(max_length=jnp.zeros(1, jnp.int32), stop_ids=jnp.zeros((1, 4), jnp.int32))
    asked: dict[str, Any] = {}
    if mode == "server":
        controls, asked = every_option(config.vocab_size), dict(logprobs=True, top=5)
    controls = jax.tree.map(place, controls)
    active = place(jnp.zeros(1, bool))
    room = jax.tree.map(place, empty(1, 3, **asked))
    with registry.using(device=kind):
        compiled = next_round.lower(params, state, controls, active, room, **asked).compile()
    hlo = compiled.as_text() or ""
    entry = hlo[hlo.index("\nENTRY") :]
    # (scope, name) of each kernel
    triton = re.findall(r'gpu\.triton".*op_name="([^"]*)".*\bname = "([^"]*)"', hlo)
    copies = [_size(m) for m in re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", entry)]
    plans = list(
        Path(os.environ["DUMP_DIR"]).glob("*next_round*thunk_sequence_after_thunk_passes.txt")
    )
    plan = plans[0].read_text() if plans else ""
    memory = compiled.memory_analysis()
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    thunks = collections.Counter(re.findall(r"\d+: (k\w+)", plan))
    print(
        json.dumps(
            {
                "command_buffers": thunks["kCommandBuffer"],
                "kernels": thunks["kCustomKernel"],
                "xla_kernels": thunks["kCustomKernel"] - len(triton),
                # what stands at the left margin runs outside of a graph
                "outside": re.findall(r"^\d+: (?!kCommandBuffer)(k\w+)", plan, re.MULTILINE),
                "largest_copy": max(copies, default=0),
                # launches of those in every round, and of those in a branch of it
                "sorts": len(re.findall(r"^    \d+: .*\] sort_", plan, re.MULTILINE)),
                "sorts_in_a_branch": len(re.findall(r"^     +\d+: .*\] sort_", plan, re.MULTILINE)),
                "conditionals": thunks["kConditional"],
                "selections": len(re.findall(r"\] index_topk_", plan)),
                "layer_types": config.layer_types,
                "triton": triton,
                "layers": config.num_hidden_layers,
                "experts": len(re.findall(r"\] experts_down_nvfp4_", plan)),
                "scorings": len(re.findall(r"\] index_score_", plan)),
                "state_bytes": held,
                "aliased_bytes": memory.alias_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
            }
        )
    )


def _size(shape: str) -> int:
    """Elements of an HLO shape."""
    return math.prod(int(n) for n in re.findall(r"\d+", shape.split("[")[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
