"""The mixture-of-experts sublayer: routed experts and the gated shared expert."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.pallas.moe import Shared, experts, route
from qwen4jax.pallas.skinny_matmul import projections
from qwen4jax.params import MixtureOfExperts


def moe(
    params: MixtureOfExperts, config: Config, x: Float[Array, "B T D"], *, capture: Capture
) -> Float[Array, "B T D"]:
    """One expert sublayer; the sum of both parts is formed in float32 and rounded once."""
    flat = x.reshape(-1, x.shape[-1])
    with jax.named_scope("router"):
        gates = (params.gate, params.shared_expert_gate)
        logits, share = projections(flat, gates, out_dtypes=(x.dtype, jnp.float32))
        ids, weights = route(logits, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    capture("router.ids", ids.reshape(*x.shape[:2], -1))
    capture("router.weights", weights.reshape(*x.shape[:2], -1))
    own = params.shared_expert
    shared = Shared(own.gate_proj, own.up_proj, own.down_proj, share)
    matrices = (params.experts.gate_up_proj, params.experts.down_proj)
    with jax.named_scope("experts"):
        y = experts(flat, ids, weights, *matrices, shared, out_dtype=x.dtype)
    return y.reshape(x.shape)
