"""What the kernels take, known without their language."""

import jax.numpy as jnp

# queries of a request that read together in `triton_together`, 4 or 8: bits of a token's mark
TOGETHER = 4
# query heads of a kv head in `mosaic_hopper`: the columns of its products
MOSAIC_HEADS = 16

_KEPT = (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn)


def refuses(query, gate, key, value, slots, page_table=None):
    """What keeps the Triton kernel from these arguments, if anything."""
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"is for bfloat16 and float32 queries, these are {query.dtype}"
    if key.dtype not in _KEPT or value.dtype != key.dtype:
        return f"is not for keys of {key.dtype} and values of {value.dtype}"
    if key.dtype == jnp.float32 and query.dtype != jnp.float32:
        return "is not for a float32 cache under narrower queries"
    if query.shape[2] // key.shape[2] > 32:
        return f"is for up to 32 query heads of a kv head, not {query.shape[2] // key.shape[2]}"
    if query.shape[3] > 256:
        return f"is for up to 256 channels, not {query.shape[3]}"
    if key.dtype == jnp.float8_e4m3fn and query.shape[3] % 4:
        return f"reads e4m3 in words of 4 channels, and there are {query.shape[3]}"
    return None


def refuses_together(query, gate, key, value, slots, page_table=None):
    """What keeps the kernel of queries that read together from these arguments, if anything."""
    if page_table is None:
        return "is for tokens' numbers in their row, with a page table"
    if query.shape[2] // key.shape[2] > 16:
        return f"is for up to 16 query heads of a kv head, not {query.shape[2] // key.shape[2]}"
    if key.shape[1] % 8:
        return f"is for pages of whole eights of tokens, not of {key.shape[1]}"
    most = 1 << (31 - TOGETHER)
    if key.shape[0] * key.shape[1] > most:
        return f"is for up to {most} tokens in all pages"
    return refuses(query, gate, key, value, slots, page_table)


def refuses_mosaic(query, gate, key, value, slots, page_table=None):
    """What keeps the Mosaic kernel from these arguments, if anything."""
    if query.dtype != jnp.bfloat16:
        return f"is for bfloat16 queries, these are {query.dtype}"
    if key.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn) or value.dtype != key.dtype:
        return f"is not for keys of {key.dtype} and values of {value.dtype}"
    if query.shape[2] // key.shape[2] > MOSAIC_HEADS:
        shared = query.shape[2] // key.shape[2]
        return f"is for up to {MOSAIC_HEADS} query heads of a kv head, not {shared}"
    channels = query.shape[3]
    # TMA puts a token on a boundary of 128 bytes
    step = 128 // key.dtype.itemsize
    if channels > 256 or channels % step:
        return f"is for up to 256 channels by {step} in {key.dtype}, not {channels}"
    return None
