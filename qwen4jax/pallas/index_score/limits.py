"""What the kernels take, known without their language."""

import jax.numpy as jnp

# of a query: columns of the product
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


# of Mosaic: heads that have 8 queries each in the columns of a product, and channels of a copy
_MOSAIC_HEADS, _MOSAIC_CHANNELS = 16, 256
# keys of its tile, to which whole pages are copied, or parts of one
_MOSAIC_TILE = 64


def refuses_mosaic(query, index_key, page_table, complete, *, group=None):
    """What keeps the Mosaic kernel from these arguments, if anything."""
    if query.dtype != jnp.bfloat16 or index_key.dtype != jnp.bfloat16:
        return f"is for bfloat16, not {query.dtype} queries and {index_key.dtype} keys"
    heads, channels = query.shape[2:]
    if heads > _MOSAIC_HEADS:
        return f"is for up to {_MOSAIC_HEADS} heads, these are {heads}"
    if channels not in (16, 32, *range(64, _MOSAIC_CHANNELS + 1, 64)):
        return f"is for 16, 32, or up to {_MOSAIC_CHANNELS} channels by 64, not {channels}"
    page = index_key.shape[1]
    if page not in (8, 16, 32) and page % _MOSAIC_TILE:
        return f"is for pages of 8, 16, 32 or a multiple of {_MOSAIC_TILE} blocks, not of {page}"
    return None
