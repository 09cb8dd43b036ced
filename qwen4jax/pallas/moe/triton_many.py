"""Many tokens through the experts: lists of pairs by expert, two grouped products, the sum.

The shared expert is three plain products of all tokens, which XLA does best.
"""

from typing import Any

import jax
import jax.numpy as jnp

from qwen4jax.pallas.moe import limits, reference
from qwen4jax.pallas.moe.triton_many_lists import list_kernel, match_kernel
from qwen4jax.pallas.moe.triton_many_products import down_many_kernel, gate_up_many_kernel
from qwen4jax.pallas.moe.triton_sum import COMBINED, combine_kernel
from qwen4jax.pallas.triton_call import triton_call

# stored form -> columns of a step, and their elements in a row of the stored array
STEPS = {"nvfp4": (128, 64), "fp8": (64, 64), "bf16": (64, 64)}
# tokens and experts of a program of `match_kernel`; tokens that `list_kernel` looks at together
MATCH_TOKENS, MATCH_EXPERTS, LIST_TOKENS = 32, 128, 2048
# pairs of a tile, and how many times the mean of an expert's pairs that is at least
LEAST_ROWS, MOST_ROWS, SPARE = 16, 128, 1.5
# of the products' pipelines
STAGES = 3
# of the experts' results before they are added up
PARTS = jnp.float32


def experts(x, ids, weights, gate_up, down, shared, *, out_dtype):
    """See `qwen4jax.pallas.moe.experts`; `limits.refuses_sorted` says what it takes."""
    tokens, hidden = x.shape
    width, choices = gate_up.shape[-2], ids.shape[1]
    form = limits.form(gate_up) or ""
    rows = tile_rows(ids.size, gate_up.shape[0])
    experts_, pairs = lists(ids, gate_up.shape[0], rows)
    warps = limits.many_warps(hidden, width)
    common: dict[str, Any] = dict(
        num_warps=warps,
        num_stages=STAGES,
        STAGES=STAGES,
        D=hidden,
        F=width,
        C=STEPS[form][0],
        L=STEPS[form][1],
        FORM=form,
        ROWS=rows,
        W=warps,
    )
    size = f"{form}_{tokens}x{choices}"
    h = triton_call(
        ordered(x, form),
        experts_,
        pairs,
        *limits.stored_arrays(gate_up),
        kernel=gate_up_many_kernel,
        name=f"experts_many_gate_up_{size}x{width}x{hidden}",
        out=jax.ShapeDtypeStruct((ids.size, width), x.dtype),
        grid=(width // (16 * warps), experts_.size),
        K=choices,
        **common,
    )
    parts = triton_call(
        h,
        experts_,
        pairs,
        *limits.stored_arrays(down),
        kernel=down_many_kernel,
        name=f"experts_many_down_{size}x{hidden}x{width}",
        out=jax.ShapeDtypeStruct((ids.size, hidden), PARTS),
        grid=(hidden // (32 * warps), experts_.size),
        **common,
    )
    own, logit = (parts, weights) if shared is None else (_shared(x, shared), shared.logit)
    return triton_call(
        parts,
        own,
        weights,
        logit,
        kernel=combine_kernel,
        name=f"experts_many_sum_{tokens}x{choices}x{hidden}",
        out=jax.ShapeDtypeStruct(x.shape, out_dtype),
        grid=(-(-hidden // COMBINED), tokens),
        num_warps=4,
        BLOCK=COMBINED,
        T=tokens,
        K=choices,
        D=hidden,
        SHARED=int(shared is not None),
        OWN=0,
    )


def tile_rows(pairs: int, experts_: int) -> int:
    """Pairs of a tile, so that most experts need one, or few tiles of the largest size."""
    rows = LEAST_ROWS
    while rows < MOST_ROWS and rows * experts_ < SPARE * pairs:
        rows *= 2
    return rows


def ordered(x: jax.Array, form: str) -> jax.Array:
    """Columns of activations in the order of the decoded weights' (`triton_many_products.py`)."""
    if form == "nvfp4":
        # t, i1, second, h, i0 of pairs of columns
        split, order = (4, 2, 2, 2, 2), (3, 2, 5, 4, 1)
    elif form == "fp8":
        # t, i, h
        split, order = (4, 4, 2), (2, 3, 1)
    else:
        return x
    # pairs stay together; XLA takes minutes to compile a transpose of eight axes
    pairs = jax.lax.bitcast_convert_type(x.reshape(-1, *split, 2), jnp.uint32)
    return jax.lax.bitcast_convert_type(pairs.transpose(0, *order), x.dtype).reshape(x.shape)


def lists(ids: jax.Array, experts_: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Experts of tiles of `rows` pairs, -1 where none, and the pairs, -1 where none."""
    tokens, choices = ids.shape
    blocks = -(-tokens // MATCH_TOKENS)
    stride = blocks * MATCH_TOKENS
    block = min(MATCH_EXPERTS, limits.power_of_2(experts_))
    found, counts = triton_call(
        ids,
        kernel=match_kernel,
        name=f"experts_many_match_{tokens}x{choices}x{experts_}",
        out=(
            jax.ShapeDtypeStruct((experts_, stride), jnp.int8),
            jax.ShapeDtypeStruct((blocks, experts_), jnp.int32),
        ),
        grid=(blocks, -(-experts_ // block)),
        num_warps=8,
        T=tokens,
        K=choices,
        E=experts_,
        STRIDE=stride,
        TB=MATCH_TOKENS,
        EB=block,
    )
    tiles = limits.most_tiles(ids.size, experts_, rows)
    each = -(-tiles // experts_)
    return triton_call(
        found,
        jnp.sum(counts, axis=0),
        kernel=list_kernel,
        name=f"experts_many_list_{tokens}x{choices}x{experts_}",
        out=(
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((tiles, rows), jnp.int32),
        ),
        grid=(experts_,),
        num_warps=8,
        T=tokens,
        K=choices,
        E=experts_,
        EP=limits.power_of_2(experts_),
        STRIDE=stride,
        CHUNK=min(LIST_TOKENS, limits.power_of_2(tokens)),
        ROWS=rows,
        TILES=tiles,
        OWNP=limits.power_of_2(-(-tokens // rows)),
        EACH=each,
        EACHP=limits.power_of_2(each),
    )


def _shared(x, shared):
    """The shared expert's part of each token, before its share, float32."""
    gate, up, down, _ = shared
    return reference.plain_expert(x, gate, up, down)
