"""Which ids lead a row, without a sort of the vocabulary: by score, of equal scores the lower id.

The `n` leading ids lie in the `n` groups of consecutive ids whose largest scores lead, of equal
ones the lower group. An id outside of them has `n` ids ahead of it, the largest of each: higher, or
equal in a lower group and so a lower id. Two selections therefore find the leading ids exactly, of
maxima and of the members of few groups; both are narrow enough for `index_topk`.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qwen4jax.pallas.index_topk import index_topk

# ids by which a row is truncated where they suffice: `index_topk` chooses no more, and to sort as
# few takes a launch or two
CANDIDATES = 512
# ids of a group: a line of memory, and maxima and members are about as many
_GROUP = 32


class _Edge(NamedTuple):
    """The last id that is kept: higher scores are too, and equal ones of lower ids."""

    score: Float[Array, "B T"]
    id: Int[Array, "B T"]


def best(
    scores: Float[Array, "B T V"], count: int
) -> tuple[Float[Array, "B T K"], Int[Array, "B T K"]]:
    """The scores and the ids of the `count` leading ids, best first; -0 and +0 tie.

    Args:
        scores: float32, finite.
        count: at most V.
    """
    if scores.shape[-1] <= CANDIDATES:
        # `top_k` orders -0 before +0
        values, ids = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), count)
        return values, ids
    values, ids = _leading(scores, count)
    place = _ahead(values, ids).sum(axis=-1)
    here = place[..., None, :] == jnp.arange(count)[:, None]
    take = lambda x: jnp.where(here, x[..., None, :], 0).sum(axis=-1)  # noqa: E731
    return take(values), take(ids)


def truncate(
    scores: Float[Array, "B T V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Masks all but the leading ids: the first `top_k`, of these the fewest with a mass of `top_p`.

    A row whose last kept id is among its `CANDIDATES` leading ids is truncated by them. The others
    are sorted, all at once, in a branch that is taken only if there are some; which of the two a
    row's result comes from does not depend on other rows.

    Args:
        scores: float32 and the largest 0; -inf where an id is masked already.
        top_k: 0 or less is off.
        top_p: above 0; 1 is off.

    Returns:
        The scores, -inf where an id is not kept.
    """
    vocab = scores.shape[-1]
    if vocab <= CANDIDATES:
        edge = _edge_by_sorting(scores, top_k, top_p)
    else:
        near, settled = _edge_among_candidates(scores, top_k[:, None], top_p[:, None])
        choose = functools.partial(jnp.where, settled)
        edge = jax.lax.cond(
            settled.all(),
            lambda: near,
            lambda: jax.tree.map(choose, near, _edge_by_sorting(scores, top_k, top_p)),
        )
    score, last = edge.score[..., None], edge.id[..., None]
    kept = (scores > score) | ((scores == score) & (jnp.arange(vocab) <= last))
    return jnp.where(kept | _keeps_all(top_k, top_p)[:, None, None], scores, -jnp.inf)


def _keeps_all(top_k: Int[Array, "*S"], top_p: Float[Array, "*S"]) -> Bool[Array, "*S"]:
    return (top_k <= 0) & (top_p >= 1)


def _edge_among_candidates(
    scores: Float[Array, "B T V"], top_k: Int[Array, "B 1"], top_p: Float[Array, "B 1"]
) -> tuple[_Edge, Bool[Array, "B T"]]:
    """Each row's last kept id, and whether it is that: no id beside the candidates matters."""
    values, ids = _leading(scores, CANDIDATES)
    probability = jnp.exp(values)
    ahead = _ahead(values, ids)
    place = ahead.sum(axis=-1)
    before = jnp.where(ahead, probability[..., None, :], 0.0).sum(axis=-1)
    in_top_k = (place < top_k[..., None]) | (top_k[..., None] <= 0)
    among = jnp.where(in_top_k, probability, 0.0).sum(axis=-1)
    # by groups, and not at once, so that one pass over the ids gives their maxima too
    masses = jax.lax.optimization_barrier(jnp.exp(_groups(scores)).sum(axis=-1))
    needed = top_p * jnp.where(top_k > 0, among, masses.sum(axis=-1))
    # rounding must not drop the tail when top-p is off
    in_top_p = (before < needed[..., None]) | (top_p[..., None] >= 1)
    end = (in_top_k & in_top_p).sum(axis=-1, keepdims=True) - 1
    take = lambda x: jnp.where(place == end, x, 0).sum(axis=-1)  # noqa: E731
    settled = jnp.where(top_k > 0, top_k <= values.shape[-1], among >= needed)
    return _Edge(take(values), take(ids)), settled | _keeps_all(top_k, top_p)


def _edge_by_sorting(
    scores: Float[Array, "B T V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> _Edge:
    """Each row's last kept id, whatever is kept.

    By both keys, and without a cumulative sum over the vocabulary: where XLA has a device before
    it, it leaves a large sort by scores alone and a scan to CUB, which nothing shows to be
    capturable in a branch of a graph.
    """
    vocab = scores.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    ordered, ids = jax.lax.sort((-scores, ids), num_keys=2)
    most = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)[:, None, None]
    probability = jnp.where(jnp.arange(vocab) < most, jnp.exp(-ordered), 0.0)
    # the part of the row in which top-p is reached, and the place in it
    width = math.isqrt(vocab - 1) + 1
    parts = jnp.pad(probability, ((0, 0), (0, 0), (0, -vocab % width)))
    parts = parts.reshape(*scores.shape[:2], -1, width)
    masses = parts.sum(axis=-1)
    needed = (top_p[:, None] * masses.sum(axis=-1))[..., None]
    before = _sum_before(masses)
    part = (before < needed).sum(axis=-1, keepdims=True) - 1
    inside = _sum_before(jnp.take_along_axis(parts, part[..., None], axis=2)[:, :, 0])
    reached = (jnp.take_along_axis(before, part, axis=-1) + inside < needed).sum(
        axis=-1, keepdims=True
    )
    # rounding must not drop the tail when top-p is off
    end = jnp.where(top_p[:, None, None] >= 1, most, part * width + reached)
    take = lambda x: jnp.take_along_axis(x, jnp.minimum(end, most) - 1, axis=-1)[..., 0]  # noqa: E731
    return _Edge(-take(ordered), take(ids))


def _sum_before(x: Float[Array, "B T N"]) -> Float[Array, "B T N"]:
    """The sum of what is before each."""
    ahead = jnp.arange(x.shape[-1]) < jnp.arange(x.shape[-1])[:, None]
    return jnp.where(ahead, x[..., None, :], 0.0).sum(axis=-1)


def _leading(
    scores: Float[Array, "B T V"], count: int
) -> tuple[Float[Array, "B T C"], Int[Array, "B T C"]]:
    """The scores and ids of `count` to `CANDIDATES` ids, in no order, the leading ones among them.

    There are more than `CANDIDATES` ids.
    """
    vocab = scores.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), scores.shape)
    if vocab > max(CANDIDATES, count * _GROUP):
        groups = _groups(scores)
        numbers = _select(groups.max(axis=-1), count)
        if count * _GROUP > CANDIDATES:
            # the next selection's ties go to what comes first
            numbers = jnp.sort(numbers, axis=-1, stable=False)
        scores, ids = _members(groups, numbers)
    if scores.shape[-1] > CANDIDATES:
        chosen = _select(scores, count)
        scores, ids = (jnp.take_along_axis(x, chosen, axis=-1) for x in (scores, ids))
    return scores, ids


def _ahead(values: Float[Array, "B T C"], ids: Int[Array, "B T C"]) -> Bool[Array, "B T C C"]:
    """Whether [..., i, j] candidate j comes before candidate i.

    All pairs are compared inside of what reads them, where a sort and a cumulative sum over it
    would be many launches.
    """
    tie, lower = values[..., None, :] == values[..., :, None], ids[..., None, :] < ids[..., :, None]
    return (values[..., None, :] > values[..., :, None]) | (tie & lower)


def _groups(scores: Float[Array, "B T V"]) -> Float[Array, "B T G M"]:
    """Scores of consecutive ids; what the last group lacks comes after every id."""
    lacking = ((0, 0), (0, 0), (0, -scores.shape[-1] % _GROUP))
    padded = jnp.pad(scores, lacking, constant_values=-jnp.inf)
    return padded.reshape(*scores.shape[:2], -1, _GROUP)


def _members(
    groups: Float[Array, "B T G M"], numbers: Int[Array, "B T N"]
) -> tuple[Float[Array, "B T K"], Int[Array, "B T K"]]:
    """The scores and the ids of some groups, group by group."""
    scores = jnp.take_along_axis(groups, numbers[..., None], axis=2)
    ids = numbers[..., None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)
    flat = (*numbers.shape[:2], -1)
    return scores.reshape(flat), ids.reshape(flat)


def _select(scores: Float[Array, "B T N"], count: int) -> Int[Array, "B T K"]:
    """Where the `count` highest of more scores are, in any order; ties to the first."""
    last = jnp.full(scores.shape[:2], scores.shape[-1] - 1, jnp.int32)
    return index_topk(scores, last, blocks=count, ratio=1)
