"""Gated DeltaNet: the linear-attention sublayer."""

import jax
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.pallas import gated_delta
from qwen4jax.pallas.skinny_matmul import projections, skinny_matmul
from qwen4jax.params import GatedDeltaNet
from qwen4jax.state import DeltaNetState


def delta_net(
    params: GatedDeltaNet,
    config: Config,
    x: Float[Array, "B T D"],
    state: DeltaNetState,
    count: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B T D"], DeltaNetState | gated_delta.Factors]:
    """One linear-attention sublayer.

    Args:
        params: of the sublayer.
        config: of the model.
        x: sublayer input.
        state: before the first token.
        count: tokens of each row that are there and final; None for a speculative step, of which
            it is not known yet how many tokens stay.

    Returns:
        The output, and the state after `count` tokens or the factors of a later commit.
    """
    weights = gated_delta.Weights(params.conv1d, params.A_log, params.dt_bias, params.norm)
    static = {
        "key_heads": config.linear_num_key_heads,
        "activation": config.gate_activation,
        "eps": config.rms_norm_eps,
    }
    with jax.named_scope("delta_projections"):
        inputs = (params.in_proj_qkv, params.in_proj_z, params.in_proj_a, params.in_proj_b)
        qkv, z, a, b = projections(x, inputs)
    with jax.named_scope("delta_rule"):
        if count is None:
            out, after = gated_delta.step(qkv, z, a, b, weights, state, **static)
        else:
            out, after = gated_delta.chunks(qkv, z, a, b, weights, state, count, **static)
    with jax.named_scope("delta_projections"):
        return skinny_matmul(out, params.out_proj), after
