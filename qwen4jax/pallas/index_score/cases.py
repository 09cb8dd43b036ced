"""Cases of block scoring."""

import jax.numpy as jnp
import numpy as np

from qwen4jax.pallas.cases import BF16, F32, Case, integers, normal


def _case(name, shape, complete, dtype=F32, *, holes=0, scale=1.0, device_only=False):
    """Pages shuffled over a pool with spare ones; what no query may read is NaN.

    Args:
        name: of the case.
        shape: rows, places, heads, channels, pages of a row, blocks in a page.
        complete: complete blocks that each query sees, broadcast to [rows, places].
        dtype: of queries and keys.
        holes: pages at the end of each row's table that are not assigned.
        scale: of the queries.
        device_only: see `Case`.
    """
    rows, places, heads, channels, pages, per_page = shape

    def build(rng):
        pool = rows * pages + 2
        seen = np.broadcast_to(np.asarray(complete), (rows, places))
        table = rng.permutation(pool)[: rows * pages].reshape(rows, pages)
        live = np.zeros((pool, per_page), bool)
        for row in range(rows):
            block = np.arange(seen[row].max(initial=0))
            live[table[row, block // per_page], block % per_page] = True
        if holes:
            table[:, -holes:] = -1
        keys = normal(rng, (pool, per_page, channels), dtype)
        return dict(
            query=normal(rng, (rows, places, heads, channels), dtype, scale),
            index_key=jnp.where(jnp.asarray(live)[..., None], keys, jnp.nan),
            page_table=integers(table),
            complete=integers(seen),
        )

    return Case("index_score", name, build, device_only)


CASES = (
    _case("one_query", (1, 1, 2, 16, 3, 2), 5),
    _case("rows_at_different_lengths", (3, 2, 2, 16, 3, 2), [[0, 1], [2, 3], [6, 6]]),
    _case("nothing_complete", (2, 3, 2, 16, 2, 2), 0),
    _case("pages_not_assigned", (2, 3, 2, 16, 4, 2), [[1, 1, 2], [3, 4, 4]], holes=2),
    _case("places_63", (1, 63, 4, 8, 8, 2), (np.arange(63) + 1) // 4),
    _case("blocks_1000", (1, 1, 4, 16, 63, 16), 1000),
    _case("one_head_page_of_one_block", (2, 1, 1, 8, 3, 1), [[1], [3]]),
    _case("bfloat16", (2, 4, 4, 32, 5, 8), [[5, 5, 6, 6], [39, 39, 39, 40]], BF16),
    # tiles of keys of which some, a part or nothing is seen
    _case("bfloat16_tiles", (2, 9, 2, 64, 9, 16), [[0], [70]], BF16, holes=2),
    _case("zero_queries", (1, 2, 2, 16, 3, 2), 5, scale=0.0),
    *(
        _case(
            f"released_{rows}_rows_{tokens // 1024}k",
            (rows, 4, 4, 128, tokens // 64, 16),
            tokens // 4 - 1,
            BF16,
            device_only=True,
        )
        for rows, tokens in (
            (1, 8192),
            (1, 65536),
            (1, 262144),
            (8, 65536),
            (32, 65536),
            (1, 57344),
            (32, 57344),
        )
    ),
    *(
        _case(name, (1, places, 4, 128, 1024, 16), seen, BF16, device_only=True)
        for name, places, seen in (
            ("released_chunk", 512, 16383),
            ("released_chunk_from_0", 512, (np.arange(512) + 1) // 4),
            ("released_chunk_of_2048", 2048, 16383),
        )
    ),
)

# checked on a device, not timed: NUM-03 around the widest window that is all selected, and NUM-08
# and NUM-09 rows of very different lengths over pages of which the last are not assigned
_EDGE = np.arange(2047, 2056)[:, None] + np.arange(4)
_RAGGED = np.array([[0], [1], [511], [512], [513], [5000], [14332], [14333]])

EDGES = (
    _case("edge_2047_to_2055", (9, 4, 4, 128, 36, 16), _EDGE // 4, BF16, device_only=True),
    _case("edge_ragged", (8, 4, 4, 128, 897, 16), _RAGGED, BF16, holes=1, device_only=True),
)
