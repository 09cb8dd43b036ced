"""The mixture of experts on an NVIDIA GPU, in Triton."""

from typing import Any

import jax
import jax.numpy as jnp
import triton

from qwen4jax.pallas.moe import limits
from qwen4jax.pallas.moe.triton_experts import combine_kernel, down_kernel, gate_up_kernel
from qwen4jax.pallas.moe.triton_route import route_kernel
from qwen4jax.pallas.triton_call import triton_call

# steps whose weights are asked for ahead of use
GATE_UP_AHEAD = 2
DOWN_AHEAD = 3
# warps of a program of down, 16 rows each: 64 rows divide every hidden size taken
DOWN_WARPS = 4
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
    """See `qwen4jax.pallas.moe.experts`; for few tokens."""
    tokens, hidden = x.shape
    width = gate_up.shape[-2]
    choices = ids.shape[1]
    if tokens == 0:
        return jnp.zeros(x.shape, jnp.float32)
    shared: dict[str, Any] = dict(
        T=tokens,
        K=choices,
        TP=max(8, triton.next_power_of_2(tokens)),
        KP=triton.next_power_of_2(choices),
        D=hidden,
        F=width,
    )
    pairs = tokens * choices
    warps, ahead = limits.split(hidden), GATE_UP_AHEAD
    h = triton_call(
        x,
        ids,
        gate_up.weight,
        gate_up.weight_scale,
        gate_up.weight_scale_2,
        kernel=gate_up_kernel,
        name=f"experts_gate_up_nvfp4_{tokens}x{choices}x{width}x{hidden}",
        out=jax.ShapeDtypeStruct((pairs, width), x.dtype),
        grid=(width // 16, pairs),
        num_warps=warps,
        num_stages=1,
        W=warps,
        AHEAD=min(ahead, hidden // (limits.CHUNK * warps)),
        **shared,
    )
    warps, ahead = DOWN_WARPS, DOWN_AHEAD
    parts = triton_call(
        h,
        ids,
        down.weight,
        down.weight_scale,
        down.weight_scale_2,
        kernel=down_kernel,
        name=f"experts_down_nvfp4_{tokens}x{choices}x{hidden}x{width}",
        out=jax.ShapeDtypeStruct((pairs, hidden), jnp.float32),
        grid=(hidden // (16 * warps), pairs),
        num_warps=warps,
        num_stages=1,
        W=warps,
        AHEAD=min(ahead, width // limits.CHUNK),
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
