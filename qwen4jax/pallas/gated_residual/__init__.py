"""The gated residual: what a sublayer reads of the streams, and how its output goes back."""

from jaxtyping import Array, Float, Int

from qwen4jax.pallas import counters
from qwen4jax.pallas.gated_residual import limits, reference
from qwen4jax.pallas.registry import HOPPER, Kernel, Operation

_MOSAIC = "qwen4jax.pallas.gated_residual.mosaic_hopper"

BOUNDARY = Operation(
    "gated_residual.boundary",
    {
        "reference": reference.boundary,
        "triton": Kernel(
            "qwen4jax.pallas.gated_residual.triton_launches.boundary",
            needs=("triton",),
            refuses=limits.refuses,
        ),
        "triton_many": Kernel(
            "qwen4jax.pallas.gated_residual.triton_many.boundary",
            needs=("triton",),
            refuses=limits.refuses_many,
        ),
        "triton_few": Kernel(
            "qwen4jax.pallas.gated_residual.triton_few.boundary",
            needs=("triton",),
            refuses=limits.refuses_few,
        ),
        "triton_one": Kernel(
            "qwen4jax.pallas.gated_residual.triton_one.boundary",
            needs=("triton",),
            devices=limits.MEETING_DEVICES,
            devices_text=limits.MEETING_TEXT,
            refuses=limits.refuses_one,
        ),
        "mosaic_hopper": Kernel(f"{_MOSAIC}.boundary", refuses=limits.refuses_mosaic, **HOPPER),
    },
)
MIX = Operation("gated_residual.mix", {"reference": reference.mix})
UPDATE = Operation("gated_residual.update", {"reference": reference.update})


def boundary(
    streams: Float[Array, "B T R D"],
    pending: tuple[Float[Array, "B T R"], Float[Array, "B T D"]] | None,
    norm: Float[Array, " RD"],
    down: Float[Array, "L RD"],
    up: Float[Array, "RD L"],
    inject: Float[Array, "R RD"] | None,
    counter: Int[Array, " N"] | None = None,
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "B T R D"],
    Float[Array, "B T D"],
    Float[Array, "B T R"] | None,
    Int[Array, " N"],
]:
    """From one sublayer to the next: `update` with the last output, then `mix`.

    Args:
        streams: residual streams, stream-major.
        pending: injection weights and output of the sublayer before, not yet in the streams;
            None if there is none.
        norm: gain minus one, of all streams.
        down: low-rank projection.
        up: back from it.
        inject: projection to the injection weights; None for the final mixer.
        counter: by which the programs of a launch wait for each other (`counters`), None for a
            fresh one. One array serves all calls of a program, each with what the one before it
            returned.
        eps: of the norm.
        implementation: see `BOUNDARY`; by default the fastest.

    Returns:
        The streams with the update in them, rounded to their dtype before the norm reads them;
        `mix`'s input and injection weights of them; the counter for the next call.
    """
    rows = streams.shape[0] * streams.shape[1]
    counter = counters.fresh() if counter is None else counter
    arrays = streams, pending, norm, down, up, inject, counter
    return BOUNDARY.run(implementation, rows, *arrays, eps=eps)


def mix(
    streams: Float[Array, "B T R D"],
    norm: Float[Array, " RD"],
    down: Float[Array, "L RD"],
    up: Float[Array, "RD L"],
    inject: Float[Array, "R RD"] | None,
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T R"] | None, Float[Array, "B T R D"]]:
    """The input of a sublayer and the weights with which its output is injected.

    `n` is the RMS norm of each stream for itself with gain `1 + norm`;
    `gates = sigmoid(up @ silu(down @ n / R))`; the input is the mean over streams of `gates * n`;
    the weights are `2 * sigmoid(inject @ n / R)`, all from the flattened `n`.

    Args:
        streams: residual streams, stream-major.
        norm: gain minus one, of all streams.
        down: low-rank projection.
        up: back from it.
        inject: projection to the injection weights; None for the final mixer.
        eps: of the norm.
        implementation: see `MIX`; by default the fastest.

    Returns:
        The input in the streams' dtype, the injection weights in float32 (None without `inject`),
        and the gates in float32.

    Source: spec section 4; `Qwen4ExpTextGatedResidual` of transformers 5.17.
    """
    rows = streams.shape[0] * streams.shape[1]
    return MIX.run(implementation, rows, streams, norm, down, up, inject, eps=eps)


def update(
    streams: Float[Array, "B T R D"],
    inject: Float[Array, "B T R"],
    y: Float[Array, "B T D"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T R D"]:
    """`streams + inject * y`, the same `y` for every stream, rounded once to the streams' dtype."""
    return UPDATE.run(implementation, y.shape[0] * y.shape[1], streams, inject, y)
