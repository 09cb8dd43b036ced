"""Cases of attention to selected tokens."""

import jax.numpy as jnp
import numpy as np

from qwen4jax.pallas.cases import BF16, E4M3, F32, Case, integers, normal


def _case(
    name,
    shape,
    selected,
    dtype=F32,
    *,
    cache=None,
    gap=0.0,
    scale=1.0,
    kept=1.0,
    paged=False,
    device_only=False,
):
    """Each query reads its own random places of a pool that is NaN everywhere else.

    Args:
        name: of the case.
        shape: rows, places, query heads, kv heads, channels, pages, tokens in a page.
        selected: (width of the selection, most places taken of it, of all rows or of each).
        dtype: of queries and gates.
        cache: dtype of keys and values, by default `dtype`.
        gap: share of the taken places that are empty.
        scale: of the queries.
        kept: scale of keys and values.
        paged: give tokens' numbers in their row and a page table, whose last page is missing.
        device_only: see `Case`.
    """
    rows, places, heads, kv_heads, channels, pages, size = shape
    width, most = selected

    def build(rng):
        slots = np.full((rows, places, width), -1)
        table = rng.permutation(pages)[: pages // rows * rows].reshape(rows, -1)
        within = table.shape[1] * size if paged else pages * size
        counts = np.repeat(np.broadcast_to(most, rows), places)
        for query, count in zip(slots.reshape(-1, width), counts, strict=True):
            chosen = rng.choice(within, min(count, width), replace=False)
            chosen[rng.random(len(chosen)) < gap] = -1
            query[: len(chosen)] = chosen
        place = slots
        if paged:
            table[:, -1] = -1
            page = table[np.arange(rows)[:, None, None], slots // size]
            place = np.where((slots >= 0) & (page >= 0), page * size + slots % size, -1)
        read = np.zeros(pages * size, bool)
        read[place[place >= 0]] = True
        read = jnp.asarray(read.reshape(pages, size))[..., None, None]
        pool = (pages, size, kv_heads, channels)
        kind = cache or dtype
        return dict(
            query=normal(rng, (rows, places, heads, channels), dtype, scale),
            gate=normal(rng, (rows, places, heads, channels), dtype),
            key=jnp.where(read, normal(rng, pool, scale=kept), jnp.nan).astype(kind),
            value=jnp.where(read, normal(rng, pool, scale=kept), jnp.nan).astype(kind),
            slots=integers(slots),
            **(dict(page_table=integers(table)) if paged else {}),
        )

    return Case("sparse_attention", name, build, device_only)


def _chunk(name, places, start, shape, blocks, dtype=BF16, *, cache=None, kept=0.8, **more):
    """One request's chunk as the indexer selects for it: whole blocks and the open one's tail.

    Args:
        name: of the case.
        places: of the chunk; the last three are not filled.
        start: index of the first.
        shape: query heads, kv heads, channels, tokens in a page.
        blocks: most blocks selected; while there are no more, a query selects all of them.
        dtype: of queries and gates.
        cache: of keys and values.
        kept: share of a query's blocks that the next one selects too.
        more: see `Case`.
    """
    heads, kv_heads, channels, size = shape
    ratio, filled = 4, places - 3

    def build(rng):
        slots = np.full((1, places, blocks * ratio + ratio - 1), -1)
        chosen = np.zeros(0, int)
        for place in range(filled):
            tokens = start + place + 1
            complete = tokens // ratio
            if complete <= blocks:
                chosen = np.arange(complete)
            else:
                left = chosen[rng.random(len(chosen)) < kept]
                others = np.setdiff1d(np.arange(complete), left)
                new = rng.choice(others, blocks - len(left), replace=False)
                chosen = np.sort(np.concatenate([left, new]))
            members = (chosen[:, None] * ratio + np.arange(ratio)).reshape(-1)
            slots[0, place, : len(members)] = members
            tail = np.arange(complete * ratio, tokens)
            slots[0, place, blocks * ratio :][: len(tail)] = tail
        pages = -(-(start + filled) // size)
        table = rng.permutation(pages)[None]
        read = np.zeros(pages * size, bool)
        taken = slots[slots >= 0]
        read[table[0, taken // size] * size + taken % size] = True
        read = jnp.asarray(read.reshape(pages, size))[..., None, None]
        pool = (pages, size, kv_heads, channels)
        return dict(
            query=normal(rng, (1, places, heads, channels), dtype),
            gate=normal(rng, (1, places, heads, channels), dtype),
            key=jnp.where(read, normal(rng, pool), jnp.nan).astype(cache or dtype),
            value=jnp.where(read, normal(rng, pool), jnp.nan).astype(cache or dtype),
            slots=integers(slots),
            page_table=integers(table),
        )

    return Case("sparse_attention", name, build, **more)


_RELEASED = (24, 2, 256)
# of a rank of four
_QUARTER = (6, 1, 256)

CASES = (
    _case("one_query", (1, 1, 4, 2, 16, 3, 8), (11, 11)),
    _case("nothing_selected", (2, 2, 4, 2, 16, 2, 8), (11, 0)),
    _case("one_selected", (1, 2, 4, 2, 16, 2, 8), (11, 1)),
    _case("gaps_among_the_selected", (2, 3, 4, 2, 16, 4, 8), (19, 14), gap=0.4),
    _case("one_kv_head", (1, 3, 4, 1, 8, 2, 4), (7, 7)),
    _case("as_many_kv_heads", (1, 3, 4, 4, 8, 2, 4), (7, 7)),
    _case("places_63", (1, 63, 4, 2, 8, 4, 8), (11, 11)),
    _case("places_65", (1, 65, 4, 2, 8, 4, 8), (11, 11)),
    _case("selected_1000", (1, 1, 4, 2, 8, 20, 64), (1003, 1000)),
    _case("large_scores", (1, 3, 4, 2, 16, 2, 8), (11, 11), scale=1e3),
    _case("bfloat16", (2, 3, 4, 2, 16, 4, 8), (19, 14), BF16, gap=0.2),
    _case("e4m3_cache", (2, 3, 4, 2, 16, 4, 8), (19, 14), BF16, cache=E4M3, gap=0.2),
    _case("e4m3_cache_float32", (1, 3, 4, 2, 16, 2, 8), (11, 11), cache=E4M3),
    _case("paged", (2, 3, 4, 2, 16, 8, 8), (19, 14), gap=0.2, paged=True),
    _case("paged_many_queries", (2, 40, 4, 2, 8, 8, 8), (19, 14), gap=0.2, paged=True),
    _case("splits_e4m3", (1, 2, 4, 1, 16, 10, 8), (71, 66), BF16, cache=E4M3, gap=0.2, paged=True),
    _case("paged_e4m3", (2, 3, 4, 2, 16, 8, 8), (19, 14), BF16, cache=E4M3, paged=True),
    # as many tiles as splits, and some more; lengths around the widest window that is all selected
    _case("selected_2051", (1, 1, 6, 1, 16, 40, 64), (2051, 2051), BF16),
    _case("selected_2047_of_2054", (1, 4, 4, 2, 16, 40, 64), (2054, 2047), BF16, paged=True),
    _case("selected_2048_by_12", (3, 4, 2, 1, 16, 80, 64), (2051, 2048), BF16),
    # what Mosaic takes: wide heads, more than one tile, tokens alone and in blocks
    _case("channels_64", (1, 1, 3, 1, 64, 8, 16), (70, 66), BF16, gap=0.1),
    _chunk("channels_128_e4m3", 4, 69, (3, 1, 128, 8), 17, cache=E4M3),
    _chunk("chunk_of_a_prompt", 37, 0, (6, 2, 16, 8), 4),
    _chunk("chunk_further_on", 21, 70, (6, 2, 16, 8), 8, F32, kept=0.5),
    _chunk("chunk_e4m3", 21, 70, (6, 2, 16, 8), 8, cache=E4M3),
    *(
        _case(
            f"released_{name}",
            (1, places, heads, kv_heads, 256, 1024, 64),
            (2051, 2051),
            BF16,
            cache=kind,
            paged=True,
            device_only=True,
        )
        for name, places, heads, kv_heads, kind in (
            ("paged_1_query", 1, 24, 2, BF16),
            ("paged_4_queries", 4, 24, 2, BF16),
            ("paged_4_queries_e4m3", 4, 24, 2, E4M3),
            ("rank_of_4", 4, 6, 1, BF16),
            ("rank_of_4_e4m3", 4, 6, 1, E4M3),
            ("rank_of_4_1_query", 1, 6, 1, BF16),
        )
    ),
    # as a round of several requests reads
    *(
        _case(
            f"released_{name}_{rows}_rows{'_e4m3' if kind is E4M3 else ''}",
            (rows, 4, *heads, 1024 * rows, 64),
            (2051, 2051),
            BF16,
            cache=kind,
            paged=True,
            device_only=True,
        )
        for name, heads in (("paged", _RELEASED), ("rank_of_4", _QUARTER))
        for rows in (4, 32)
        for kind in (BF16, E4M3)
    ),
    *(
        _case(
            f"released_{rows}_rows{'_e4m3' if kind is E4M3 else ''}",
            (rows, 4, *_RELEASED, 1024 * rows, 64),
            (2051, 2051),
            BF16,
            cache=kind,
            device_only=True,
        )
        for rows in (1, 8, 32)
        for kind in (BF16, E4M3)
    ),
    # subnormal numbers most of them, which tensor cores have to take for what they are
    _case(
        "released_small_e4m3",
        (1, 4, *_RELEASED, 1024, 64),
        (2051, 2051),
        BF16,
        cache=E4M3,
        kept=2.0**-8,
        device_only=True,
    ),
    _case("released_chunk", (1, 512, *_RELEASED, 1024, 64), (2051, 2051), BF16, device_only=True),
    *(
        _chunk(
            f"released_chunk_{name}",
            places,
            start,
            (*_RELEASED, 64),
            512,
            cache=kind,
            device_only=True,
        )
        for name, places, start, kind in (
            # 4 and 128 queries that select whole blocks
            ("of_7_at_64k", 7, 65024, BF16),
            ("of_7_at_64k_e4m3", 7, 65024, E4M3),
            ("of_131_at_64k", 131, 65024, BF16),
            ("from_0", 512, 0, BF16),
            ("from_2k", 2048, 2048, BF16),
            ("at_64k", 512, 65024, BF16),
            ("of_2048_at_64k", 2048, 63488, BF16),
            ("of_2048_at_64k_e4m3", 2048, 63488, E4M3),
        )
    ),
)

# checked on a device, not timed: NUM-03 around the widest window that is all selected, NUM-08 and
# NUM-09 rows of very different lengths
EDGES = tuple(
    case
    for kind, suffix in ((BF16, ""), (E4M3, "_e4m3"))
    for case in (
        _chunk(f"edge_2047_to_2055{suffix}", 12, 2046, (*_RELEASED, 64), 512, cache=kind),
        _case(
            f"edge_ragged{suffix}",
            (8, 4, *_RELEASED, 400, 64),
            (2051, (0, 1, 3, 64, 2047, 2048, 2050, 2051)),
            BF16,
            cache=kind,
            paged=True,
        ),
    )
)
