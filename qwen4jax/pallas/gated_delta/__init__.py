"""Gated DeltaNet: convolution, gates, delta rule and gated output norm, and the state after it.

The rule per value head, with the state `S` [key channels, value channels] in float32:

    S <- exp(g) S;   delta = beta (v - S^T k);   S <- S + k delta^T;   out = S^T q

Decay comes before the error term. A chunk of tokens is solved at once in the WY form: `delta` of
all of them by a triangular system, then outputs and state by matrix products. The pairs
`(k, delta)` and the decays are all that a later state needs, so a speculative step returns them as
`Factors` instead of a state, and `commit` applies as many as were accepted.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); spec section 6.
"""

from flax import struct
from jaxtyping import Array, Float, Int

from qwen4jax.pallas.gated_delta import limits, reference
from qwen4jax.pallas.registry import HOPPER, TMA, Kernel, Operation
from qwen4jax.state import DeltaNetState


class Weights(struct.PyTreeNode):
    """Weights of the operation: convolution taps (oldest first), decay, step bias, output norm."""

    conv1d: Float[Array, "C J"]
    A_log: Float[Array, " V"]
    dt_bias: Float[Array, " V"]
    norm: Float[Array, " E"]


class Factors(struct.PyTreeNode):
    """What the tokens of a speculative step add to the state.

    Attributes:
        window: convolution inputs, history included.
        key: normed keys, float32.
        delta: corrections, float32.
        decay: log decay of each token, float32, at most 0.
    """

    window: Float[Array, "B L C"]
    key: Float[Array, "B T H K"]
    delta: Float[Array, "B T V E"]
    decay: Float[Array, "B T V"]


_TRITON_STEP = "qwen4jax.pallas.gated_delta.triton_step.step"
_TRITON_COMMIT = "qwen4jax.pallas.gated_delta.triton_commit.commit"
_TRITON_CHUNKS = "qwen4jax.pallas.gated_delta.triton_chunks.chunks"
STEP = Operation(
    "gated_delta.step",
    {
        "reference": reference.step,
        "triton": Kernel(_TRITON_STEP, needs=("triton",), refuses=limits.step),
        "mosaic": Kernel(
            "qwen4jax.pallas.gated_delta.mosaic_step.step", refuses=limits.mosaic_step, **TMA
        ),
    },
)
COMMIT = Operation(
    "gated_delta.commit",
    {
        "reference": reference.commit,
        "triton": Kernel(_TRITON_COMMIT, needs=("triton",), refuses=limits.commit),
    },
)
CHUNK = Operation(
    "gated_delta.chunks",
    {
        "reference": reference.chunks,
        "triton": Kernel(_TRITON_CHUNKS, needs=("triton",), refuses=limits.chunks),
        "mosaic_hopper": Kernel(
            "qwen4jax.pallas.gated_delta.mosaic_chunks.chunks",
            needs=("triton",),
            refuses=limits.mosaic_chunks,
            **HOPPER,
        ),
    },
)


def step(
    qkv: Float[Array, "B T C"],
    z: Float[Array, "B T VE"],
    a: Float[Array, "B T V"],
    b: Float[Array, "B T V"],
    weights: Weights,
    state: DeltaNetState,
    *,
    key_heads: int,
    activation: str,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T VE"], Factors]:
    """Outputs of a few tokens after `state`, which stays as it is.

    Args:
        qkv: projections before the convolution: queries, keys, values.
        z: output gates before their activation.
        a: decay logits.
        b: step-size logits.
        weights: of the layer.
        state: before the first token.
        key_heads: heads of queries and keys; value head `h` uses key head `h // (V / H)`.
        activation: of the output gate, `sigmoid` or `silu`.
        eps: of the output norm, whose gain is `norm`, not `1 + norm`.
        implementation: see `STEP`; by default the fastest.

    Returns:
        Outputs in `qkv.dtype`, ready for the out-projection, and the factors of a commit.
    """
    out, *factors = STEP.run(
        implementation,
        qkv.shape[0] * qkv.shape[1],
        qkv,
        z,
        a,
        b,
        weights,
        state,
        key_heads=key_heads,
        activation=activation,
        eps=eps,
    )
    return out, Factors(*factors)


def commit(
    states: tuple[DeltaNetState, ...],
    factors: tuple[Factors, ...],
    count: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> tuple[DeltaNetState, ...]:
    """The states of some layers after the first `count` tokens of a step.

    Args:
        states: of the layers.
        factors: of each layer, from the step.
        count: tokens that stay of each row; 0 leaves a state bit for bit.
        implementation: see `COMMIT`; by default the fastest.
    """
    return COMMIT.run(implementation, count.size, states, factors, count)


def chunks(
    qkv: Float[Array, "B T C"],
    z: Float[Array, "B T VE"],
    a: Float[Array, "B T V"],
    b: Float[Array, "B T V"],
    weights: Weights,
    state: DeltaNetState,
    count: Int[Array, " B"],
    *,
    key_heads: int,
    activation: str,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T VE"], DeltaNetState]:
    """Outputs of many tokens and the state after the first `count` of each row.

    Arguments as `step`; agrees with it to float32 rounding. Tokens from `count` on change nothing
    and have outputs of no meaning. A log decay of -inf resets the state.
    """
    return CHUNK.run(
        implementation,
        qkv.shape[0] * qkv.shape[1],
        qkv,
        z,
        a,
        b,
        weights,
        state,
        count,
        key_heads=key_heads,
        activation=activation,
        eps=eps,
    )
