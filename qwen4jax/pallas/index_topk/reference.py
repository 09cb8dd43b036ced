"""Block selection in plain `jnp`."""

import jax
import jax.numpy as jnp


def index_topk(scores, index, best=None, *, blocks, ratio):
    """See `qwen4jax.pallas.index_topk`."""
    complete = (index + 1) // ratio
    # one zero: a sort that orders -0 before +0 would break ties by sign
    scores = jnp.where(scores == 0, 0.0, scores)
    _, best = jax.lax.top_k(scores, min(blocks, scores.shape[-1]))
    missing = blocks - best.shape[-1]
    best = jnp.pad(best, ((0, 0), (0, 0), (0, missing)))
    chosen = jnp.arange(blocks) < complete[..., None]
    members = best[..., None] * ratio + jnp.arange(ratio)
    members = jnp.where(chosen[..., None], members, -1).reshape(*index.shape, -1)
    tail = complete[..., None] * ratio + jnp.arange(ratio - 1)
    tail = jnp.where(tail <= index[..., None], tail, -1)
    return jnp.concatenate([members, tail], axis=-1).astype(jnp.int32)
