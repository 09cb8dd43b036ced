"""How much of a burst stands, and where a row ends: acceptance, stop ids, lengths, stop strings.

`Controls`, the options of all slots, is declared here, below everything that reads it.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """Sampling and stopping options of all slots, on the device; see `options.make_controls`.

    A field that is None is switched off in the compiled program: the tree's structure is the mode,
    and each group of fields below is on or off as a whole. Without temperatures a program sorts
    nothing and draws nothing. An idle slot has neutral values and `max_length` 0.

    Attributes:
        max_length: int32 [S]; the row ends when its sequence, prompt included, is so long.
        stop_ids: int32 [S, M], -1 in unused places; M is a power of two, at least 4.
        min_length: int32 [S]; stop ids do not stand at positions (from 0) below it.
        temperature: float32 [S]; 0 is greedy.
        seed: uint32 [S, 2]; upper and lower half of the 64-bit seed.
        sample: int32 [S]; index among the samples of one request.
        top_k: int32 [S]; 0 is off.
        top_p: float32 [S]; 1 is off.
        min_p: float32 [S]; 0 is off.
        repetition: float32 [S]; 1 is off.
        presence: float32 [S]; 0 is off.
        frequency: float32 [S]; 0 is off.
        prompt_seen: bool [S, V]; ids of the prompt.
        output_counts: int32 [S, V]; occurrences in the output, the last committed token included.
        bias: float32 [S, V]; added to the logits.
    """

    max_length: Any
    stop_ids: Any

    min_length: Any = None

    temperature: Any = None
    seed: Any = None
    sample: Any = None

    top_k: Any = None
    top_p: Any = None

    min_p: Any = None

    repetition: Any = None
    presence: Any = None
    frequency: Any = None
    prompt_seen: Any = None
    output_counts: Any = None

    bias: Any = None


class FinishReason(enum.IntEnum):
    """Why a row ended; the numbers are what the device writes."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3
    CANCELLED = 4

    @property
    def public(self) -> str | None:
        """What users read: `stop`, `length`, `error`, `cancelled`, or None while it runs."""
        return self.name.lower() if self else None


class Cut(NamedTuple):
    """Where each row's burst ends.

    Attributes:
        n: tokens of the burst that stand; the row's state is committed up to them.
        finished: whether the row has ended.
        reason: a `FinishReason`; NONE where it has not.
    """

    n: Int[Array, " B"]
    finished: Bool[Array, " B"]
    reason: Int[Array, " B"]


def set_row(controls: Controls, slot: Int[Array, ""] | int, row: Controls) -> Controls:
    """The controls with the values of one slot replaced; pure, for use inside jit.

    Args:
        controls: of S slots.
        slot: in [0, S), to be checked on the host: at S and above nothing is replaced.
        row: of one slot, `make_controls([...], 1, vocab_size, like=controls)`.

    Raises:
        ValueError: the two differ in mode, places for stop ids or vocabulary.
    """
    if _row_shapes(controls) != _row_shapes(row):
        raise ValueError("the row's mode is not that of the controls")
    return jax.tree.map(lambda rows, one: rows.at[slot].set(one[0]), controls, row)


def count_tokens(controls: Controls, tokens: Int[Array, "B T"], n: Int[Array, " B"]) -> Controls:
    """The controls once the first `n[b]` of `tokens[b]` are committed to the output of row b."""
    if controls.output_counts is None:
        return controls
    counts = controls.output_counts
    rows = jnp.arange(counts.shape[0])[:, None]
    # beyond the vocabulary, where the scatter drops it
    columns = jnp.where(jnp.arange(tokens.shape[1]) < n[:, None], tokens, counts.shape[1])
    counts = counts.at[rows, columns].add(1, mode="drop")
    return dataclasses.replace(controls, output_counts=counts)


def accept(sampled: Int[Array, "B T"], drafts: Int[Array, "B T-1"]) -> Int[Array, " B"]:
    """How many drafts stand: the longest prefix that equals what the target sampled there.

    A draft made without the random numbers of its position stands with the target's probability of
    it, and the output `sampled[:, : accepted + 1]` has the target's distribution exactly.
    """
    return jnp.cumprod(sampled[:, :-1] == drafts, axis=1, dtype=jnp.int32).sum(axis=1)


def synthetic_accept(
    mean_tokens_per_round: float,
    seed: int,
    round_index: Int[Array, ""] | int,
    slots: Int[Array, " B"],
    num_drafts: int,
) -> Int[Array, " B"]:
    """How many drafts a benchmark accepts, whatever they are.

    A mean of 3.23 tokens per round, bonus token included, is 3 tokens with probability 0.77 and 4
    with 0.23, independently per round and slot. Rows that end inside a burst lower the mean.

    Args:
        mean_tokens_per_round: in [1, num_drafts + 1].
        seed: of the whole run.
        round_index: counts the rounds.
        slots: of the rows.
        num_drafts: per round, N.

    Returns:
        In [0, N]; a function of (seed, round, slot).

    Raises:
        ValueError: no acceptance of N drafts has this mean.
    """
    if not 1 <= mean_tokens_per_round <= num_drafts + 1:
        raise ValueError(
            f"mean_tokens_per_round must be from 1 to {num_drafts + 1} with {num_drafts} drafts, "
            f"got {mean_tokens_per_round}"
        )
    tokens = math.floor(mean_tokens_per_round)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), round_index)
    draws = jax.vmap(lambda slot: jax.random.uniform(jax.random.fold_in(key, slot)))(slots)
    return tokens - 1 + (draws < mean_tokens_per_round - tokens).astype(jnp.int32)


def cut(
    tokens: Int[Array, "B T"],
    n: Int[Array, " B"],
    lengths: Int[Array, " B"],
    controls: Controls,
    finite: Bool[Array, "B T"] | None = None,
) -> Cut:
    """Ends rows at the earliest event inside what was accepted of the burst.

    A stop id belongs to the output (STOP), also at the last position that the length allows. A row
    without room for more ends as LENGTH. A token that was sampled from logits that are not finite
    does not stand, nor does anything after it (ERROR).

    Args:
        tokens: the burst; -1 and other ids outside the vocabulary are no stop ids.
        n: tokens of it that were accepted, the bonus token included; a row with 0 is left alone.
        lengths: of the sequence before the burst: the position of `tokens[b, 0]`.
        controls: of the B rows.
        finite: `Sampled.finite` of the tokens; None takes all as finite.

    Returns:
        n, whether the row ended, and why.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == controls.stop_ids[:, None, :]).any(axis=-1) & (tokens >= 0)
    if controls.min_length is not None:
        is_stop &= lengths[:, None] + index >= controls.min_length[:, None]
    room = jnp.maximum(controls.max_length - lengths, 0)
    n = n.astype(jnp.int32)
    usable = jnp.minimum(n, room)
    sound = usable if finite is None else jnp.minimum(usable, _first(~finite))
    stop = _first(is_stop)
    reason = jnp.select(
        [n == 0, stop < sound, sound < usable, n >= room],
        [FinishReason.NONE, FinishReason.STOP, FinishReason.ERROR, FinishReason.LENGTH],
        FinishReason.NONE,
    ).astype(jnp.int32)
    return Cut(jnp.minimum(sound, stop + 1), reason != FinishReason.NONE, reason)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, and holds back what may be one.

    The result does not depend on the pieces: the text ends where a stop string is first complete,
    read character by character, and is cut before it; of several that are complete at the same
    character, before the longest. Pieces are whole characters (a detokenizer holds back incomplete
    ones). Time is linear in the text and in the number of stop strings.

    Attributes:
        found: the stop string that ended the text, or None.
        cut: characters of the text before `found`; None without one.
    """

    def __init__(self, stops: Sequence[str]):
        if isinstance(stops, str) or not all(stops):
            raise ValueError(f"stop must be a sequence of strings that are not empty: {stops!r}")
        self.found: str | None = None
        self.cut: int | None = None
        self._stops = [(stop, _borders(stop)) for stop in stops]
        # how much of each stop string the text so far ends with
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._released = 0

    def feed(self, delta: str) -> str:
        """Takes the next piece of text; returns what is now certain to be before any stop string.

        After a stop string was found it returns an empty string: the caller may be a burst late.
        """
        if self.found is not None:
            return ""
        start = self._released
        self._held += delta
        for end in range(start + len(self._held) - len(delta), start + len(self._held)):
            self._advance(self._held[end - start])
            complete = [
                stop
                for (stop, _), matched in zip(self._stops, self._matched, strict=True)
                if matched == len(stop)
            ]
            if complete:
                self.found = max(complete, key=len)
                self.cut = end + 1 - len(self.found)
                return self._release(self.cut)
        return self._release(start + len(self._held) - max(self._matched, default=0))

    def finish(self) -> str:
        """The text that is still held back, when none follows; empty after a stop string."""
        return "" if self.found is not None else self._release(self._released + len(self._held))

    def _advance(self, character: str) -> None:
        """Knuth, Morris and Pratt: how much of each stop string now ends the text."""
        for i, (stop, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched]
            self._matched[i] = matched + (stop[matched] == character)

    def _release(self, end: int) -> str:
        """Lets the text out up to the character `end`."""
        count = end - self._released
        text, self._held = self._held[:count], self._held[count:]
        self._released = end
        return text


def _row_shapes(controls: Controls) -> Any:
    return jax.tree.map(lambda leaf: leaf.shape[1:], controls)


def _first(events: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """The index of each row's first event, T if there is none."""
    size = events.shape[1]
    return jnp.where(events, jnp.arange(size), size).min(axis=1)


def _borders(text: str) -> list[int]:
    """For each length of a prefix: that of its longest proper prefix that is its suffix too."""
    borders = [0, 0]
    for character in text[1:]:
        length = borders[-1]
        while length and text[length] != character:
            length = borders[length]
        borders.append(length + (text[length] == character))
    return borders
