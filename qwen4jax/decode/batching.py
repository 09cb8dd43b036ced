"""Continuous batching: requests through a fixed number of slots, one compiled round at a time.

The host keeps one round in flight: the next is dispatched before the last one's tokens are read,
so it learns of an end one round late. On the device the row has stopped by then, by ids and
lengths; a stop string is found by the host, which cuts the text and lets the extra round go.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from qwen4jax.decode.burst import Sent, empty, fields_of, to_host
from qwen4jax.decode.capacity import require_room
from qwen4jax.decode.options import Row, make_controls
from qwen4jax.decode.portable import graft
from qwen4jax.decode.prefill import feed
from qwen4jax.decode.requests import Request
from qwen4jax.decode.round import begin, next_round
from qwen4jax.decode.running import Delta, Running, now
from qwen4jax.decode.stopping import Controls, FinishReason, set_row
from qwen4jax.decode.text import Tokenizer
from qwen4jax.model import read_out
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, init_state, put_slots, reset_slots, take_slots


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a compilation depends on besides the model.

    Attributes:
        slots: requests that run together.
        max_length: tokens a slot can hold.
        drafts: per round, 0 to 7.
        chunk: prompt tokens of each row in one prefill step.
        kv_dtype: of keys and values; None is the model's.
        rows: most prompts of a prefill step; more would keep the running rows waiting longer.
        ends: shapes (rows, tokens) of smaller steps for what is left of a prompt, by tokens. A
            request's steps depend on its own length alone, and with them its rounding.
    """

    slots: int
    max_length: int
    drafts: int
    chunk: int
    kv_dtype: str | None = None
    rows: int = 4
    ends: tuple[tuple[int, int], ...] = ()

    def prefill_shape(self, left: int) -> tuple[int, int]:
        """(rows, tokens) of the step that feeds a prompt of which `left` tokens are left."""
        whole = (self.rows, self.chunk)
        rows, tokens = next((shape for shape in self.ends if shape[1] >= left), whole)
        return min(rows, self.slots), tokens


class Engine:
    """Runs requests through slots on one device.

    Attributes:
        running: requests by slot.
        finished: requests that have ended, by number; the caller may take them out.
        rounds: rounds dispatched.
        prefills: prefill steps dispatched.
    """

    def __init__(
        self,
        params: Params,
        sizes: Sizes,
        mode: Controls,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        logprobs: bool = False,
        top: int = 0,
        source: DecodeState | None = None,
    ):
        """An engine with all slots free.

        Args:
            params: of the model.
            sizes: of the compiled programs.
            mode: controls whose mode serves every request to come.
            tokenizer: for texts and stop strings.
            eos_ids: that end a request.
            logprobs: whether deltas have them.
            top: how many of the most probable ids deltas have beside `logprobs`.
            source: a state of one slot that every request continues.
        """
        self.params, self.sizes, self.mode = params, sizes, mode
        self.running: dict[int, Running] = {}
        self.finished: dict[int, Running] = {}
        self.rounds = self.prefills = 0
        self._tokenizer, self._eos_ids = tokenizer, tuple(eos_ids)
        # static arguments of the programs
        self._wanted: dict[str, Any] = {"logprobs": logprobs or top > 0, "top": top}
        # whose prompt is not complete, the next to be fed first
        self._feeding: collections.deque[Running] = collections.deque()
        # of the last prefill steps, to wait for
        self._fed: collections.deque[Array] = collections.deque(maxlen=2)
        self._source = source
        self._history = 0 if source is None else int(source.length[0])
        shapes: dict[str, Any] = dict(
            slots=sizes.slots,
            max_length=sizes.max_length,
            drafts=sizes.drafts,
            kv_dtype=sizes.kv_dtype,
        )
        require_room(params.config, **shapes, prefill=(min(sizes.rows, sizes.slots), sizes.chunk))
        self.state = init_state(params.config, **shapes)
        vocab = params.config.vocab_size
        self._controls = make_controls([], sizes.slots, vocab, like=mode)
        self._active = jnp.zeros(sizes.slots, bool)
        self._room = empty(sizes.slots, sizes.drafts, **self._wanted)
        # results of a program with a part in host memory are tied to their device: the first call's
        # arguments as well, or the second would be compiled again
        (device,) = self._active.devices()
        self.state, self._controls, self._active, self._room = jax.device_put(
            (self.state, self._controls, self._active, self._room), device
        )
        self._round_fields = fields_of(self._room)
        self._first_fields = fields_of(empty(sizes.slots, 0, **self._wanted))
        self._unread: collections.deque[tuple[list[Running], Sent]] = collections.deque()

    @property
    def free(self) -> int:
        """Slots without a request."""
        return self.sizes.slots - len(self.running)

    @property
    def feeding(self) -> bool:
        """Whether a request's prompt is not complete."""
        return bool(self._feeding)

    def run(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Serves all requests, as slots free up and in their order; deltas as they come."""
        waiting = collections.deque(enumerate(requests))
        while waiting or self.running:
            while waiting and self.free:
                self.admit(*waiting.popleft())
            yield from self.advance()

    def admit(self, number: int, request: Request) -> None:
        """Puts a request in a free slot."""
        slot = next(s for s in range(self.sizes.slots) if s not in self.running)
        row = Row(
            request.sampling,
            self._history + len(request.ids),
            prompt_ids=request.ids,
            sample=request.sample,
        )
        controls = make_controls(
            [row],
            1,
            self.params.config.vocab_size,
            eos_ids=self._eos_ids,
            max_length=min(self.state.capacity, self.params.config.max_position_embeddings),
            like=self.mode,
        )
        self.state, self._controls = _occupy(
            self.params, self.state, self._controls, self._source, jnp.int32(slot), controls
        )
        self.running[slot] = Running(number, request, slot, self._tokenizer)
        self._feeding.append(self.running[slot])

    def cancel(self, number: int) -> None:
        """Ends a running request; its slot is free at once, what is in flight for it is dropped."""
        row = next(r for r in self.running.values() if r.number == number)
        row.done, row.reason = True, FinishReason.CANCELLED.public or ""
        if row in self._feeding:
            self._feeding.remove(row)
        self._release(row)

    def advance(self, *, feed: bool = True) -> Iterator[Delta]:
        """One step: a chunk of prompts, the next round, and what the round before it gave.

        Args:
            feed: whether prompts are fed in this step.
        """
        if feed and self._feeding:
            self._prefill()
        decoding = [r for r in self.running.values() if "begun" in r.times and not r.done]
        if decoding:
            *carry, words = next_round(
                self.params,
                self.state,
                self._controls,
                self._active,
                self._room,
                **self._wanted,
            )
            self.state, self._controls, self._active, self._room = carry
            self.rounds += 1
            self._unread.append((decoding, Sent(words, self._round_fields)))
        while len(self._unread) > bool(decoding):
            yield from self._read(*self._unread.popleft())

    def _prefill(self) -> None:
        """Feeds a chunk of some prompts, in turn; those that are complete begin to decode."""
        if len(self._fed) == 2:
            # with no stream to read the host would queue a whole prompt before whoever comes next
            self._fed[0].block_until_ready()
        shape = self.sizes.prefill_shape(len(self._feeding[0].to_feed))
        alike = (r for r in self._feeding if self.sizes.prefill_shape(len(r.to_feed)) == shape)
        places, chunk = shape
        rows = list(itertools.islice(alike, places))
        slots = np.full(places, self.sizes.slots, np.int32)
        tokens = np.zeros(shape, np.int32)
        count = np.zeros(places, np.int32)
        complete = np.zeros(places, bool)
        for i, row in enumerate(rows):
            part, row.to_feed = row.to_feed[:chunk], row.to_feed[chunk:]
            self._feeding.remove(row)
            slots[i], count[i], complete[i] = row.slot, len(part), not row.to_feed
            tokens[i, : len(part)] = part
            if complete[i]:
                row.times["begun"] = now()
            else:
                self._feeding.append(row)
        self.state, self._controls, self._active, words = _prefill_and_begin(
            self.params,
            self.state,
            self._controls,
            self._active,
            jnp.asarray(slots),
            jnp.asarray(tokens),
            jnp.asarray(count),
            jnp.asarray(complete),
            **self._wanted,
        )
        self.prefills += 1
        self._fed.append(words)
        begun = [r for r, whole in zip(rows, complete, strict=False) if whole]
        if begun:
            self._unread.append((begun, Sent(words, self._first_fields)))

    def _read(self, rows: list[Running], sent: Sent) -> Iterator[Delta]:
        """Hands out a burst; frees the slots of requests that ended with it."""
        fields = sent.read()
        for row in rows:
            if row.done:
                continue
            own = {name: values[row.slot].tolist() for name, values in fields.items()}
            ids, logprobs, top = own["tokens"][: own["count"]], own.get("logprobs"), None
            if "top_ids" in own:
                pairs = zip(own["top_ids"], own["top_logprobs"], strict=True)
                top = [list(zip(*pair, strict=True)) for pair in pairs]
            delta = row.take(ids, logprobs, top, FinishReason(own["reason"]))
            if row.done:
                self._release(row)
            yield delta

    def _release(self, row: Running) -> None:
        """Frees the slot of a request that has ended."""
        self._active = _stop(self._active, jnp.int32(row.slot))
        self.finished[row.number] = row
        del self.running[row.slot]


@functools.partial(jax.jit, donate_argnames=("state", "controls"))
def _occupy(
    params: Params,
    state: DecodeState,
    controls: Controls,
    source: DecodeState | None,
    slot: Int[Array, ""],
    row: Controls,
) -> tuple[DecodeState, Controls]:
    """Empties a slot for a new tenant, or continues `source` in it."""
    state = reset_slots(params.config, state, slot[None])
    if source is not None:
        state = graft(state, slot, source)
    return state, set_row(controls, slot, row)


@functools.partial(
    jax.jit, donate_argnames=("state", "controls", "active"), static_argnames=("logprobs", "top")
)
def _prefill_and_begin(
    params: Params,
    state: DecodeState,
    controls: Controls,
    active: Bool[Array, " S"],
    slots: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    complete: Bool[Array, " B"],
    *,
    logprobs: bool,
    top: int,
) -> tuple[Any, ...]:
    """Feeds a chunk to some slots; those whose prompt is complete get their first token.

    Slot numbers past the last are rows that are not there. The last result has the words of a
    burst by slot, in host memory.
    """
    there = slots < state.slots
    rows = take_slots(state, slots)
    own = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), controls)
    rows, _ = feed(params, rows, tokens, jnp.where(there, count, 0))
    # of the row's last token, which need not be in this chunk
    streams = rows.residual.reshape(*rows.residual.shape[:1], 1, params.config.hc_count, -1)
    hidden = read_out(params, streams)[:, 0]
    ready = complete & there
    rows, own, running, burst = begin(params, rows, own, hidden, ready, logprobs=logprobs, top=top)
    state = put_slots(state, slots, rows)
    place = lambda x, row: x.at[slots].set(row, mode="drop")  # noqa: E731
    controls = jax.tree.map(place, controls, own)
    by_slot = jax.tree.map(
        lambda x: place(jnp.zeros((state.slots, *x.shape[1:]), x.dtype), x), burst
    )
    # a row in the middle of its prompt is not active yet, and stays so
    *carry, _, words = to_host((state, controls, place(active, running), by_slot))
    return *carry, words


@functools.partial(jax.jit, donate_argnums=0)
def _stop(active: Bool[Array, " S"], slot: Int[Array, ""]) -> Bool[Array, " S"]:
    return active.at[slot].set(False)
