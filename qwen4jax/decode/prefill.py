"""Feeding known tokens: prompts in chunks of any length, and single tokens."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qwen4jax.layers.capture import Capture
from qwen4jax.model import commit, draft_step, head, read_out, step
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, put_slots, take_slots


def feed(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    rope_positions: Int[Array, "B T 3"] | None = None,
    capture: Capture | None = None,
) -> tuple[DecodeState, Float[Array, "B T D"]]:
    """Feeds the next `count` tokens of every slot and makes them live.

    The draft head follows one row behind: its row `i` needs token `i + 1`. So a span's rows begin
    with the token before it, whose residual the state keeps.

    Args:
        params: of the model.
        state: slots are the rows of `tokens`.
        tokens: ids in [0, vocab); what stands from `count` on is not looked at.
        count: tokens of each row; 0 changes nothing.
        rope_positions: three-axis positions; by default those of text.
        capture: of internals.

    Returns:
        The state and the output head's input at every place.
    """
    before = state
    state, pending = step(
        params, state, tokens, count, final=True, rope_positions=rope_positions, capture=capture
    )
    state = commit(state, pending, count)
    hidden = read_out(params, pending.residual)
    if state.mtp is not None:
        streams = pending.residual
        first = before.residual.reshape(streams.shape[0], 1, *streams.shape[2:])
        ring = before.rope_ring
        last_kept = ((before.length - 1) % ring.shape[1])[:, None, None]
        first_position = jnp.take_along_axis(ring, last_kept, axis=1)
        positions = jnp.concatenate([first_position, pending.span.rope_positions[:, :-1]], axis=1)
        # a long span has already overwritten the positions of the head's open block
        behind, _ = draft_step(
            params,
            state.replace(rope_ring=ring),
            tokens,
            jnp.concatenate([first.astype(streams.dtype), streams[:, :-1]], axis=1),
            before.length - 1,
            count,
            rope_positions=positions,
            capture=capture,
        )
        state = behind.replace(rope_ring=state.rope_ring)
    return state, hidden


@functools.partial(jax.jit, donate_argnames=("state",))
def prefill_chunk(
    params: Params,
    state: DecodeState,
    slots: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[DecodeState, Float[Array, "B D"]]:
    """Feeds a chunk of prompt to some slots.

    Args:
        params: of the model.
        state: donated.
        slots: of the rows; a number past the last slot is a row that is not there.
        tokens: next ids of each row.
        count: how many of them are there; 0 changes nothing.

    Returns:
        The state, and the output head's input at each row's last token (of no meaning where
        `count` is 0).
    """
    rows = take_slots(state, slots)
    count = jnp.where(slots < state.slots, count, 0)
    rows, hidden = feed(params, rows, tokens, count)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return put_slots(state, slots, rows), jnp.take_along_axis(hidden, last, axis=1)[:, 0]


@jax.jit
def logits_of(params: Params, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """float32 logits of output-head inputs."""
    return head(params, hidden[:, None])[:, 0]


def prefill(
    params: Params,
    state: DecodeState,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int],
    *,
    chunk: int = 512,
) -> tuple[DecodeState, Float[Array, "B D"]]:
    """Feeds prompts of any length to slots, `chunk` tokens of each at a time.

    Args:
        params: of the model.
        state: donated; the slots may hold earlier tokens, which the prompts then continue.
        prompts: ids of each row; checked by the caller.
        slots: of the rows, distinct.
        chunk: places of one compiled step.

    Returns:
        The state, and the output head's input at each prompt's last token.

    Raises:
        ValueError: a slot is not there or named twice, or has no room for its prompt; nothing has
            been fed then.
    """
    for row, slot in enumerate(slots):
        if not 0 <= slot < state.slots or slot in slots[:row]:
            raise ValueError(f"slots[{row}]: {slot} is not in 0..{state.slots - 1} or stands twice")
    lengths = np.asarray([len(p) for p in prompts])
    fed = np.asarray(state.length)[np.asarray(slots)]
    # pages may round a slot up past the longest context
    room = min(state.capacity, params.config.max_position_embeddings)
    for row, (old, new) in enumerate(zip(fed, lengths, strict=True)):
        if new < 1:
            raise ValueError(f"prompts[{row}]: is empty")
        if old + new > room:
            raise ValueError(
                f"prompts[{row}]: {new} tokens after {old} do not fit a slot of {room}"
            )
    where = jnp.asarray(slots, jnp.int32)
    result: Any = None
    for start in range(0, int(lengths.max()), chunk):
        count = np.clip(lengths - start, 0, chunk)
        tokens = np.zeros((len(prompts), chunk), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : count[row]] = prompt[start : start + chunk]
        counts = jnp.asarray(count, jnp.int32)
        state, hidden = prefill_chunk(params, state, where, jnp.asarray(tokens), counts)
        ends = jnp.asarray((count > 0) & (lengths <= start + chunk))[:, None]
        result = hidden if result is None else jnp.where(ends, hidden, result)
    return state, result


@functools.partial(jax.jit, donate_argnames=("state",))
def decode_token(
    params: Params, state: DecodeState, tokens: Int[Array, " B"], active: Array
) -> tuple[DecodeState, Float[Array, "B V"]]:
    """Feeds one token to every active slot: plain decoding, which the round is held against.

    Returns:
        The state and float32 logits of each slot (of no meaning where it is not active).
    """
    state, hidden = feed(params, state, tokens[:, None], active.astype(jnp.int32))
    return state, head(params, hidden)[:, 0]
