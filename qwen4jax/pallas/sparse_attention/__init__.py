"""Attention of each query to its own selected tokens, read from the paged cache."""

from jaxtyping import Array, Float, Int

from qwen4jax.pallas.registry import HOPPER, Kernel, Operation
from qwen4jax.pallas.sparse_attention import limits, reference

IMPLEMENTATIONS = Operation(
    "sparse_attention",
    {
        "reference": reference.sparse_attention,
        "triton": Kernel(
            "qwen4jax.pallas.sparse_attention.triton_kernels.sparse_attention",
            needs=("triton",),
            refuses=limits.refuses,
        ),
        "triton_together": Kernel(
            "qwen4jax.pallas.sparse_attention.triton_together.sparse_attention",
            needs=("triton",),
            refuses=limits.refuses_together,
        ),
        "mosaic_hopper": Kernel(
            "qwen4jax.pallas.sparse_attention.mosaic_hopper.sparse_attention",
            refuses=limits.refuses_mosaic,
            **HOPPER,
        ),
    },
)


def sparse_attention(
    query: Float[Array, "B T H C"],
    gate: Float[Array, "B T H C"],
    key: Float[Array, "P S K C"],
    value: Float[Array, "P S K C"],
    slots: Int[Array, "B T M"],
    page_table: Int[Array, "B N"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T HC"]:
    """Softmax attention over the tokens in `slots`, times `sigmoid(gate)`.

    Args:
        query: normed and rotated queries; head `h` reads kv head `h // (H // K)`.
        gate: output gates, before the sigmoid.
        key: rotated keys in pages of `S` tokens, bfloat16, float32 or e4m3 (converted exactly).
        value: likewise.
        slots: places `page * S + place` of the selected tokens, negative where there is none.
            A query that selects nothing gets zeros.
        page_table: pages of each row in order, -1 where none is assigned; then `slots` are the
            tokens' numbers in their row, and tokens on no page count as not selected.
        implementation: see `IMPLEMENTATIONS`; by default the fastest.

    Returns:
        Heads side by side in `query.dtype`; scores, softmax and sums in float32, scale `1/sqrt(C)`.
    """
    rows = query.shape[0] * query.shape[1]
    return IMPLEMENTATIONS.run(implementation, rows, query, gate, key, value, slots, page_table)
