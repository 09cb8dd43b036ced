"""The mixture of experts on an NVIDIA GPU, in Triton."""

from typing import Any

import jax
import jax.numpy as jnp

from qwen4jax.pallas.moe import limits
from qwen4jax.pallas.moe.triton_down import down_kernel
from qwen4jax.pallas.moe.triton_gate_up import gate_up_kernel
from qwen4jax.pallas.moe.triton_groups import group_kernel
from qwen4jax.pallas.moe.triton_ring import REGISTERS, STAGES
from qwen4jax.pallas.moe.triton_route import route_kernel
from qwen4jax.pallas.moe.triton_router import router_kernel
from qwen4jax.pallas.moe.triton_router_many import choose_kernel, parts_kernel
from qwen4jax.pallas.moe.triton_sum import COMBINED, combine_kernel
from qwen4jax.pallas.triton_call import triton_call

# steps of gate/up and of down whose weights are asked for ahead of use: with few tokens, and with
# tiles from a list, which keep the GPU's memory busy for longer than it takes to fill registers
AHEAD_FEW = 1, 2
AHEAD_LISTED = 2, 3
# and of rows of bfloat16, for further steps of which the cache is asked
AHEAD_PLAIN = 4, 4
ASKED_PLAIN = 8
# at most of a program of the shared expert, which reads its weights anew for each so many
SHARED_TOKENS = 16


def route(logits, k, *, renormalize):
    """See `qwen4jax.pallas.moe.route`."""
    tokens, experts_ = logits.shape
    place = (tokens, k)
    out = (jax.ShapeDtypeStruct(place, jnp.int32), jax.ShapeDtypeStruct(place, jnp.float32))
    if tokens == 0:
        return jax.tree.map(lambda o: jnp.zeros(o.shape, o.dtype), out)
    return triton_call(
        logits,
        kernel=route_kernel,
        name=f"route_{tokens}x{experts_}",
        out=out,
        grid=(tokens,),
        num_warps=1,
        num_stages=1,
        E=experts_,
        K=k,
        EP=limits.power_of_2(experts_),
        KP=limits.power_of_2(k),
        RENORMALIZE=renormalize,
    )


def router(x, gate, shared_gate, k, counter, *, renormalize):
    """See `qwen4jax.pallas.moe.router`; `limits.refuses_router` says what it takes."""
    tokens, hidden = x.shape
    experts_ = gate.shape[0]
    place, alone = (tokens, k), (tokens, 1)
    chosen = (
        jax.ShapeDtypeStruct(place, jnp.int32),
        jax.ShapeDtypeStruct(place, jnp.float32),
        jax.ShapeDtypeStruct(alone, jnp.float32),
    )
    if tokens == 0:
        return jax.tree.map(lambda o: jnp.zeros(o.shape, o.dtype), chosen), counter
    if tokens > limits.MOST_ROUTED:
        return _router_many(x, gate, shared_gate, chosen, k, renormalize), counter
    splits, warps = limits.router_cut(hidden)
    rows = limits.ROUTER_ROWS
    parts = jax.ShapeDtypeStruct((splits, tokens, experts_ + rows), jnp.float32)
    counter, _, chosen = triton_call(
        x,
        gate,
        shared_gate,
        counter,
        kernel=router_kernel,
        name=f"router_{tokens}x{experts_}x{hidden}",
        out=(jax.ShapeDtypeStruct(counter.shape, jnp.int32), parts, chosen),
        grid=(splits, experts_ // rows + 1, -(-tokens // 8)),
        num_warps=warps,
        num_stages=1,
        aliases={3: 0},
        T=tokens,
        E=experts_,
        D=hidden,
        K=k,
        R=limits.power_of_2(-(-experts_ // 128)),
        G=limits.power_of_2(-(-min(tokens, 8) // warps)),
        KP=limits.power_of_2(k),
        SPLITS=splits,
        STEPS=hidden // (limits.ROUTER_CHUNK * splits * warps),
        W=warps,
        RENORMALIZE=renormalize,
    )
    return chosen, counter


def _router_many(x, gate, shared_gate, chosen, k, renormalize):
    """`router` of so many tokens that products and choice are a launch each."""
    (tokens, hidden), experts_ = x.shape, gate.shape[0]
    slices = min(limits.MANY_SLICES, hidden // limits.MANY_COLUMNS)
    block = max(16, min(128, limits.power_of_2(tokens)))
    parts = triton_call(
        x,
        gate,
        shared_gate,
        kernel=parts_kernel,
        name=f"router_parts_{tokens}x{experts_}x{hidden}",
        out=jax.ShapeDtypeStruct((slices, tokens, experts_ + limits.ROUTER_ROWS), jnp.float32),
        grid=(-(-tokens // block), slices, -(-experts_ // limits.MANY_ROWS) + 1),
        num_warps=8,
        # all steps of a slice are under way at once at the released size
        num_stages=4,
        T=tokens,
        E=experts_,
        D=hidden,
        TOKENS=block,
    )
    return triton_call(
        parts,
        kernel=choose_kernel,
        name=f"router_choose_{tokens}x{experts_}",
        out=chosen,
        grid=(tokens,),
        num_warps=1,
        T=tokens,
        E=experts_,
        K=k,
        R=limits.power_of_2(-(-experts_ // 128)),
        KP=limits.power_of_2(k),
        SLICES=slices,
        RENORMALIZE=renormalize,
    )


def experts(x, ids, weights, gate_up, down, shared, *, out_dtype):
    """See `qwen4jax.pallas.moe.experts`; `limits.refuses_experts` says what it takes."""
    tokens, hidden = x.shape
    width, choices = gate_up.shape[-2], ids.shape[1]
    if tokens == 0:
        return jnp.zeros(x.shape, out_dtype)
    form = limits.form(gate_up) or ""
    columns, elements = limits.CHUNKS[form]
    listed, summed = tokens > limits.FEW_TOKENS, tokens <= limits.SUM_TOKENS
    gate_up_ahead, down_ahead = AHEAD_LISTED if listed else AHEAD_FEW
    if form == "bf16":
        gate_up_ahead, down_ahead = AHEAD_PLAIN
    together = min(SHARED_TOKENS, max(8, limits.power_of_2(tokens)))
    groups = -(-tokens // together) if shared is not None else 0
    # what is never read has to be something, too
    gate, up, own_down, logit = shared if shared is not None else (x, x, x, weights)
    which = _listed(ids, gate_up.shape[0]) if listed else (ids, ids)
    places = groups + which[0].size
    size: dict[str, Any] = dict(T=tokens, K=choices, D=hidden, SHARED=groups)
    common: dict[str, Any] = size | dict(
        num_stages=1,
        KP=limits.power_of_2(choices),
        N=together,
        F=width,
        C=columns,
        L=elements,
        FORM=form,
        LISTED=listed,
    )
    rows = tokens * choices + (tokens if groups else 0)
    blocks = hidden // (16 * limits.DOWN_WARPS)
    counters = limits.power_of_2(blocks)
    warps = limits.split(hidden, columns)
    h, counter = triton_call(
        x,
        *which,
        *limits.stored_arrays(gate_up),
        gate,
        up,
        kernel=gate_up_kernel,
        name=f"experts_gate_up_{form}_{tokens}x{choices}x{width}x{hidden}",
        out=(
            jax.ShapeDtypeStruct((rows, width), x.dtype),
            jax.ShapeDtypeStruct((counters,), jnp.int32),
        ),
        grid=(width // 16, places),
        max_registers=REGISTERS if listed and form == "nvfp4" else 0,
        ASKED=ASKED_PLAIN if form == "bf16" else 0,
        num_warps=warps,
        W=warps,
        AHEAD=min(gate_up_ahead, hidden // (columns * warps)),
        COUNTERS=counters,
        STAGES=STAGES,
        **common,
    )
    warps = limits.DOWN_WARPS
    total = jax.ShapeDtypeStruct(x.shape, out_dtype)
    _, parts, out = triton_call(
        h,
        *which,
        *limits.stored_arrays(down),
        own_down,
        weights,
        logit,
        counter,
        kernel=down_kernel,
        name=f"experts_down_{form}_{tokens}x{choices}x{hidden}x{width}",
        out=(counter, jax.ShapeDtypeStruct((rows, hidden), jnp.float32), total),
        grid=(blocks, places),
        ASK=form == "bf16",
        num_warps=warps,
        aliases={9: 0},
        W=warps,
        AHEAD=min(down_ahead, width // columns),
        TP=limits.power_of_2(tokens),
        SUM=summed,
        PLACES=places,
        **common,
    )
    if summed:
        return out
    return triton_call(
        parts,
        parts,
        weights,
        logit,
        kernel=combine_kernel,
        name=f"experts_sum_{tokens}x{choices}x{hidden}",
        out=total,
        grid=(-(-hidden // COMBINED), tokens),
        num_warps=4,
        BLOCK=COMBINED,
        OWN=ids.size,
        **size,
    )


def _listed(ids, experts_):
    """Experts of tiles of 8 pairs, and the pairs."""
    tokens, choices = ids.shape
    tiles = limits.most_tiles(ids.size, experts_, 8)
    each = -(-tiles // experts_)
    return triton_call(
        ids,
        kernel=group_kernel,
        name=f"experts_group_{tokens}x{choices}x{experts_}",
        out=(
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((tiles, 8), jnp.int32),
        ),
        grid=(experts_,),
        num_warps=4,
        T=tokens,
        K=choices,
        TP=limits.power_of_2(tokens),
        KP=limits.power_of_2(choices),
        E=experts_,
        EP=limits.power_of_2(experts_ + 1),
        TILES=tiles,
        EACH=each,
        EACHP=limits.power_of_2(each),
    )
