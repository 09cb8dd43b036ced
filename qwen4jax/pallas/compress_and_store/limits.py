"""What the kernels take, known without their language."""

import jax.numpy as jnp

# programs along an axis of the grid that has one for each token of a request
_MOST_PLACES = 65535


def refuses(cache, query_gate, key, value, index_qk, gains, span, *, ratio, eps):
    """What keeps the Triton kernel from these arguments, if anything."""
    if query_gate.shape[1] > _MOST_PLACES:
        return f"is for up to {_MOST_PLACES} tokens of a row, not {query_gate.shape[1]}"
    dtypes = {str(x.dtype) for x in (query_gate, key, value, index_qk, cache.ring, cache.index_key)}
    if len(dtypes) > 1 or query_gate.dtype not in (jnp.bfloat16, jnp.float32):
        return f"is for activations and index keys of one dtype, not {', '.join(sorted(dtypes))}"
    return None
