"""Block scores in plain `jnp`, products and sums in float32."""

import jax.numpy as jnp

from qwen4jax.numerics import EXACT


def index_score(query, index_key, page_table, complete, *, group=None):
    """See `qwen4jax.pallas.index_score`."""
    rows, pages = page_table.shape
    keys = index_key[jnp.maximum(page_table, 0)]  # [B, M, Q, C]
    keys = keys.reshape(rows, pages * index_key.shape[1], -1)
    dots = jnp.einsum(
        "bthc,bnc->bthn",
        query.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=EXACT,
    )
    scores = jnp.sum(jnp.maximum(dots, 0), axis=2) * query.shape[-1] ** -0.5
    seen = jnp.arange(scores.shape[-1]) < complete[..., None]
    scores = jnp.where(seen, scores, -jnp.inf)
    return scores if group is None else (scores, _best(scores, group))


def _best(scores, group):
    """Highest of each `group` scores in a row, the last group may be short."""
    spare = -scores.shape[-1] % group
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, spare)), constant_values=-jnp.inf)
    return jnp.max(scores.reshape(*scores.shape[:2], -1, group), axis=-1)
