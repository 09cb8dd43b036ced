"""Reading a sublayer's input from the residual streams."""

import jax
from jaxtyping import Array, Float

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.pallas.gated_residual import mix
from qwen4jax.params import FinalMixer, GatedResidual


def read(
    params: GatedResidual, config: Config, streams: Float[Array, "B T R D"], *, capture: Capture
) -> tuple[Float[Array, "B T D"], Float[Array, "B T R"]]:
    """The input of a sublayer, and the weights with which its output is injected."""
    with jax.named_scope("gated_residual"):
        x, inject, gates = mix(
            streams,
            params.hc_norm,
            params.input_mix_weight_down,
            params.input_mix_weight_up,
            params.block_inject_weight,
            eps=config.rms_norm_eps,
        )
    assert inject is not None
    capture("inject", inject)
    capture("read_gate", gates)
    return x, inject


def read_final(
    params: FinalMixer, config: Config, streams: Float[Array, "B T R D"]
) -> Float[Array, "B T D"]:
    """The hidden state that the output head sees."""
    with jax.named_scope("gated_residual"):
        down, up = params.input_mix_weight_down, params.input_mix_weight_up
        return mix(streams, params.hc_norm, down, up, None, eps=config.rms_norm_eps)[0]
