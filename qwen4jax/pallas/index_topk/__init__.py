"""Selection of the tokens a query attends to: the best blocks and the open block's tail."""

from jaxtyping import Array, Float, Int

from qwen4jax.pallas.index_topk import limits, reference
from qwen4jax.pallas.registry import HOPPER, Kernel, Operation

IMPLEMENTATIONS = Operation(
    "index_topk",
    {
        "reference": reference.index_topk,
        "triton": Kernel(
            "qwen4jax.pallas.index_topk.triton_kernels.index_topk",
            needs=("triton",),
            refuses=limits.refuses,
        ),
        "mosaic_hopper": Kernel(
            "qwen4jax.pallas.index_topk.mosaic_hopper.index_topk",
            refuses=limits.refuses_mosaic,
            **HOPPER,
        ),
    },
)


def index_topk(
    scores: Float[Array, "B T N"],
    index: Int[Array, "B T"],
    best: Float[Array, "B T G"] | None = None,
    *,
    blocks: int,
    ratio: int,
    implementation: str | None = None,
) -> Int[Array, "B T M"]:
    """Indices of the selected tokens, `M = blocks * ratio + ratio - 1`, -1 where there is none.

    The `blocks` highest of the complete blocks, ties to the lower block (-0 and +0 tie), each
    expanded to its `ratio` tokens; then the `(index + 1) % ratio` tokens of the open block.

    Args:
        scores: float32, -inf beyond each query's complete blocks.
        index: index of each query's token, -1 where there is none: it selects nothing.
        best: best score of each `best_of(N)` consecutive blocks, as `index_score` gives them;
            spares kernels a pass over the row.
        blocks: most blocks selected.
        ratio: tokens in a block.
        implementation: see `IMPLEMENTATIONS`; by default the fastest.
    """
    rows = scores.shape[0] * scores.shape[1]
    return IMPLEMENTATIONS.run(
        implementation, rows, scores, index, best, blocks=blocks, ratio=ratio
    )


def best_of(width: int) -> int:
    """Blocks of a group whose best score spares kernels a pass over rows of `width` blocks."""
    return limits.group_of(width)
