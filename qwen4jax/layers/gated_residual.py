"""The residual streams between sublayers: what is read of them, what goes back into them."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.pallas.gated_residual import boundary, mix, update
from qwen4jax.params import FinalMixer, GatedResidual


class Residual(NamedTuple):
    """Residual streams, and a sublayer's output that is not in them yet.

    The next sublayer's read adds it: one kernel for both saves a pass over the streams.

    Attributes:
        streams: residual streams.
        pending: injection weights and output of the last sublayer.
        counter: what the next launches count by, if one before has left it (`pallas.counters`).
    """

    streams: Float[Array, "B T R D"]
    pending: tuple[Float[Array, "B T R"], Float[Array, "B T D"]] | None = None
    counter: Int[Array, " N"] | None = None

    def settled(self) -> Float[Array, "B T R D"]:
        """The streams with everything in them."""
        if self.pending is None:
            return self.streams
        with jax.named_scope("gated_residual"):
            return update(self.streams, *self.pending)


def read(
    params: GatedResidual, config: Config, residual: Residual, *, capture: Capture
) -> tuple[Float[Array, "B T D"], Float[Array, "B T R"], Residual]:
    """The input of a sublayer, the weights to inject its output with, and the settled streams."""
    counter = residual.counter
    weights = (
        params.hc_norm,
        params.input_mix_weight_down,
        params.input_mix_weight_up,
        params.block_inject_weight,
    )
    with jax.named_scope("gated_residual"):
        if capture.wants("read_gate"):
            streams = residual.settled()
            x, inject, gates = mix(streams, *weights, eps=config.rms_norm_eps)
            capture("read_gate", gates)
        else:
            streams, x, inject, counter = boundary(
                residual.streams, residual.pending, *weights, counter, eps=config.rms_norm_eps
            )
    assert inject is not None
    capture("inject", inject)
    return x, inject, Residual(streams, None, counter)


def read_final(
    params: FinalMixer, config: Config, residual: Residual
) -> tuple[Float[Array, "B T D"], Float[Array, "B T R D"]]:
    """The hidden state that the output head sees, and the settled streams that it is of.

    The counter ends here: every later launch that counts waits for one of the two.
    """
    weights = params.hc_norm, params.input_mix_weight_down, params.input_mix_weight_up, None
    with jax.named_scope("gated_residual"):
        given = residual.streams, residual.pending, *weights, residual.counter
        streams, hidden, _, _ = boundary(*given, eps=config.rms_norm_eps)
    return hidden, streams
