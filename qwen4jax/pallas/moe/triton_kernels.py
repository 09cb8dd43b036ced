"""The mixture of experts on an NVIDIA GPU, in Triton."""

from typing import Any

import jax
import jax.numpy as jnp
import triton

from qwen4jax import quant
from qwen4jax.pallas.moe import limits
from qwen4jax.pallas.moe.triton_experts import combine_kernel, down_kernel, gate_up_kernel
from qwen4jax.pallas.moe.triton_route import route_kernel
from qwen4jax.pallas.triton_call import triton_call

# steps whose weights are asked for ahead of use
GATE_UP_AHEAD = 2
DOWN_AHEAD = 3
# columns of a program that adds up the choices
COMBINE = 512


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
        EP=triton.next_power_of_2(experts_),
        KP=triton.next_power_of_2(k),
        RENORMALIZE=renormalize,
    )


def experts(x, ids, weights, gate_up, down):
    """See `qwen4jax.pallas.moe.experts`; `limits.refuses_experts` says what it takes."""
    tokens, hidden = x.shape
    width, choices = gate_up.shape[-2], ids.shape[1]
    if tokens == 0:
        return jnp.zeros(x.shape, jnp.float32)
    form = limits.form(gate_up) or ""
    columns, elements = limits.CHUNKS[form]
    shared: dict[str, Any] = dict(
        num_stages=1,
        T=tokens,
        K=choices,
        TP=max(8, triton.next_power_of_2(tokens)),
        KP=triton.next_power_of_2(choices),
        D=hidden,
        F=width,
        C=columns,
        L=elements,
        FORM=form,
    )
    pairs = tokens * choices
    warps = limits.split(hidden, columns)
    h = triton_call(
        x,
        ids,
        *_parts(gate_up),
        kernel=gate_up_kernel,
        name=f"experts_gate_up_{form}_{tokens}x{choices}x{width}x{hidden}",
        out=jax.ShapeDtypeStruct((pairs, width), x.dtype),
        grid=(width // 16, pairs),
        num_warps=warps,
        W=warps,
        AHEAD=min(GATE_UP_AHEAD, hidden // (columns * warps)),
        **shared,
    )
    warps = limits.DOWN_WARPS
    parts = triton_call(
        h,
        ids,
        *_parts(down),
        kernel=down_kernel,
        name=f"experts_down_{form}_{tokens}x{choices}x{hidden}x{width}",
        out=jax.ShapeDtypeStruct((pairs, hidden), jnp.float32),
        grid=(hidden // (16 * warps), pairs),
        num_warps=warps,
        W=warps,
        AHEAD=min(DOWN_AHEAD, width // columns),
        **shared,
    )
    return triton_call(
        parts,
        weights,
        kernel=combine_kernel,
        name=f"experts_sum_{tokens}x{choices}x{hidden}",
        out=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid=(-(-hidden // COMBINE), tokens),
        num_warps=4,
        K=choices,
        D=hidden,
        BLOCK=COMBINE,
    )


def _parts(w):
    """The stored arrays of experts' matrices: weights, scales, scales of matrices."""
    if isinstance(w, quant.Nvfp4):
        return w.weight, w.weight_scale, w.weight_scale_2
    if isinstance(w, quant.BlockFp8):
        return w.weight, w.weight_scale_inv, w.weight_scale_inv
    # never read
    return w, w, w
