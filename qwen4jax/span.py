"""Where the rows of one step stand: positions and cache places, computed once for all layers."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from qwen4jax.config import Config
from qwen4jax.state import AttentionCache, DecodeState


class Span(struct.PyTreeNode):
    """The next tokens of every row: `T` places of which the first `count` are filled.

    Places past the end of an array mark what is not there: writers drop them.

    Attributes:
        start: index of the first token.
        count: tokens that are there.
        index: index of each token in its request; -1 where there is none.
        slot: place of each token in the pages, `pages * page_size` where there is none.
        ring: place of each token in the rings; their size where it is not kept.
        complete: complete blocks that each token sees.
        rope_positions: (temporal, height, width) rotary positions.
        cos, sin: rotary table of each token, float32.
        block: blocks that may end in the span.
        block_slot: place of each such block in the pages; past their end where it does not end.
        block_cos, block_sin: rotary table of each block's first token, float32.
        page_table: pages of each row.
        filled: for every place one that is filled, as `b * T + t`: itself where it is one. The
            others are spread evenly over the rows that have some, and over their tokens; where no
            row has one they stay themselves.
    """

    start: Int[Array, " B"]
    count: Int[Array, " B"]
    index: Int[Array, "B T"]
    slot: Int[Array, "B T"]
    ring: Int[Array, "B T"]
    complete: Int[Array, "B T"]
    rope_positions: Int[Array, "B T 3"]
    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]
    block: Int[Array, "B N"]
    block_slot: Int[Array, "B N"]
    block_cos: Float[Array, "B N F"]
    block_sin: Float[Array, "B N F"]
    page_table: Int[Array, "B P"]
    filled: Int[Array, "B T"]

    @property
    def valid(self) -> Bool[Array, "B T"]:
        """Which places are filled."""
        return self.index >= 0


def make_span(
    config: Config,
    state: DecodeState,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    places: int,
    rope_positions: Int[Array, "B T 3"] | None = None,
) -> Span:
    """The span of `places` tokens from `start`, the first `count` of them filled.

    A `start` of -1 makes the first place one before the request: it is not filled.

    Args:
        config: of the model.
        state: gives the page table, the rings and each row's rotary offset.
        start: index of each row's first token.
        count: filled places of each row.
        places: static number of places.
        rope_positions: three-axis positions; by default those of text.
    """
    ratio, page_size = config.indexer_compress_ratio, state.page_size
    ring = state.rope_ring.shape[1]
    index = start[:, None] + jnp.arange(places, dtype=jnp.int32)
    end = (start + count)[:, None]
    valid = (index >= 0) & (index < end)
    if rope_positions is None:
        text = index + state.rope_delta[:, None]
        rope_positions = jnp.broadcast_to(text[..., None], (*text.shape, 3))
    cos, sin = rope_table(config, rope_positions)

    block = jnp.floor_divide(start, ratio)[:, None] + jnp.arange((places - 1) // ratio + 1)
    first, last = block * ratio, block * ratio + ratio - 1
    ends_here = (last >= jnp.maximum(start, 0)[:, None]) & (last < end)
    block_positions = member_rows(state.rope_ring, rope_positions, start, first)
    block_cos, block_sin = rope_table(config, block_positions)

    slots = physical(state.page_table, index, page_size)
    block_slots = physical(state.page_table, block, page_size // ratio)
    pages = _page_count(state)
    return Span(
        start=start,
        count=count,
        index=jnp.where(valid, index, -1),
        slot=jnp.where(valid & (slots >= 0), slots, pages * page_size),
        ring=jnp.where(valid & (index >= end - ring), index % ring, ring),
        complete=jnp.where(valid, (index + 1) // ratio, 0),
        rope_positions=rope_positions,
        cos=cos,
        sin=sin,
        block=block,
        block_slot=jnp.where(
            ends_here & (block_slots >= 0), block_slots, pages * (page_size // ratio)
        ),
        block_cos=block_cos,
        block_sin=block_sin,
        page_table=state.page_table,
        filled=_filled(start, count, places),
    )


def _filled(start: Int[Array, " B"], count: Int[Array, " B"], places: int) -> Int[Array, "B T"]:
    """`Span.filled` of rows whose first place is not filled where they start at -1."""
    first = jnp.where(start < 0, 1, 0)
    tokens = jnp.maximum(count - first, 0)
    live = tokens > 0
    row = jnp.arange(len(start), dtype=jnp.int32)
    rank = jnp.sum(live & (row < row[:, None]), axis=1, dtype=jnp.int32)
    # the n-th row without a token takes the live row of rank n; each looks at all, for a sort would
    # be several launches
    wanted = (row - rank) % jnp.maximum(jnp.sum(live, dtype=jnp.int32), 1)
    other = jnp.argmax(live & (rank == wanted[:, None]), axis=1).astype(jnp.int32)
    taken = jnp.where(live, row, other)
    place = jnp.arange(places, dtype=jnp.int32)
    skipped = first[taken][:, None]
    within = skipped + (place - skipped) % jnp.maximum(tokens[taken], 1)[:, None]
    own = row[:, None] * places + place
    return jnp.where(live.any(), taken[:, None] * places + within, own)


def member_rows(
    ring: Array, rows: Array, start: Int[Array, " B"], index: Int[Array, "B M"]
) -> Array:
    """Per-token rows `[B, M, C]` of the tokens `index`, from the span or, before it, the ring.

    Args:
        ring: [B, ring, C], rows of earlier tokens, token `i` at `i % ring`.
        rows: [B, T, C], rows of the span's tokens.
        start: index of the span's first token.
        index: tokens wanted; those past the span's end give a row of no meaning.
    """
    local = index - start[:, None]
    kept = jnp.take_along_axis(ring, (index % ring.shape[1])[..., None], axis=1)
    here = jnp.clip(local, 0, rows.shape[1] - 1)
    new = jnp.take_along_axis(rows, here[..., None], axis=1)
    return jnp.where(local[..., None] < 0, kept, new)


def rope_table(
    config: Config, positions: Int[Array, "*rows 3"]
) -> tuple[Float[Array, "*rows F"], Float[Array, "*rows F"]]:
    """Cosine and sine of the rotary angles, float32, for interleaved three-axis positions.

    Pair `i` turns by the height position if `i % 3 == 1`, by the width position if `i % 3 == 2`,
    as far as `mrope_section` reaches, else by the temporal one (Qwen3-VL's interleaved M-RoPE).
    """
    rope = config.rope_parameters
    pairs = config.rotary_dim // 2
    pair = jnp.arange(pairs)
    axis = jnp.where(
        (pair % 3 == 1) & (pair < 3 * rope.mrope_section[1]),
        1,
        jnp.where((pair % 3 == 2) & (pair < 3 * rope.mrope_section[2]), 2, 0),
    )
    frequency = 1.0 / (rope.rope_theta ** (jnp.arange(pairs, dtype=jnp.float32) / pairs))
    angle = positions.astype(jnp.float32)[..., axis] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def physical(
    page_table: Int[Array, "B P"], index: Int[Array, "B *M"], per_page: int
) -> Int[Array, "B *M"]:
    """Places in the pages of tokens (or blocks) `index`, negative where there is none.

    Args:
        page_table: pages of each row in order, -1 where none is assigned.
        index: numbers within the row; negative ones have no place.
        per_page: tokens (or blocks) in a page.
    """
    flat = index.reshape(index.shape[0], -1)
    page = flat // per_page
    inside = (flat >= 0) & (page < page_table.shape[1])
    assigned = jnp.take_along_axis(page_table, jnp.clip(page, 0, page_table.shape[1] - 1), axis=1)
    place = jnp.where(inside & (assigned >= 0), assigned * per_page + flat % per_page, -1)
    return place.reshape(index.shape)


def _page_count(state: DecodeState) -> int:
    caches = [c for c in (*state.layers, state.mtp) if isinstance(c, AttentionCache)]
    return caches[0].key.shape[0] if caches else 0
