"""The mixture-of-experts sublayer: routed experts and the gated shared expert."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.pallas.moe import experts, route
from qwen4jax.pallas.skinny_matmul import projections, skinny_matmul
from qwen4jax.params import MixtureOfExperts


def moe(
    params: MixtureOfExperts, config: Config, x: Float[Array, "B T D"], *, capture: Capture
) -> Float[Array, "B T D"]:
    """One expert sublayer; the sum of both parts is formed in float32 and rounded once."""
    flat = x.reshape(-1, x.shape[-1])
    shared = params.shared_expert
    inputs = (params.gate, shared.gate_proj, shared.up_proj, params.shared_expert_gate)
    dtypes = (x.dtype, jnp.float32, jnp.float32, jnp.float32)
    with jax.named_scope("router_and_shared"):
        logits, gate, up, share = projections(flat, inputs, out_dtypes=dtypes)
        ids, weights = route(logits, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    capture("router.ids", ids.reshape(*x.shape[:2], -1))
    capture("router.weights", weights.reshape(*x.shape[:2], -1))
    with jax.named_scope("experts"):
        routed = experts(flat, ids, weights, params.experts.gate_up_proj, params.experts.down_proj)
    with jax.named_scope("router_and_shared"):
        hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
        out = skinny_matmul(hidden, shared.down_proj, out_dtype=jnp.float32)
    return (routed + jax.nn.sigmoid(share) * out).astype(x.dtype).reshape(x.shape)
