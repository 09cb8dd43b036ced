"""A request in a slot, and what it gains: ids, text that is certain, and when."""

import dataclasses
import time
from collections.abc import Sequence

from qwen4jax.decode.compiling import clock
from qwen4jax.decode.requests import Request
from qwen4jax.decode.stopping import FinishReason, StopStrings
from qwen4jax.decode.text import StreamDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class Delta:
    """What a request gained.

    Attributes:
        request: number of the request, in the order they were given.
        token_ids: new ids.
        logprobs: of each, if asked for.
        text: new text that is certain; empty without a tokenizer.
        finish_reason: None while it runs.
        top: of each new id the most probable ones in its place, as (id, log-probability), best
            first; None if not asked for.
        rounds: that gave it, 0 for the token after the prompt.
    """

    request: int
    token_ids: list[int]
    logprobs: list[float] | None
    text: str
    finish_reason: str | None = None
    top: list[list[tuple[int, float]]] | None = None
    rounds: int = 0


class Running:
    """A request in a slot.

    Attributes:
        number: of the request, in the order they were given.
        request: what was asked for.
        slot: it runs in.
        to_feed: ids of its prompt that are still to be fed.
        ids: new ones so far.
        rounds: that gave them.
        done: whether it has ended.
        reason: why, as a delta says it.
        times: `now()` when it was `admitted`, had `begun` to decode, got its `first` id and `last`.
    """

    def __init__(self, number: int, request: Request, slot: int, tokenizer: Tokenizer | None):
        self.number, self.request, self.slot = number, request, slot
        self.to_feed = list(request.ids)
        self.ids: list[int] = []
        self.rounds = 0
        self.done = False
        self.reason = ""
        self.times = {"admitted": now()}
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stops = StopStrings(request.sampling.stop)

    def take(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        top: Sequence[list[tuple[int, float]]] | None,
        reason: FinishReason,
    ) -> Delta:
        """Adds a burst, up to the token in which a stop string is complete."""
        rounds = int(bool(self.ids))
        text, taken = "", []
        for place, token in enumerate(ids):
            taken.append(token)
            # a stop id is no part of the text, a stop string could not end in it either
            is_stop_id = reason == FinishReason.STOP and place == len(ids) - 1
            if self._decoder is not None and not is_stop_id:
                text += self._stops.feed(self._decoder.feed([token]))
            if self._stops.found is not None:
                reason = FinishReason.STOP
                break
        if reason and self._decoder is not None:
            text += self._stops.feed(self._decoder.flush()) + self._stops.finish()
        self.ids += taken
        self.rounds += rounds
        self.done, self.reason = bool(reason), reason.public or ""
        self.times.setdefault("first", now())
        if self.done:
            self.times["last"] = now()
        kept = None if logprobs is None else list(logprobs[: len(taken)])
        best = None if top is None else list(top[: len(taken)])
        return Delta(self.number, taken, kept, text, reason.public, best, rounds)

    def seconds(self, start: str, end: str) -> float:
        """Seconds between two of its moments, without those spent compiling."""
        (a, compiled_a), (b, compiled_b) = self.times[start], self.times[end]
        return max(b - a - (compiled_b - compiled_a), 0.0)


def now() -> tuple[float, float]:
    """Wall seconds, and seconds spent compiling so far."""
    return time.perf_counter(), clock.seconds
