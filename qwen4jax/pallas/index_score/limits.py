"""What the kernels take, known without their language."""

import jax.numpy as jnp

# queries of a request that share one load of a key, and their heads: columns of the product
MOST_HEADS = 32


def refuses(query, index_key, page_table, complete, *, group=None):
    """What keeps the Triton kernel from these arguments, if anything."""
    if query.dtype != index_key.dtype or query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"is for one dtype, not {query.dtype} queries and {index_key.dtype} keys"
    if query.shape[2] > MOST_HEADS:
        return f"is for up to {MOST_HEADS} heads, these are {query.shape[2]}"
    if group is not None and (group > 64 or group & (group - 1)):
        return f"gives the best of up to 64 blocks, a power of two, not of {group}"
    return None
