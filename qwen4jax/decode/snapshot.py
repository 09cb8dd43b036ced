"""Going back to before a round: what stops of text need, which the host sees a burst late.

A stop string may end inside a burst that is already committed. The row's text is cut on the host;
where its state has to go on (the next turn of a chat) it is restored and fed the tokens that stay.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from qwen4jax.decode.prefill import prefill
from qwen4jax.params import Params
from qwen4jax.state import AttentionCache, DecodeState, put_slots, take_slots


@struct.dataclass
class Snapshot:
    """Some slots as they were at one time, without their pages.

    Attributes:
        slots: which.
        rows: their state, without the pages' contents.
    """

    slots: Int[Array, " B"]
    rows: DecodeState


@jax.jit
def take_snapshot(state: DecodeState, slots: Int[Array, " B"]) -> Snapshot:
    """What it takes to bring `slots` back to where they are now.

    It copies what a slot holds beside its pages, whose live tokens no later step writes to. So it
    serves after any number of rounds, while a slot has the same tenant and pages. At the released
    model's size that is 114 MB per slot: take it of the rows that may need it.

    Args:
        state: before a round, which may then donate it.
        slots: numbers of slots, distinct.
    """
    return Snapshot(slots=slots, rows=_with_pages(take_slots(state, slots), None))


@functools.partial(jax.jit, donate_argnames=("state",))
def restore(state: DecodeState, snapshot: Snapshot) -> DecodeState:
    """The state with the snapshot's slots as they were; the others, and all pages, as they are."""
    table = state.page_table.at[snapshot.slots].get(mode="clip")
    rows = _with_pages(snapshot.rows, state).replace(page_table=table)
    return put_slots(state, snapshot.slots, rows)


def restore_and_replay(
    params: Params,
    state: DecodeState,
    snapshot: Snapshot,
    kept: Sequence[Sequence[int]],
    *,
    chunk: int = 64,
) -> tuple[DecodeState, Float[Array, "B D"]]:
    """Cuts committed tokens off: restores slots and feeds them the tokens that stay.

    The state is then that of a prompt of exactly these tokens: `prefill` goes on with the next
    turn, and `begin_slots` samples what follows. Where nothing stays, `restore` alone is enough.

    Args:
        params: of the model.
        state: donated.
        snapshot: of slots that have run since.
        kept: of each slot the tokens to feed, at least the one that was pending at the snapshot.
        chunk: places of one compiled step.

    Returns:
        The state, and the output head's input at each slot's last token.

    Raises:
        ValueError: a row does not begin with its pending token or has no room; nothing has
            changed then. The message names the row.
    """
    pending, lengths, slots = (
        np.asarray(x) for x in (snapshot.rows.token, snapshot.rows.length, snapshot.slots)
    )
    for row, ids in enumerate(kept):
        if not len(ids) or ids[0] != pending[row]:
            raise ValueError(f"kept[{row}]: does not begin with the pending token {pending[row]}")
        if lengths[row] + len(ids) > state.capacity:
            raise ValueError(
                f"kept[{row}]: {len(ids)} tokens after {lengths[row]} do not fit a slot of "
                f"{state.capacity}"
            )
    return prefill(params, restore(state, snapshot), kept, slots.tolist(), chunk=chunk)


def _with_pages(rows: DecodeState, source: DecodeState | None) -> DecodeState:
    """`rows` with the pages of `source`, or without any."""

    def cache(own: Any, other: Any) -> Any:
        if not isinstance(own, AttentionCache):
            return own
        pages = ("key", "value", "index_key")
        return own.replace(**{name: getattr(other, name, None) for name in pages})

    caches = [None] * len(rows.layers) if source is None else source.layers
    return rows.replace(
        layers=tuple(map(cache, rows.layers, caches)),
        mtp=cache(rows.mtp, None if source is None else source.mtp),
    )
