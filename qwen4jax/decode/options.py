"""A request's options, checked, and how they become the controls of a compiled program."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, no_type_check

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from qwen4jax.decode.stopping import Controls

_INT32 = 2**31 - 1
_COLDEST = 1e-30
_TYPES = {bool: (bool,), int: (int, np.integer), float: (int, float, np.integer, np.floating)}
_RANGES = dict(
    temperature=(float, 0, 1e30),
    top_k=(int, 0, _INT32),
    top_p=(float, _COLDEST, 1),
    min_p=(float, 0, 1),
    repetition_penalty=(float, 1e-4, 1e4),
    presence_penalty=(float, -1e4, 1e4),
    frequency_penalty=(float, -1e4, 1e4),
    seed=(int, 0, 2**64 - 1),
    max_new_tokens=(int, 1, _INT32),
    min_new_tokens=(int, 0, _INT32),
    ignore_eos=(bool, False, True),
    n=(int, 1, _INT32),
)


# its own errors name the field; the tests' type checks would come before them
@no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request is sampled and when it ends; checked, and sequences turned to tuples, at once.

    Attributes:
        temperature: 0 takes the most probable id, the lowest one of a tie. At most 1e30; 1e-9 is
            in effect a draw among exact ties, 1e9 a uniform draw.
        top_k: keeps exactly so many ids, the more probable first, then the lower id; None, 0 and
            the vocabulary size or more mean all.
        top_p: in (0, 1]; keeps the fewest ids, in that order, with so much probability in sum.
        min_p: in [0, 1]; drops ids below this share of the largest probability.
        repetition_penalty: 1e-4 to 1e4; makes ids of prompt and output less likely, above 1.
        presence_penalty: within +-1e4; subtracted from the logits of ids in the output.
        frequency_penalty: within +-1e4; subtracted once per occurrence in the output.
        logit_bias: id -> added to its logit, within +-1e4, or -inf to ban it at any temperature.
        seed: 0 to 2**64 - 1; None means 0: a call is repeatable unless its caller draws a seed.
        max_new_tokens: at least 1.
        min_new_tokens: so many tokens are no stop ids; at most `max_new_tokens`.
        stop: the text ends before the first of these strings; none is empty.
        stop_ids: end the request besides the model's EOS and belong to the output; any number.
        ignore_eos: the model's EOS does not end the request.
        n: independent samples of the prompt; more than 1 needs a temperature.

    Raises:
        ValueError: a value is outside these rules; the message begins with the field's name.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    seed: int | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, values in (("stop", stop), ("stop_ids", self.stop_ids)):
            if not isinstance(values, Sequence):
                raise ValueError(f"{name} must be a sequence: {values!r}")
        if not all(isinstance(string, str) and string for string in stop):
            raise ValueError(f"stop must be strings that are not empty: {stop!r}")
        stop_ids = tuple(_checked("stop_ids", i, int, 0, _INT32) for i in self.stop_ids)
        biases = _biases(self.logit_bias)
        checked: dict[str, Any] = dict(stop=tuple(stop), stop_ids=stop_ids, logit_bias=biases)
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            off = value is None and name in ("top_k", "seed")
            checked[name] = 0 if off else _checked(name, value, *allowed)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens must not exceed max_new_tokens={self.max_new_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} samples at temperature 0 would all be the same")

    def stops(self, eos_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids that end the request, for a model with these EOS ids."""
        return tuple(dict.fromkeys((*(() if self.ignore_eos else eos_ids), *self.stop_ids)))

    def validate_for(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        """Checks what depends on the model.

        Raises:
            ValueError: an id is outside the vocabulary, or all are forbidden; the field is named.
        """
        biases = dict(self.logit_bias)
        _check_ids("stop_ids", self.stop_ids, vocab_size)
        _check_ids("logit_bias", tuple(biases), vocab_size)
        banned = {token for token, value in biases.items() if value == -math.inf}
        if self.min_new_tokens:
            banned |= set(self.stops(eos_ids))
        if len(banned) >= vocab_size:
            raise ValueError("logit_bias and min_new_tokens together ban every id")


@dataclasses.dataclass(frozen=True)
class Row:
    """A request as it takes a slot.

    Attributes:
        sampling: how to continue it.
        prompt_length: tokens of the prompt, at least 1.
        prompt_ids: the prompt; needed only for a repetition penalty.
        output_ids: what it generated before it took this slot; needed only for penalties.
        sample: which of the request's `n` samples this is, from 0.
    """

    sampling: Sampling
    prompt_length: int
    prompt_ids: Sequence[int] | np.ndarray = ()
    output_ids: Sequence[int] | np.ndarray = ()
    sample: int = 0


def make_controls(
    rows: Sequence[Row],
    slots: int,
    vocab_size: int,
    *,
    eos_ids: Sequence[int] = (),
    max_length: int = _INT32,
    like: Controls | None = None,
) -> Controls:
    """The controls of `slots` slots, of which the first hold `rows` and the others are idle.

    Args:
        rows: at most one per slot.
        slots: rows of the compiled program.
        vocab_size: of the model.
        eos_ids: of the model; a row stops at them unless it has `ignore_eos`.
        max_length: of every sequence, whatever its `max_new_tokens`.
        like: controls whose mode the result has; None: the narrowest mode that serves the rows.

    Raises:
        ValueError: too many rows; a row (by its index) with a value that fits neither vocabulary
            nor length; a row that the mode does not serve.
    """
    if len(rows) > slots:
        raise ValueError(f"{len(rows)} rows for {slots} slots")
    _check_ids("eos_ids", eos_ids, vocab_size)
    for index, row in enumerate(rows):
        try:
            _check_row(row, vocab_size, eos_ids, max_length)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from None
    fields: dict[str, Array] = {}

    def column(idle: Any, values: Sequence[Any]) -> Array:
        # the idle value brings the dtype
        return jnp.asarray(np.stack([*values, *[idle] * (slots - len(rows))]).astype(idle.dtype))

    def histogram(ids: Any, weights: Sequence[float] | None = None) -> np.ndarray:
        return np.bincount(np.asarray(ids, np.int64), weights, vocab_size)

    def add(**group: tuple[Any, Sequence[Any]]) -> bool:
        """Adds fields, each (idle value, values of the rows), if the mode has them."""
        needed = any(np.any(v != idle) for idle, values in group.values() for v in values)
        held = needed if like is None else all(getattr(like, n) is not None for n in group)
        if needed and not held:
            raise ValueError(f"a row needs {', '.join(group)}, which the mode does not have")
        if held:
            fields.update({name: column(*of_rows) for name, of_rows in group.items()})
        return held

    asked = [row.sampling for row in rows]
    drawn = [s if s.temperature else Sampling(temperature=0) for s in asked]
    stops = [s.stops(eos_ids) for s in asked]
    places = 1 << (max([4, *map(len, stops)]) - 1).bit_length()
    width = places if like is None else like.stop_ids.shape[1]
    if places > width:
        raise ValueError(f"a row needs {places} places for stop ids, the mode has {width}")
    unused = np.full(width, -1, np.int32)
    zero, one, count = np.float32(0), np.float32(1), np.int32(0)
    least = [(row.prompt_length, row.sampling.min_new_tokens) for row in rows]
    add(min_length=(count, [new and min(prompt + new, max_length) for prompt, new in least]))
    add(
        temperature=(zero, [s.temperature and max(s.temperature, _COLDEST) for s in drawn]),
        seed=(np.zeros(2, np.uint32), [divmod(s.seed or 0, 1 << 32) for s in drawn]),
        sample=(count, [row.sample for row in rows]),
    )
    top_k = [s.top_k if s.top_k and s.top_k < vocab_size else 0 for s in drawn]
    add(top_k=(count, top_k), top_p=(one, [s.top_p for s in drawn]))
    add(min_p=(zero, [s.min_p for s in drawn]))
    if add(
        repetition=(one, [s.repetition_penalty for s in asked]),
        presence=(zero, [s.presence_penalty for s in asked]),
        frequency=(zero, [s.frequency_penalty for s in asked]),
    ):
        prompts = [histogram(row.prompt_ids) for row in rows]
        fields["prompt_seen"] = column(np.zeros(vocab_size, np.bool_), prompts)
        outputs = [histogram(row.output_ids) for row in rows]
        fields["output_counts"] = column(np.zeros(vocab_size, np.int32), outputs)
    if any(s.logit_bias for s in asked) or (like is not None and like.bias is not None):
        pairs = [dict(s.logit_bias) for s in asked]
        biases = [histogram(list(p), weights=list(p.values())) for p in pairs]
        add(bias=(np.zeros(vocab_size, np.float32), biases))
    ends = [min(r.prompt_length + r.sampling.max_new_tokens, max_length) for r in rows]
    return Controls(
        max_length=column(count, ends),
        stop_ids=column(unused, [[*ids, *unused[len(ids) :]] for ids in stops]),
        **fields,
    )


def _check_row(row: Row, vocab_size: int, eos_ids: Sequence[int], max_length: int) -> None:
    row.sampling.validate_for(vocab_size, eos_ids)
    _checked("prompt_length", row.prompt_length, int, 1, max_length - 1)
    _checked("sample", row.sample, int, 0, row.sampling.n - 1)
    _check_ids("prompt_ids", row.prompt_ids, vocab_size)
    _check_ids("output_ids", row.output_ids, vocab_size)
    if row.sampling.repetition_penalty != 1 and len(row.prompt_ids) != row.prompt_length:
        raise ValueError(f"prompt_ids: repetition_penalty needs all {row.prompt_length} ids")


def _check_ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> None:
    array = np.asarray(ids)
    for i in np.flatnonzero((array < 0) | (array >= vocab_size)):
        raise ValueError(f"{name}[{i}]: {array[i]} is outside the vocabulary [0, {vocab_size})")


def _checked(name: str, value: Any, kind: type, low: Any, high: Any) -> Any:
    typed = isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind is bool)
    if not typed or not low <= value <= high:
        raise ValueError(f"{name} must be of type {kind.__name__}, {low} to {high}: {value!r}")
    return kind(value)


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(values).items()
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers: {values!r}") from None
    for token, value in pairs:
        _checked("logit_bias: an id", token, int, 0, _INT32)
        if value != -math.inf:
            _checked(f"logit_bias[{token}]", value, float, -1e4, 1e4)
    return tuple((int(token), float(value)) for token, value in pairs)
