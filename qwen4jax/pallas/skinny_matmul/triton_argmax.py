# pyright: reportAssignmentType=false
"""The likeliest of many outputs in Triton: the projection keeps its logits to itself.

XLA's argmax of 248,320 logits takes two launches behind the projection (three with the check for
numbers that are not finite) and reads what was written. Here a program ends with the largest of
its outputs and the id of it, and a second launch takes the best of all programs: of 64 outputs
each and 3,880, and above 32 rows of 128 and 1,940 (but of NVFP4).

Values are compared as integers in which order is that of the floats: NaN above everything, -0 equal
to 0. So equal logits are equal, and the lowest id among them is a second minimum. The sums are
those of `triton_kernels` and `triton_stored`, bit for bit (but not of `triton_split` and
`triton_few`).

Floor: the weight's bytes over 4.3 TB/s, and two launches.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen4jax import quant
from qwen4jax.pallas.skinny_matmul import triton_kernels, triton_stored
from qwen4jax.pallas.skinny_matmul.triton_stored import product
from qwen4jax.pallas.triton_call import triton_call


def argmax(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
    """See `qwen4jax.pallas.skinny_matmul.argmax`."""
    flat = x.reshape(-1, x.shape[-1])
    (rows, inputs), outputs = flat.shape, w.shape[0]
    form = triton_stored.form_of(w)
    if isinstance(w, quant.Quantized):
        tile = triton_stored.tiling(rows, (outputs,), (form,))
    else:
        tile = triton_kernels.tiling(rows, inputs, (outputs,))
    tiles = triton.cdiv(outputs, tile["BLOCK_N"])
    best = jax.ShapeDtypeStruct((rows, tiles), jnp.int32)
    partial = triton_call(
        flat,
        *triton_stored.parts(w, flat),
        kernel=_best_of_tile,
        name=f"skinny_argmax_{form}_{rows}x{outputs}x{inputs}",
        out=(best, best),
        grid=(triton.cdiv(rows, tile["BLOCK_ROWS"]), tiles),
        ROWS=rows,
        K=inputs,
        N=outputs,
        FORM=form,
        **tile,
    )
    found = triton_call(
        *partial,
        kernel=_best_of_all,
        name=f"skinny_argmax_of_{rows}x{tiles}",
        out=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        num_warps=8,
        TILES=tiles,
        BLOCK=triton.next_power_of_2(tiles),
    ).reshape(x.shape[:-1])
    return jnp.where(found < 0, ~found, found), found >= 0


@triton.jit
def _best_of_tile(
    x, w, s, g, best, place, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    FORM: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each row's largest value of a tile, and its id: inverted where one of them is not finite."""
    tile = tl.program_id(1)
    acc = product(
        x, w, s, g, tile, 0, K // BLOCK_K, ROWS, K, N, FORM, STAGES, BLOCK_ROWS, BLOCK_N, BLOCK_K
    )
    # what is past the last output repeats it, and has a larger id
    outputs = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    acc = tl.where(acc == 0, 0.0, acc)
    bits = acc.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(acc != acc, 0x7FFFFFFF, bits)
    largest = tl.max(bits, axis=0)
    first = tl.min(tl.where(bits == largest[None, :], outputs, 0x7FFFFFFF), axis=0)
    strange = tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1, axis=0)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    to = rows * tl.num_programs(1) + tile
    tl.store(best + to, largest, mask=rows < ROWS)
    tl.store(place + to, tl.where(strange > 0, ~first, first), mask=rows < ROWS)


@triton.jit
def _best_of_all(best, place, found, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """One row's best over all tiles."""
    row, tiles = tl.program_id(0), tl.arange(0, BLOCK)
    # bits of no float: below them all
    bits = tl.load(best + row * TILES + tiles, mask=tiles < TILES, other=-0x80000000)
    ids = tl.load(place + row * TILES + tiles, mask=tiles < TILES, other=0x7FFFFFFF)
    strange = tl.min(ids, axis=0) < 0
    ids = tl.where(ids < 0, ~ids, ids)
    first = tl.min(tl.where(bits == tl.max(bits, axis=0), ids, 0x7FFFFFFF), axis=0)
    tl.store(found + row, tl.where(strange, ~first, first))
