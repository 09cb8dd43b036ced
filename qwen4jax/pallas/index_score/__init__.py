"""Scores of compressed key blocks for the sparse attention's selection."""

from jaxtyping import Array, Float, Int

from qwen4jax.pallas.index_score import limits, reference
from qwen4jax.pallas.registry import HOPPER, Kernel, Operation

IMPLEMENTATIONS = Operation(
    "index_score",
    {
        "reference": reference.index_score,
        "triton": Kernel(
            "qwen4jax.pallas.index_score.triton_kernels.index_score",
            needs=("triton",),
            refuses=limits.refuses,
        ),
        "mosaic_hopper": Kernel(
            "qwen4jax.pallas.index_score.mosaic_hopper.index_score",
            refuses=limits.refuses_mosaic,
            **HOPPER,
        ),
    },
)


def index_score(
    query: Float[Array, "B T H C"],
    index_key: Float[Array, "P Q C"],
    page_table: Int[Array, "B M"],
    complete: Int[Array, "B T"],
    *,
    group: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N"] | tuple[Float[Array, "B T N"], Float[Array, "B T G"]]:
    """`sum_h relu(query_h . key_b) / sqrt(C)` for every block `b` of the row's pages.

    Args:
        query: normed and rotated index queries.
        index_key: compressed keys in pages of `Q` blocks.
        page_table: pages of each row in order, -1 where there is none.
        complete: complete blocks each query sees; later blocks score -inf whatever they hold.
        group: give the best score of each so many consecutive blocks too (the last group may be
            short), which `index_topk` takes.
        implementation: see `IMPLEMENTATIONS`; by default the fastest.

    Returns:
        float32 scores, `N = M * Q` in block order; with `group`, also the best of each group.

    Source: spec section 7.2.
    """
    rows = query.shape[0] * query.shape[1]
    return IMPLEMENTATIONS.run(
        implementation, rows, query, index_key, page_table, complete, group=group
    )
