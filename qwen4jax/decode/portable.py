"""The decode state as a value: kept in a file, forked, moved between states of other sizes.

A file is one safetensors file: the leaves under their dotted names and, in its metadata, a
manifest of what they belong to. `fork`, `extract` and `graft` are pure functions; compiled, they
take slots as traced numbers.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from qwen4jax.config import Config
from qwen4jax.state import AttentionCache, DecodeState, abstract_state
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.names import leaves
from qwen4jax.weights.safetensors import LABELS, Output, TensorFile, write_file

FORMAT = 1
_MANIFEST = "manifest"
_SIZES = ("slots", "pages", "pages_per_slot", "page_size", "drafts", "kv_dtype")


def save_state(state: DecodeState, path: str | Path, config: Config) -> None:
    """Writes a state to one file, bit for bit; the file appears when it is complete.

    Args:
        state: of any size; its pages are kept whole, so `extract` a slot first to keep one.
        path: the file, replaced if it is there.
        config: of the model whose state it is.
    """
    host = [(name, np.asarray(leaf)) for name, leaf in leaves(state)]
    outputs = [
        Output(name, LABELS[array.dtype], array.shape, lambda array=array: array)
        for name, array in host
    ]
    fields = _fields(config)
    manifest = {
        "format": FORMAT,
        "package": f"qwen4jax {_version()}",
        "config": fields,
        "config_sha256": _digest(fields),
        "draft_head": state.mtp is not None,
        **_sizes(state, config),
        "crc32": {name: _checksum(array) for name, array in host},
    }
    write_file(Path(path), outputs, {_MANIFEST: json.dumps(manifest)})


def restore_state(path: str | Path, config: Config) -> DecodeState:
    """The state in a file, bit for bit, on the default device.

    Args:
        path: written by `save_state`.
        config: of the model that goes on from it.

    Raises:
        CheckpointError: the file is damaged, of another format, or of another model; the message
            says where they differ. Nothing has been allocated on the device then.
    """
    path = Path(path)
    file = TensorFile(path)
    manifest = _read_manifest(file, config)
    slots, pages, per_slot, page_size, drafts, kv_dtype = (manifest[name] for name in _SIZES)
    try:
        expected = abstract_state(
            config if manifest["draft_head"] else config.replace(mtp_num_hidden_layers=0),
            slots=slots,
            max_length=min(per_slot * page_size, config.max_position_embeddings),
            drafts=drafts,
            pages=pages,
            page_size=page_size,
            kv_dtype=kv_dtype,
        )
    except (TypeError, ValueError) as e:
        raise CheckpointError(path, [f"the manifest's sizes are those of no state: {e}"]) from None
    declared = leaves(expected)
    wanted = {name: (LABELS[np.dtype(leaf.dtype)], leaf.shape) for name, leaf in declared}
    found = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    problems = [
        f"{name}: {_described(found.get(name))}, the manifest's sizes give "
        f"{_described(wanted.get(name))}"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    ]
    if problems:
        raise CheckpointError(path, problems)
    arrays = {name: file.array(name) for name in wanted}
    problems = [
        f"{name}: is not what was saved (checksum)"
        for name, array in arrays.items()
        if manifest["crc32"].get(name) != _checksum(array)
    ]
    if problems:
        raise CheckpointError(path, problems)
    # copies: the CPU backend would otherwise go on reading the file
    copies = [jnp.array(arrays[name], copy=True) for name, _ in declared]
    return jax.tree.structure(expected).unflatten(copies)


def fork(state: DecodeState, copies: int) -> DecodeState:
    """A state of `copies` slots that all go on from the one slot of `state`.

    Each has pages of its own, all that its page table has room for.

    Args:
        state: of one slot.
        copies: static.

    Raises:
        ValueError: the state has several slots, or `copies` is under 1.
    """
    if copies < 1:
        raise ValueError(f"copies: {copies} is under 1")
    _one_slot(state, "state")
    return _fork(state, copies)


@functools.partial(jax.jit, static_argnames=("copies",))
def _fork(state: DecodeState, copies: int) -> DecodeState:
    per_slot = state.page_table.shape[1]
    alone = _extract(state, jnp.int32(0), per_slot)

    def repeat(x: Array) -> Array:
        return jnp.repeat(x, copies, axis=0)

    def tile(x: Array) -> Array:
        return jnp.tile(x, (copies,) + (1,) * (x.ndim - 1))

    many = _each(alone, row=repeat, ring=repeat, pages=tile)
    pages = jnp.arange(copies * per_slot, dtype=jnp.int32)
    return many.replace(drafts=repeat(alone.drafts), page_table=pages.reshape(copies, per_slot))


def extract(
    state: DecodeState, slot: int | Int[Array, ""], *, pages: int | None = None
) -> DecodeState:
    """The state of one slot alone, on pages in order.

    Pages without live tokens hold zeros: nothing of other tenants goes along.

    Args:
        state: of any number of slots.
        slot: which.
        pages: how many pages the result has, static; by default as many as the slot may have.

    Raises:
        ValueError: there is no such slot, or its tokens do not fit `pages`. (Slot and length are
            not known in a compiled function, which checks them before.)
    """
    room = state.page_table.shape[1]
    pages = room if pages is None else pages
    if not 1 <= pages <= room:
        raise ValueError(f"pages: {pages} is not in 1..{room}, the pages of a slot")
    _check_slot(state, slot)
    if pages < room and _known(slot, state.length):
        length = int(state.length[slot])
        if length > pages * state.page_size:
            raise ValueError(f"pages: {pages} of {state.page_size} do not hold {length} tokens")
    return _extract(state, jnp.asarray(slot, jnp.int32), pages)


@functools.partial(jax.jit, static_argnames=("pages",))
def _extract(state: DecodeState, slot: Int[Array, ""], pages: int) -> DecodeState:
    table = state.page_table[slot, :pages]
    live = _live_pages(state.length[slot], pages, state.page_size) & (table >= 0)

    def row(x: Array) -> Array:
        return x[slot][None]

    def compact(x: Array) -> Array:
        kept = live.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(kept, x.at[table].get(mode="clip"), jnp.zeros((), x.dtype))

    alone = _each(state, row=row, ring=row, pages=compact)
    in_order = jnp.arange(pages, dtype=jnp.int32)[None]
    return alone.replace(drafts=row(state.drafts), page_table=in_order)


def graft(state: DecodeState, slot: int | Int[Array, ""], source: DecodeState) -> DecodeState:
    """`state` with the one slot of `source` in `slot`, on the pages that `slot` has.

    The number of drafts may differ. Drafts that the source lacks are proposed as id 0, to be
    rejected; if it decoded without drafts its draft head stayed behind, which costs drafts too,
    but changes no output.

    Args:
        state: of any number of slots; in a compiled function that has it donated, it is updated in
            place.
        slot: whose pages must be assigned for all tokens of the source.
        source: of one slot, with the same page size and no more pages.

    Raises:
        ValueError: the two do not fit; the message says where. (Slot and pages are not known in a
            compiled function: there what has no place is dropped.)
    """
    _one_slot(source, "source")
    _check_fit(state, source)
    _check_slot(state, slot)
    if _known(slot, state.page_table, source.length):
        needed = -(-int(source.length[0]) // state.page_size)
        lacking = np.flatnonzero(np.asarray(state.page_table[slot, :needed]) < 0)
        if len(lacking):
            raise ValueError(
                f"slot: {int(slot)} has no page for token {lacking[0] * state.page_size} of the "
                f"{int(source.length[0])} of the source"
            )
    return _graft(state, jnp.asarray(slot, jnp.int32), source)


@jax.jit
def _graft(state: DecodeState, slot: Int[Array, ""], source: DecodeState) -> DecodeState:
    pages = source.page_table.shape[1]
    length, own = source.length[0], source.page_table[0]
    # one that is not there is past the last for every write
    slot = jnp.where(slot < 0, state.slots, slot)
    table = state.page_table.at[slot, :pages].get(mode="fill", fill_value=-1)
    placed = _live_pages(length, pages, state.page_size) & (table >= 0)

    def row(x: Array, new: Array) -> Array:
        return x.at[slot].set(new[0], mode="drop")

    def ring(x: Array, new: Array) -> Array:
        # each place gets the last token that belongs there; the live ones are in both rings
        last = length - 1
        token = last - (last - jnp.arange(x.shape[1])) % x.shape[1]
        return x.at[slot].set(new[0, token % new.shape[1]], mode="drop")

    def paged(x: Array, new: Array) -> Array:
        target = jnp.where(placed, table, x.shape[0])
        return x.at[target].set(new.at[own].get(mode="clip"), mode="drop")

    drafts = jnp.zeros_like(state.drafts[0])
    common = min(drafts.shape[0], source.drafts.shape[1])
    drafts = drafts.at[:common].set(source.drafts[0, :common])
    grafted = _each(state, source, row=row, ring=ring, pages=paged)
    return grafted.replace(drafts=state.drafts.at[slot].set(drafts, mode="drop"))


def _each(*states: DecodeState, row: Callable, ring: Callable, pages: Callable) -> DecodeState:
    """A state whose arrays are made from those of `states`, by kind.

    The page table and the drafts are left as they are in the first.
    """

    def cache(first: Any, *others: Any) -> Any:
        if first is None:
            return None
        kinds = {"conv": row, "recurrent": row}
        if isinstance(first, AttentionCache):
            kinds = {"key": pages, "value": pages, "index_key": pages, "ring": ring}
        blocks = (first, *others)
        return first.replace(**{n: f(*(getattr(b, n) for b in blocks)) for n, f in kinds.items()})

    rows = ("length", "rope_delta", "ngram_ids", "residual", "token")
    return states[0].replace(
        **{name: row(*(getattr(s, name) for s in states)) for name in rows},
        rope_ring=ring(*(s.rope_ring for s in states)),
        layers=tuple(cache(*blocks) for blocks in zip(*(s.layers for s in states), strict=True)),
        ple=tuple(row(*histories) for histories in zip(*(s.ple for s in states), strict=True)),
        mtp=cache(*(s.mtp for s in states)),
    )


def _live_pages(length: Array, pages: int, page_size: int) -> Array:
    return jnp.arange(pages) * page_size < length


def _known(*values: Any) -> bool:
    return not any(isinstance(value, Tracer) for value in values)


def _one_slot(state: DecodeState, name: str) -> None:
    if state.slots != 1:
        raise ValueError(f"{name}: has {state.slots} slots, one is expected; `extract` it")


def _check_slot(state: DecodeState, slot: Any) -> None:
    if _known(slot) and not 0 <= int(slot) < state.slots:
        raise ValueError(f"slot: {int(slot)} is not in [0, {state.slots})")


def _check_fit(state: DecodeState, source: DecodeState) -> None:
    if state.page_size != source.page_size:
        raise ValueError(f"source: pages of {source.page_size} tokens, not of {state.page_size}")
    room, wanted = state.page_table.shape[1], source.page_table.shape[1]
    if wanted > room:
        raise ValueError(f"source: {wanted} pages, a slot of the state has {room}")
    if state.mtp is not None and source.mtp is None:
        raise ValueError("source: has no draft head's cache, which the state has")
    if state.mtp is None:
        source = source.replace(mtp=None)
    found = []
    for whole in (state, source):
        # the first axis counts slots or pages, that after it in a ring follows the drafts
        kinds = {
            n: (x.dtype.name, x.shape[2 if n.endswith("ring") else 1 :]) for n, x in leaves(whole)
        }
        found.append({n: kind for n, kind in kinds.items() if n not in ("page_table", "drafts")})
    ours, theirs = found
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"source: {name} has {_described(theirs.get(name))} for each slot or page, the "
                f"state {_described(ours.get(name))}"
            )


def _sizes(state: DecodeState, config: Config) -> dict[str, Any]:
    caches = [c for c in (*state.layers, state.mtp) if isinstance(c, AttentionCache)]
    per_slot = state.page_table.shape[1]
    return {
        "slots": state.slots,
        "pages": caches[0].key.shape[0] if caches else state.slots * per_slot,
        "pages_per_slot": per_slot,
        "page_size": state.page_size,
        "drafts": state.drafts.shape[1],
        "kv_dtype": caches[0].key.dtype.name if caches else config.dtype,
    }


def _read_manifest(file: TensorFile, config: Config) -> dict[str, Any]:
    raw = file.metadata.get(_MANIFEST)
    if raw is None:
        raise CheckpointError(file.path, ["is no decode state: it has no manifest"])
    try:
        manifest = json.loads(raw)
    except (TypeError, ValueError) as e:
        raise CheckpointError(file.path, [f"the manifest is no JSON: {e}"]) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(file.path, [f"format {found!r}, this version reads {FORMAT}"])
    required = {*_SIZES, "config", "config_sha256", "draft_head", "crc32"}
    if missing := sorted(required - set(manifest)):
        raise CheckpointError(file.path, [f"the manifest lacks {', '.join(missing)}"])
    theirs, ours = manifest["config"], _fields(config)
    if _digest(theirs) != manifest["config_sha256"]:
        raise CheckpointError(file.path, ["the manifest's configuration was changed"])
    problems = [
        f"config: {name} is {theirs.get(name)!r} in the file, {value!r} in the model"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    problems += [f"config: the model has no {name}" for name in theirs if name not in ours]
    if problems:
        raise CheckpointError(file.path, problems)
    return manifest


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _fields(config: Config) -> dict[str, Any]:
    """The configuration as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _version() -> str:
    try:
        return importlib.metadata.version("qwen4jax")
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree"
