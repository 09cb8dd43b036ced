"""DecodeState: every cache and every speculative buffer of a set of requests, as one pytree.

Each request has a slot. What grows with the context lies in pages that slots own through a page
table; everything else is per slot. The first word of a field's annotation says which: `slots` or
`pages`. Token `i` of a slot stands in page `page_table[slot, i // page_size]`, place
`i % page_size`; its compressed block `i // ratio` in the same page, place `i % page_size // ratio`.

Only the first `length[slot]` tokens are live. What lies beyond (rejected drafts, earlier tenants,
NaN) is never read: readers mask before they use a value, writers drop what has no place.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from qwen4jax.config import LINEAR, Config
from qwen4jax.params import axis_sizes

DEFAULT_PAGE_SIZE = 64
MAX_DRAFT = 7


class AttentionCache(struct.PyTreeNode):
    """What one sparse-attention layer keeps.

    Attributes:
        key: normed and rotated keys.
        value: values.
        index_key: compressed index keys, one per complete block of `ratio` tokens.
        ring: raw index keys of the last tokens, token `i` at `i % ring`; wide enough that the rows
            of a speculative round never reach a committed key of the open block.
    """

    key: Float[Array, "pages page_size kv_heads head_dim"]
    value: Float[Array, "pages page_size kv_heads head_dim"]
    index_key: Float[Array, "pages page_blocks index_head_dim"]
    ring: Float[Array, "slots ring index_head_dim"]


class DeltaNetState(struct.PyTreeNode):
    """What one Gated DeltaNet layer keeps.

    Attributes:
        conv: the last inputs of the causal convolution, before it.
        recurrent: the state matrices, float32.
    """

    conv: Float[Array, "slots linear_history linear_qkv"]
    recurrent: Float[Array, "slots linear_value_heads linear_key_head_dim linear_value_head_dim"]


class DecodeState(struct.PyTreeNode):
    """The state of `slots` requests.

    Attributes:
        length: committed tokens.
        page_table: pages of each slot in order, -1 where none is assigned.
        rope_delta: rotary position minus index of the next text token.
        rope_ring: (temporal, height, width) rotary positions of the last tokens, as `ring`.
        ngram_ids: the last ids, oldest first; the end-of-sequence id where there were none.
        residual: residual streams of the last committed token, the draft head's input.
        token: the token that was sampled and not fed yet; -1 before the first.
        drafts: what the draft head proposes to follow `token`.
        layers: one cache per layer.
        ple: convolution histories of the n-gram layers, oldest first, after their norm.
        mtp: the draft head's cache, or None without one. Row `i` of it pairs the residual of token
            `i` with token `i + 1`.
    """

    length: Int[Array, "slots"]
    page_table: Int[Array, "slots pages_per_slot"]
    rope_delta: Int[Array, "slots"]
    rope_ring: Int[Array, "slots ring three"]
    ngram_ids: Int[Array, "slots ngram_history"]
    residual: Float[Array, "slots stream_hidden"]
    token: Int[Array, "slots"]
    drafts: Int[Array, "slots drafts"]
    layers: tuple[AttentionCache | DeltaNetState, ...]
    ple: tuple[Float[Array, "slots ple_history stream_hidden"], ...]
    mtp: AttentionCache | None

    @property
    def slots(self) -> int:
        """Number of requests there is room for."""
        return self.length.shape[0]

    @property
    def capacity(self) -> int:
        """Most tokens one slot's page table can hold."""
        return self.page_table.shape[1] * self.page_size

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        caches = [c for c in (*self.layers, self.mtp) if isinstance(c, AttentionCache)]
        return caches[0].key.shape[1] if caches else DEFAULT_PAGE_SIZE


def ring_size(ratio: int, drafts: int) -> int:
    """Raw index keys to keep so that `drafts` rejected rows never hit the open block's keys.

    A round writes up to `drafts` rows past the accepted ones, the open block has up to `ratio - 1`
    committed keys; rounded up to whole blocks.
    """
    return ratio * math.ceil((ratio + drafts) / ratio)


def state_axis_sizes(
    config: Config, *, slots: int, pages: int, pages_per_slot: int, page_size: int, drafts: int
) -> dict[str, int]:
    """Size of every logical axis of the state."""
    c = config
    return axis_sizes(c) | {
        "slots": slots,
        "pages": pages,
        "pages_per_slot": pages_per_slot,
        "page_size": page_size,
        "page_blocks": page_size // c.indexer_compress_ratio,
        "kv_heads": c.num_key_value_heads,
        "ring": ring_size(c.indexer_compress_ratio, max(drafts, 1)),
        "three": 3,
        "linear_history": c.linear_conv_kernel_dim - 1,
        "linear_key_head_dim": c.linear_key_head_dim,
        "ngram_history": c.ngram_size - 1,
        "ple_history": (c.ple_conv_kernel_size - 1) * c.ngram_size,
        "drafts": drafts,
    }


def abstract_state(
    config: Config,
    *,
    slots: int,
    max_length: int,
    drafts: int = 3,
    pages: int | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    kv_dtype: str | None = None,
) -> DecodeState:
    """Shapes and dtypes of a state, without allocating it.

    Args:
        config: of the model.
        slots: requests held at once.
        max_length: tokens one slot may reach, rounded up to whole pages.
        drafts: draft tokens per speculative round, 0 to 7.
        pages: pages of the pool; by default enough for every slot at `max_length`.
        page_size: tokens in a page, a multiple of the indexer's compression ratio.
        kv_dtype: dtype of keys and values, by default `config.dtype`; `float8_e4m3fn` halves them.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    ratio = config.indexer_compress_ratio
    if page_size <= 0 or page_size % ratio:
        raise ValueError(f"page_size: {page_size} is not a multiple of the block size {ratio}")
    if slots < 1:
        raise ValueError(f"slots: {slots} is under 1")
    if not 0 <= drafts <= MAX_DRAFT:
        raise ValueError(f"drafts: {drafts} is not in 0..{MAX_DRAFT}")
    if not 1 <= max_length <= config.max_position_embeddings:
        raise ValueError(
            f"max_length: {max_length} is not in 1..{config.max_position_embeddings}, "
            "the model's max_position_embeddings"
        )
    per_slot = math.ceil(max_length / page_size)
    sizes = state_axis_sizes(
        config,
        slots=slots,
        pages=slots * per_slot if pages is None else pages,
        pages_per_slot=per_slot,
        page_size=page_size,
        drafts=drafts,
    )
    attention = _declare(AttentionCache, sizes, config.dtype, {"key": kv_dtype, "value": kv_dtype})
    delta = _declare(DeltaNetState, sizes, config.dtype, {"recurrent": "float32"})
    history = (slots, sizes["ple_history"], sizes["stream_hidden"])
    return _declare(
        DecodeState,
        sizes,
        config.dtype,
        {},
        layers=tuple(delta if kind == LINEAR else attention for kind in config.layer_types),
        ple=tuple(jax.ShapeDtypeStruct(history, config.dtype) for _ in config.ple_layer_ids),
        mtp=attention if config.mtp_num_hidden_layers else None,
    )


def init_state(config: Config, *, contiguous: bool = True, **sizes: Any) -> DecodeState:
    """An empty state on the default device; arguments as `abstract_state`.

    Args:
        config: of the model.
        contiguous: give each slot its pages now, in order. Otherwise no slot has pages until
            `assign_pages`.
        **sizes: as `abstract_state`.

    Raises:
        ValueError: as `abstract_state`, or the pool has too few pages to give each slot its own.
    """
    shapes = abstract_state(config, **sizes)
    wanted, pages = shapes.page_table.size, sizes.get("pages")
    if contiguous and pages is not None and pages < wanted:
        raise ValueError(
            f"pages: {pages} are too few for {shapes.slots} slots of "
            f"{shapes.page_table.shape[1]}; contiguous=False leaves them unassigned"
        )
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    slots, per_slot = state.page_table.shape
    table = jnp.full((slots, per_slot), -1, jnp.int32)
    if contiguous:
        table = jnp.arange(slots * per_slot, dtype=jnp.int32).reshape(slots, per_slot)
    return state.replace(
        page_table=table,
        ngram_ids=jnp.full_like(state.ngram_ids, config.hash_eos_token_id),
        token=jnp.full_like(state.token, -1),
    )


def reset_slots(config: Config, state: DecodeState, slots: Int[Array, " B"]) -> DecodeState:
    """Empties `slots` for new tenants; their pages stay assigned."""
    fresh = _map_slots(jnp.zeros_like, take_slots(state, slots))
    fresh = fresh.replace(
        page_table=state.page_table.at[slots].get(mode="clip"),
        ngram_ids=jnp.full_like(fresh.ngram_ids, config.hash_eos_token_id),
        token=jnp.full_like(fresh.token, -1),
    )
    return put_slots(state, slots, fresh)


def assign_pages(
    state: DecodeState, slot: int | Array, pages: Int[Array, " pages_per_slot"]
) -> DecodeState:
    """Gives `slot` its pages, in order and padded with -1."""
    return state.replace(page_table=state.page_table.at[slot].set(pages, mode="drop"))


def take_slots(state: DecodeState, slots: Int[Array, " B"]) -> DecodeState:
    """The state of some slots, in the given order, on the same pages.

    A slot number past the last gives a copy of the last slot; `put_slots` drops it again.
    """
    return _map_slots(lambda x: x.at[slots].get(mode="clip"), state)


def put_slots(state: DecodeState, slots: Int[Array, " B"], rows: DecodeState) -> DecodeState:
    """`state` with `slots` replaced by `rows`, whose pages are the newer ones.

    Slot numbers past the last are dropped; the others must differ.
    """
    return _map_slots(lambda x, row: x.at[slots].set(row, mode="drop"), state, rows)


def _map_slots(f, state: DecodeState, *rows: DecodeState) -> DecodeState:
    """Applies `f` to the arrays that are per slot; takes pages from the last argument."""

    def walk(kind: type, *blocks: Any) -> Any:
        fields = {}
        for field in dataclasses.fields(kind):
            values = [getattr(b, field.name) for b in blocks]
            if values[0] is None:
                fields[field.name] = None
            elif isinstance(values[0], tuple):
                fields[field.name] = tuple(
                    walk(type(v[0]), *v) if dataclasses.is_dataclass(v[0]) else f(*v)
                    for v in zip(*values, strict=True)
                )
            elif dataclasses.is_dataclass(values[0]):
                fields[field.name] = walk(type(values[0]), *values)
            elif _axes(field)[0] == "pages":
                fields[field.name] = values[-1]
            else:
                fields[field.name] = f(*values)
        return kind(**fields)

    return walk(DecodeState, state, *rows)


def _axes(field: dataclasses.Field) -> tuple[str, ...]:
    declared: Any = field.type
    return tuple(declared.dim_str.split())


def _declare(
    kind: type, sizes: dict[str, int], dtype: str, dtypes: dict[str, str | None], **given: Any
) -> Any:
    """A block of `ShapeDtypeStruct`s; `given` fields are taken as they are."""
    values = dict(given)
    for field in dataclasses.fields(kind):
        if field.name not in given:
            declared: Any = field.type
            usual = "int32" if declared.dtype is Int else dtype
            shape = tuple(sizes[axis] for axis in _axes(field))
            values[field.name] = jax.ShapeDtypeStruct(shape, dtypes.get(field.name) or usual)
    return kind(**values)
