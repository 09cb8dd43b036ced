"""Compiles the Mosaic kernels of the released sizes for GPUs that are not there.

Run in a process of its own, for Mosaic assembles all for the first chip it meets: `python
compile_mosaic.py KIND` with KIND of `bench/targets.py` and MOSAIC_GPU_DUMP_PTXAS=1, so that the
assembler's report of each kernel is printed. What is not for Hopper alone comes first.
"""

import functools
import re
import sys

import jax
import jax.numpy as jnp

from bench.targets import place_on
from qwen4jax import quant
from qwen4jax.pallas import registry
from qwen4jax.pallas.gated_delta import Weights, chunks, step
from qwen4jax.pallas.gated_residual import boundary
from qwen4jax.pallas.index_score import index_score
from qwen4jax.pallas.index_topk import index_topk
from qwen4jax.pallas.moe import experts
from qwen4jax.pallas.skinny_matmul import projections
from qwen4jax.pallas.sparse_attention import sparse_attention
from qwen4jax.state import DeltaNetState

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def main(kind: str) -> None:
    here = place_on(kind)

    def array(*shape: int, dtype=BF16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def assemble(f, *args, implementation="mosaic_hopper"):
        run = functools.partial(f, implementation=implementation)
        with registry.using(device=kind):
            jax.jit(run).lower(*args).compile()

    weights = Weights(array(10240, 4), array(48), array(48), array(128))
    rows, places = 32, 8
    sizes = 10240, 6144, 48, 48
    assemble(
        functools.partial(step, key_heads=16, activation="sigmoid", eps=1e-6),
        *(array(rows, places, size) for size in sizes),
        weights,
        DeltaNetState(array(rows, 3, 10240), array(rows, 48, 128, 128, dtype=F32)),
        implementation="mosaic",
    )
    if not re.search(registry.HOPPER["devices"], kind):
        return

    assemble(
        functools.partial(chunks, key_heads=16, activation="sigmoid", eps=1e-6),
        *(array(1, 512, size) for size in sizes),
        weights,
        DeltaNetState(array(1, 3, 10240), array(1, 48, 128, 128, dtype=F32)),
        array(1, dtype=I32),
    )
    for rows, outputs, inputs, dtype in (
        (4, (10240, 6144, 48, 48), 2560, BF16),
        (32, (12288, 512, 512, 640), 2560, BF16),
        (4, (2560,), 6144, BF16),
        (32, (248320,), 2560, F32),
    ):
        weights = tuple(array(o, inputs) for o in outputs)
        dtypes = (dtype,) * len(weights)
        assemble(functools.partial(projections, out_dtypes=dtypes), array(rows, inputs), weights)
    for rows in (4, 32):
        chosen = array(rows, 10, dtype=I32), array(rows, 10, dtype=F32)
        for dtype in (BF16, jnp.float8_e4m3fn):
            gate_up, down = (
                array(512, 2, 640, 2560, dtype=dtype),
                array(512, 2560, 640, dtype=dtype),
            )
            if dtype != BF16:
                gate_up = quant.BlockFp8(gate_up, array(512, 2, 5, 20))
                down = quant.BlockFp8(down, array(512, 20, 5))
            assemble(experts, array(rows, 2560), *chosen, gate_up, down)
    norm, down, up, inject = array(10240), array(320, 10240), array(10240, 320), array(4, 10240)
    for rows, final in ((4, False), (32, True)):
        assemble(
            functools.partial(boundary, eps=1e-6),
            array(rows, 1, 4, 2560),
            None if final else (array(rows, 1, 4, dtype=F32), array(rows, 1, 2560)),
            norm,
            down,
            up,
            None if final else inject,
        )
    limits = array(32, 4, dtype=I32)
    table = array(32, 1024, dtype=I32)
    assemble(index_score, array(32, 4, 4, 128), array(1024, 16, 128), table, limits)
    queries, pool, slots = (
        array(1, 4, 24, 256),
        array(1024, 64, 2, 256),
        array(1, 4, 2051, dtype=I32),
    )
    assemble(sparse_attention, queries, queries, pool, pool, slots)
    for width in (14336, 24576):
        select = functools.partial(index_topk, blocks=512, ratio=4)
        assemble(select, array(1, 4, width, dtype=F32), array(1, 4, dtype=jnp.int32))


if __name__ == "__main__":
    main(*sys.argv[1:])
