"""Scoring and selection together: of a long chunk some places at a time, to bound the scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen4jax.pallas.index_score import index_score
from qwen4jax.pallas.index_topk import best_of, index_topk

# bytes of the scores held at once; those of 8,192 queries at 262k tokens would be 2 GB
WORKSPACE = 1 << 28
# queries of a request that the scoring kernel gives one load of keys
_TOGETHER = 16


def select(
    query: Float[Array, "B T H C"],
    index_key: Float[Array, "P Q C"],
    page_table: Int[Array, "B M"],
    complete: Int[Array, "B T"],
    index: Int[Array, "B T"],
    *,
    blocks: int,
    ratio: int,
) -> Int[Array, "B T S"]:
    """`index_topk` of `index_score`, see both; a query's choice does not depend on the others.

    Up to `WORKSPACE` bytes of scores are made at once, so a call of more of them is a loop over
    tiles of places.
    """
    rows, places = query.shape[:2]
    width = index_key.shape[1] * page_table.shape[1]
    tile = _tile(rows, places, width)

    def chosen(query, complete, index):
        with jax.named_scope("index_score"):
            scores, best = index_score(query, index_key, page_table, complete, group=best_of(width))
        with jax.named_scope("index_topk"):
            return index_topk(scores, index, best, blocks=blocks, ratio=ratio)

    if tile >= places:
        return chosen(query, complete, index)
    # a place without a token selects nothing
    cut = (_cut(query, tile, 0), _cut(complete, tile, 0), _cut(index, tile, -1))
    out = jnp.swapaxes(jax.lax.map(lambda given: chosen(*given), cut), 0, 1)
    return out.reshape(out.shape[0], -1, out.shape[-1])[:, :places]


def _tile(rows: int, places: int, width: int) -> int:
    """Places of a tile: as equal as can be, and if possible whole loads of keys."""
    most = max(1, WORKSPACE // (4 * rows * width))
    if most >= places:
        return places
    whole = most // _TOGETHER * _TOGETHER or most
    tiles = -(-places // whole)
    return min(whole, -(-places // tiles // _TOGETHER) * _TOGETHER)


def _cut(x: Array, tile: int, spare: int) -> Array:
    """Tiles [tiles, B, tile, ...] of [B, places, ...], the last one filled up with `spare`."""
    lacking = ((0, 0), (0, -x.shape[1] % tile), *((0, 0),) * (x.ndim - 2))
    x = jnp.pad(x, lacking, constant_values=spare)
    return jnp.swapaxes(x.reshape(x.shape[0], -1, tile, *x.shape[2:]), 0, 1)
