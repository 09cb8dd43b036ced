"""Compiles every Triton kernel at a released size, for a GPU that is not there.

Run in a process of its own: `python compile_kernels.py KIND ROUTE`, a KIND of `bench/targets.py`.
For each implementation in Triton compiles the first large case that it takes, and those of
`CHUNKS`. Prints a JSON object: operation -> cases, each with the kernels in XLA's program; and the
reference's projections, without kernels, with the matrices that XLA puts together.
"""

import importlib
import json
import re
import sys
from typing import Any

import jax
import numpy as np

from bench.targets import place_on
from qwen4jax.pallas import registry, triton_call
from qwen4jax.pallas.cases import Case
from qwen4jax.pallas.skinny_matmul import cases as skinny_matmul
from qwen4jax.pallas.skinny_matmul import projections

# chunks of prompts, and many requests: other kernels or options than for a round of one
CHUNKS = {
    "skinny_matmul": (
        "draft_delta_out_nvfp4_1",
        "draft_delta_out_fp8_128",
        "draft_fc_fp8_512",
        "fc_512",
        "delta_out_128",
    ),
    "skinny_matmul.projections": ("draft_in_fp8_128", "delta_in_128"),
    "skinny_matmul.argmax": ("lm_head_128",),
    "gated_residual.boundary": ("released_128",),
    "moe.router": ("released_128",),
    "moe.experts": (
        "released_shared_nvfp4_32",
        "released_shared_nvfp4_2048",
        "released_shared_fp8_2048",
    ),
    "index_score": ("released_chunk_of_2048",),
    "index_topk": ("released_best_chunk_of_2048_at_64k",),
    "sparse_attention": ("released_chunk_of_2048_at_64k",),
}
# several products of the same rows, which cuBLAS computes
MANY_PROJECTIONS = "delta_in_32"


def main(kind: str, route: Any) -> None:
    here = place_on(kind)
    triton_call.default_route = lambda: route
    compiled = {}
    for operation in registry.operations().values():
        package, _, function = operation.name.partition(".")
        run = getattr(importlib.import_module(f"qwen4jax.pallas.{package}"), function or package)
        cases = importlib.import_module(f"qwen4jax.pallas.{package}.cases").CASES
        for name in operation:
            if not name.startswith("triton"):
                continue
            own = (c for c in cases if c.function == (function or package) and c.device_only)
            found: list[tuple[str, int]] = []
            for case in own:
                if found and case.name not in CHUNKS.get(operation.name, ()):
                    continue
                with registry.using(device=kind):
                    hlo = compile_case(case, run, name, here)
                if hlo is not None:
                    kernels = re.findall(r'custom_call_target="([^"]*triton[^"]*)"', hlo)
                    found.append((case.name, len(kernels)))
            compiled[f"{operation.name}/{name}"] = found
    together = next(c for c in skinny_matmul.CASES if c.name == MANY_PROJECTIONS)
    with registry.using(device=kind):
        hlo = compile_case(together, projections, "reference", here) or ""
    compiled["reference"] = [(MANY_PROJECTIONS, len(re.findall(r" concatenate\(", hlo)))]
    print(json.dumps(compiled))


def compile_case(case: Case, run: Any, name: str, here: Any) -> str | None:
    """XLA's program of a case, or None where the implementation does not take it."""
    static: dict[str, Any] = {}

    def arrays() -> dict[str, Any]:
        inputs = case.build(np.random.default_rng(0))
        static.update({k: v for k, v in inputs.items() if not _traced(v)})
        return {k: v for k, v in inputs.items() if k not in static}

    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)  # noqa: E731
    given = jax.tree.map(place, jax.eval_shape(arrays))
    call = jax.jit(lambda given: run(**given, **static, implementation=name))
    try:
        lowered = call.lower(given)
    except NotImplementedError:
        return None
    return lowered.compile().as_text()


def _traced(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)


if __name__ == "__main__":
    main(*sys.argv[1:])
