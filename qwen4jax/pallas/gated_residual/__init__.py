"""The gated residual: what a sublayer reads of the streams, and how its output goes back."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen4jax.pallas.gated_residual import reference
from qwen4jax.pallas.registry import Kernel, Operation

# sums by slice are found by 32 bits
MOST_ROWS = 65536


def _refuses(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, **_: Any
) -> str | None:
    batch, time, count, hidden = streams.shape
    arrays = [streams, norm, down, up, inject, *(pending or ())[1:]]
    if any(a is not None and a.dtype != jnp.bfloat16 for a in arrays):
        return "takes bfloat16 streams and weights"
    if not 1 <= batch * time <= MOST_ROWS:
        return f"takes 1 to {MOST_ROWS} rows, not {batch * time}"
    if count not in (2, 4, 8, 16) or hidden % 64 or down.shape[0] % 16:
        return "takes 2, 4, 8 or 16 streams, widths in multiples of 64 and ranks of 16"
    return None


def _refuses_few(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, **_: Any
) -> str | None:
    if reason := _refuses(streams, pending, norm, down, up, inject):
        return reason
    if streams.shape[0] * streams.shape[1] > 8:
        return "takes up to 8 rows: the narrow side of one tensor-core product"
    if down.shape[0] % 32:
        return "takes ranks in multiples of 32"
    return None


def _refuses_mosaic(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, **_: Any
) -> str | None:
    batch, time, count, hidden = streams.shape
    arrays = [streams, norm, down, up, inject, *(pending or ())[1:]]
    if any(a is not None and a.dtype != jnp.bfloat16 for a in arrays):
        return "takes bfloat16 streams and weights"
    if (rows := batch * time) not in (*range(1, 9), 16, 24, 32):
        return f"takes 1 to 8, 16, 24 or 32 rows, not {rows}"
    if count != 4 or hidden % 256 or down.shape[0] % 64:
        return "takes 4 streams, widths in multiples of 256 and ranks of 64"
    return None


_MOSAIC = "qwen4jax.pallas.gated_residual.mosaic_hopper"
_HOPPER: dict[str, Any] = {"devices": r"H100|H200|GH200", "devices_text": "a Hopper GPU"}

BOUNDARY = Operation(
    "gated_residual.boundary",
    {
        "reference": reference.boundary,
        "triton": Kernel(
            "qwen4jax.pallas.gated_residual.triton_launches.boundary",
            needs=("triton",),
            refuses=_refuses,
        ),
        "triton_few": Kernel(
            "qwen4jax.pallas.gated_residual.triton_few.boundary",
            needs=("triton",),
            refuses=_refuses_few,
        ),
        "mosaic_hopper": Kernel(f"{_MOSAIC}.boundary", refuses=_refuses_mosaic, **_HOPPER),
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
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "B T R D"],
    Float[Array, "B T D"],
    Float[Array, "B T R"] | None,
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
        eps: of the norm.
        implementation: see `BOUNDARY`; by default the fastest.

    Returns:
        The streams with the update in them, rounded to their dtype before the norm reads them;
        `mix`'s input and injection weights of them.
    """
    rows = streams.shape[0] * streams.shape[1]
    arrays = streams, pending, norm, down, up, inject
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
