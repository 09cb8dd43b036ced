"""Which token follows: request options, their form on the device, sampling and acceptance.

A draft is accepted while it equals the token that the target samples at its position. The random
numbers of a position depend on (seed, sample, position) only, so that a request's ids do not depend
on drafts, on the number of drafts, on the slot or on the other requests, and the target's
distribution is kept exactly.

Order of the processors: logit bias and the mask of early stop ids; repetition, frequency and
presence penalty; temperature; min-p; top-k; top-p over what top-k left, renormalised. Sources:
vLLM `v1/sample/sampler.py` (the same order and meaning), Hugging Face `logits_process.py`.
"""

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# between these bounds no float32 step of the processors gives NaN
_PENALTY = 1e4
_COLDEST, _HOTTEST = 1e-30, 1e30
_LOGIT = 1e30
_INT32 = 2**31 - 1
_MIN_STOP_WIDTH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request is sampled and when it ends. Checked and normalised on construction.

    Attributes:
        temperature: 0 takes the most probable id, the lowest one of a tie. Otherwise 1e-30 to 1e30;
            1e-9 is in effect a draw among exact ties, 1e9 a uniform draw.
        top_k: keeps exactly this many ids, the more probable and then the lower id first; None, 0
            and the vocabulary size or more mean all.
        top_p: in (0, 1]; keeps the fewest ids, in the same order, whose probabilities sum to it; 1
            means all.
        min_p: in [0, 1]; drops ids below this share of the largest probability.
        repetition_penalty: 1e-4 to 1e4; divides positive logits of ids in prompt or output and
            multiplies negative ones.
        presence_penalty: within +-1e4; subtracted from logits of ids in the output.
        frequency_penalty: within +-1e4; subtracted once per occurrence in the output.
        logit_bias: id -> added to its logit, within +-1e4, or -inf to ban it at any temperature.
        seed: 0 to 2**64 - 1; None means 0, so that every call is repeatable unless a seed is drawn.
        max_new_tokens: at least 1.
        min_new_tokens: for so many tokens no stop id is sampled; at most `max_new_tokens`.
        stop: the text ends before the first of these strings; none is empty.
        stop_ids: end the request besides the model's EOS, and are part of the output; any number.
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
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self):
        checked = dict(
            temperature=_temperature(self.temperature),
            top_k=_integer("top_k", 0 if self.top_k is None else self.top_k),
            top_p=_number("top_p", self.top_p, 0, 1, above=True),
            min_p=_number("min_p", self.min_p, 0, 1),
            repetition_penalty=_number(
                "repetition_penalty", self.repetition_penalty, 1 / _PENALTY, _PENALTY
            ),
            presence_penalty=_number("presence_penalty", self.presence_penalty, -_PENALTY),
            frequency_penalty=_number("frequency_penalty", self.frequency_penalty, -_PENALTY),
            logit_bias=_logit_bias(self.logit_bias),
            seed=_integer("seed", 0 if self.seed is None else self.seed, 0, 2**64 - 1),
            max_new_tokens=_integer("max_new_tokens", self.max_new_tokens, 1),
            min_new_tokens=_integer("min_new_tokens", self.min_new_tokens),
            stop=_stop(self.stop),
            stop_ids=_ids("stop_ids", self.stop_ids),
            n=_integer("n", self.n, 1),
        )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} samples at temperature 0 would all be the same")

    def stops(self, eos_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids that end the request of a model with these EOS ids."""
        return tuple(dict.fromkeys((*(() if self.ignore_eos else eos_ids), *self.stop_ids)))

    def validate_for(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        """Checks what depends on the model; a `top_k` of the vocabulary or more means all.

        Raises:
            ValueError: an id in `stop_ids` or `logit_bias` is no id of the vocabulary, or the
                request forbids every id.
        """
        biases = dict(self.logit_bias)
        for name, ids in (("stop_ids", self.stop_ids), ("logit_bias", tuple(biases))):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name}: id {token} is outside the vocabulary [0, {vocab_size})"
                    )
        banned = {token for token, value in biases.items() if value == -math.inf}
        if self.min_new_tokens:
            banned |= set(self.stops(eos_ids))
        if len(banned) >= vocab_size:
            raise ValueError("logit_bias and the ids that min_new_tokens masks ban every id")


@dataclasses.dataclass(frozen=True)
class Mode:
    """What a compiled program has to do for its rows: one compilation per mode.

    Attributes:
        random: some row has a temperature; without it nothing is sorted, exponentiated or drawn.
        top: some row has top-k or top-p.
        min_p: some row has min-p.
        penalties: some row has a repetition, presence or frequency penalty.
        bias: some row has a logit bias.
        min_tokens: some row masks its stop ids for a while.
        stop_width: places for stop ids, a power of two.
    """

    random: bool = False
    top: bool = False
    min_p: bool = False
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False
    stop_width: int = _MIN_STOP_WIDTH

    @classmethod
    def of(cls, sampling: Sampling, eos_ids: Sequence[int] = ()) -> Self:
        """The narrowest mode that serves this request."""
        random = sampling.temperature > 0
        neutral = Sampling(seed=sampling.seed)
        return cls(
            random=random,
            top=random and (bool(sampling.top_k) or sampling.top_p < 1),
            min_p=random and sampling.min_p > 0,
            penalties=any(
                getattr(sampling, name) != getattr(neutral, name)
                for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
            ),
            bias=bool(sampling.logit_bias),
            min_tokens=sampling.min_new_tokens > 0,
            stop_width=max(_MIN_STOP_WIDTH, 1 << (len(sampling.stops(eos_ids)) - 1).bit_length()),
        )

    def __or__(self, other: Self) -> Self:
        """The narrowest mode that serves the requests of both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return type(self)(*(max(pair) for pair in pairs))


@dataclasses.dataclass(frozen=True)
class Row:
    """A request as it takes a slot.

    Attributes:
        sampling: its options.
        prompt_length: tokens of the prompt, at least 1.
        prompt_ids: the prompt; needed only under a repetition penalty.
        output_ids: what was generated before the request took this slot; needed only under
            penalties.
        sample: which of the request's `n` samples this is, from 0.
    """

    sampling: Sampling
    prompt_length: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    sample: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """Sampling and stopping options of all slots, on the device.

    A field that is None is switched off in the compiled program: the tree's structure is the mode.
    An idle slot holds neutral values and has `max_length` 0.

    Attributes:
        max_length: int32 [S]; the row ends when its sequence, prompt included, is so long.
        stop_ids: int32 [S, M], -1 in unused places.
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
        output_counts: int32 [S, V]; occurrences in the output, up to the last committed token.
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


class Sampled(NamedTuple):
    """One sampled token per row.

    Attributes:
        ids: in [0, V), for every input.
        logprobs: of each id under `log_softmax(logits)`, before any processor; None if not asked
            for. Never NaN.
        finite: whether all logits were; where not, the id means nothing.
    """

    ids: Int[Array, "B T"]
    logprobs: Float[Array, "B T"] | None
    finite: Bool[Array, "B T"]


def make_controls(
    rows: Sequence[Row],
    slots: int,
    vocab_size: int,
    *,
    eos_ids: Sequence[int] = (),
    max_length: int = _INT32,
    mode: Mode | None = None,
) -> Controls:
    """The controls of `slots` slots, of which the first hold `rows` and the others are idle.

    Args:
        rows: at most one per slot.
        slots: number of rows of the compiled program.
        vocab_size: of the model.
        eos_ids: of the model; a row stops at them unless it has `ignore_eos`.
        max_length: no sequence grows beyond it, whatever its `max_new_tokens`.
        mode: of the compiled program; the narrowest one that serves all rows if None.

    Raises:
        ValueError: too many rows, a row that the mode does not serve, a value that does not fit the
            vocabulary or the length; the message names the row's index.
    """
    if len(rows) > slots:
        raise ValueError(f"{len(rows)} rows for {slots} slots")
    _check_ids("eos_ids", eos_ids, vocab_size)
    for index, row in enumerate(rows):
        try:
            _check_row(row, vocab_size, eos_ids, max_length)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from None
    needed = functools.reduce(
        operator.or_, (Mode.of(row.sampling, eos_ids) for row in rows), mode or Mode()
    )
    if mode not in (None, needed):
        raise ValueError(f"the rows need {needed}, the program has {mode}")

    def column(values: Sequence[Any], idle: Any, dtype: Any) -> Array:
        filled = np.full((slots, *np.shape(idle)), idle, dtype)
        for slot, value in enumerate(values):
            filled[slot] = value
        return jnp.asarray(filled)

    asked = [row.sampling for row in rows]
    stops = [s.stops(eos_ids) for s in asked]
    blank = np.full(needed.stop_width, -1)
    fields: dict[str, Array] = dict(
        max_length=column([_end(row, max_length) for row in rows], 0, np.int32),
        stop_ids=column([(*ids, *blank[len(ids) :]) for ids in stops], blank, np.int32),
    )
    if needed.min_tokens:
        starts = [row.prompt_length + row.sampling.min_new_tokens for row in rows]
        fields["min_length"] = column(starts, 0, np.int32)
    if needed.random:
        halves = [divmod(s.seed or 0, 1 << 32) for s in asked]
        fields["temperature"] = column([s.temperature for s in asked], 0, np.float32)
        fields["seed"] = column(halves, (0, 0), np.uint32)
        fields["sample"] = column([row.sample for row in rows], 0, np.int32)
    if needed.top:
        kept = [s.top_k if s.top_k and s.top_k < vocab_size else 0 for s in asked]
        fields["top_k"] = column(kept, 0, np.int32)
        fields["top_p"] = column([s.top_p for s in asked], 1, np.float32)
    if needed.min_p:
        fields["min_p"] = column([s.min_p for s in asked], 0, np.float32)
    if needed.penalties:
        fields["repetition"] = column([s.repetition_penalty for s in asked], 1, np.float32)
        fields["presence"] = column([s.presence_penalty for s in asked], 0, np.float32)
        fields["frequency"] = column([s.frequency_penalty for s in asked], 0, np.float32)
        prompts = [_histogram(row.prompt_ids, vocab_size) > 0 for row in rows]
        outputs = [_histogram(row.output_ids, vocab_size) for row in rows]
        fields["prompt_seen"] = column(prompts, np.zeros(vocab_size), np.bool_)
        fields["output_counts"] = column(outputs, np.zeros(vocab_size), np.int32)
    if needed.bias:
        biases = [_dense(s.logit_bias, vocab_size) for s in asked]
        fields["bias"] = column(biases, np.zeros(vocab_size), np.float32)
    return Controls(**fields)


def set_row(controls: Controls, slot: Int[Array, ""] | int, row: Controls) -> Controls:
    """The controls with one slot's values replaced; pure, for use inside jit.

    Args:
        controls: of S slots.
        slot: in [0, S); out of range it is ignored or counts from the end, so check it on the host.
        row: controls of one slot, `make_controls([...], 1, vocab_size, mode=...)`.

    Raises:
        ValueError: the two are of different modes.
    """
    if jax.tree.map(lambda a: a.shape[1:], controls) != jax.tree.map(lambda a: a.shape[1:], row):
        raise ValueError("the row's mode or vocabulary is not that of the controls")
    return jax.tree.map(lambda all_rows, one: all_rows.at[slot].set(one[0]), controls, row)


def sample(
    logits: Float[Array, "B T V"],
    fed: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    controls: Controls,
    *,
    logprobs: bool = True,
) -> Sampled:
    """The token that follows each fed token, under every processor of its row; float32.

    Args:
        logits: of the token after `fed[b, t]`.
        fed: `fed[b, 0]` is the last committed token, already counted in `controls`; the others are
            drafts and count as output for the rows at and after them.
        positions: at which the sampled token will stand, counted from 0: that of `fed` plus 1.
        controls: of the B rows.
        logprobs: whether to return log-probabilities; without them a greedy mode does not
            exponentiate.

    Returns:
        ids, log-probabilities and finite flags. Equal (logits row, seed, sample, position, history)
        gives the equal id at any B, T and place.
    """
    finite = jnp.isfinite(logits).all(axis=-1)
    raw = jnp.where(jnp.isnan(logits), -_LOGIT, logits.astype(jnp.float32))
    raw = jnp.clip(raw, -_LOGIT, _LOGIT)
    scores = _penalise(_mask(raw, positions, controls), fed, controls)
    if controls.temperature is not None:
        scores = _perturb(scores, positions, controls)
    ids = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    chosen = None
    if logprobs:
        chosen = jnp.take_along_axis(raw, ids[..., None], axis=-1)[..., 0]
        chosen -= jax.nn.logsumexp(raw, axis=-1)
    return Sampled(ids, chosen, finite)


def count_tokens(controls: Controls, tokens: Int[Array, "B T"], n: Int[Array, " B"]) -> Controls:
    """The controls after the first `n[b]` of `tokens[b]` were committed to row b's output."""
    if controls.output_counts is None:
        return controls
    counts = controls.output_counts
    rows = jnp.arange(counts.shape[0])[:, None]
    # a scatter drops what lies past the end
    columns = jnp.where(jnp.arange(tokens.shape[1]) < n[:, None], tokens, counts.shape[1])
    return dataclasses.replace(controls, output_counts=counts.at[rows, columns].add(1, mode="drop"))


def accept(sampled: Int[Array, "B T"], drafts: Int[Array, "B T-1"]) -> Int[Array, " B"]:
    """How many drafts stand: the longest prefix that equals what the target sampled.

    For a draft that does not depend on the position's random numbers this accepts with the
    target's probability of the draft, and the first `accepted + 1` of `sampled` are the output.
    """
    return jnp.cumprod(sampled[:, :-1] == drafts, axis=1, dtype=jnp.int32).sum(axis=1)


def synthetic_accept(
    mean_tokens_per_round: float,
    seed: int,
    round_index: Int[Array, ""] | int,
    slots: Int[Array, " B"],
    num_drafts: int,
) -> Int[Array, " B"]:
    """Accepted drafts per row, drawn whatever the drafts are; for benchmarks.

    A mean of 3.23 tokens per round, bonus token included, is 3 tokens with probability 0.77 and 4
    with 0.23, independently per row and round. Rows that end inside a burst lower the mean.

    Args:
        mean_tokens_per_round: in [1, num_drafts + 1].
        seed: of the whole run.
        round_index: counts rounds.
        slots: of the rows.
        num_drafts: drafts per round, N.

    Returns:
        In [0, N]; a function of (seed, round, slot).

    Raises:
        ValueError: the mean cannot be had with so many drafts.
    """
    mean = _number("mean_tokens_per_round", mean_tokens_per_round, 1, num_drafts + 1)
    tokens = math.floor(mean)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), round_index)
    draw = jax.vmap(lambda slot: jax.random.uniform(jax.random.fold_in(key, slot)))(slots)
    return (tokens - 1 + (draw < mean - tokens)).astype(jnp.int32)


def _mask(
    logits: Float[Array, "B T V"], positions: Int[Array, "B T"], controls: Controls
) -> Float[Array, "B T V"]:
    """Bias, then -inf for stop ids at positions that come too early for them."""
    if controls.bias is not None:
        logits = logits + controls.bias[:, None, :]
    if controls.min_length is None:
        return logits
    is_stop = (controls.stop_ids[:, :, None] == jnp.arange(logits.shape[-1])).any(axis=1)
    early = positions < controls.min_length[:, None]
    return jnp.where(early[..., None] & is_stop[:, None, :], -jnp.inf, logits)


def _penalise(
    logits: Float[Array, "B T V"], fed: Int[Array, "B T"], controls: Controls
) -> Float[Array, "B T V"]:
    """Penalties, where row t has also seen the drafts fed[:, 1..t]."""
    if controls.output_counts is None:
        return logits
    rows, vocab = jnp.arange(fed.shape[1])[:, None], jnp.arange(logits.shape[-1])
    counts = controls.output_counts[:, None, :]
    # compared one by one, so that XLA fuses the counts into the reader of the logits
    for t in range(1, fed.shape[1]):
        counts = counts + ((fed[:, t, None, None] == vocab) & (rows >= t))
    present = counts > 0
    seen = present | controls.prompt_seen[:, None, :]
    factor = jnp.where(seen, controls.repetition[:, None, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - controls.frequency[:, None, None] * counts
    return logits - controls.presence[:, None, None] * present


def _perturb(
    logits: Float[Array, "B T V"], positions: Int[Array, "B T"], controls: Controls
) -> Float[Array, "B T V"]:
    """Scores whose largest is a draw of the row's distribution; greedy rows stay as they are."""
    temperature = controls.temperature[:, None, None]
    greedy = temperature == 0
    # the largest logit first becomes 0, so that no temperature overflows to inf - inf
    scores = logits - logits.max(axis=-1, keepdims=True)
    scores = scores / jnp.where(greedy, 1.0, temperature)
    if controls.min_p is not None:
        scores = jnp.where(scores >= jnp.log(controls.min_p)[:, None, None], scores, -jnp.inf)
    if controls.top_k is not None:
        scores = _truncate(scores, controls.top_k, controls.top_p)
    noise = jax.vmap(jax.vmap(_gumbel, (None, None, 0, None)), (0, 0, 0, None))
    drawn = scores + noise(controls.seed, controls.sample, positions, logits.shape[-1])
    return jnp.where(greedy, logits, drawn)


def _truncate(
    scores: Float[Array, "B T V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """-inf for all but the leading ids, by score and then the lower id; the largest score is 0."""
    size = scores.shape[-1]
    ordered = -jnp.sort(-scores, axis=-1)
    limit = jnp.where(top_k > 0, top_k, size)[:, None, None]
    in_top_k = jnp.arange(size) < limit
    mass = jnp.cumsum(jnp.where(in_top_k, jnp.exp(ordered), 0.0), axis=-1)
    before = jnp.pad(mass[..., :-1], ((0, 0), (0, 0), (1, 0)))
    share = top_p[:, None, None]
    in_top_p = (before < share * mass[..., -1:]) | (share >= 1)
    kept = jnp.maximum((in_top_k & in_top_p).sum(axis=-1, keepdims=True), 1)
    edge = jnp.take_along_axis(ordered, kept - 1, axis=-1)
    above, ties = scores > edge, scores == edge
    room = kept - above.sum(axis=-1, keepdims=True)
    return jnp.where(above | (ties & (jnp.cumsum(ties, axis=-1) <= room)), scores, -jnp.inf)


def _gumbel(
    seed: Array, index: Int[Array, ""], position: Int[Array, ""], size: int
) -> Float[Array, " V"]:
    """Standard Gumbel noise of one position, finite and fine in the upper tail."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, index), position)
    bits = jax.random.bits(key, (size,), jnp.uint32)
    # Large noise comes from small uniforms, which float32 resolves to 2**-33; below 1 in any case,
    # since noise of -inf would lose to ids that are masked.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _end(row: Row, max_length: int) -> int:
    return min(row.prompt_length + row.sampling.max_new_tokens, max_length)


def _check_row(row: Row, vocab_size: int, eos_ids: Sequence[int], max_length: int) -> None:
    row.sampling.validate_for(vocab_size, eos_ids)
    _integer("prompt_length", row.prompt_length, 1)
    if row.prompt_length >= min(max_length, _INT32):
        raise ValueError(f"prompt_length={row.prompt_length} leaves no room below {max_length}")
    _integer("sample", row.sample, 0, row.sampling.n - 1)
    _check_ids("prompt_ids", row.prompt_ids, vocab_size)
    _check_ids("output_ids", row.output_ids, vocab_size)
    if row.sampling.repetition_penalty != 1 and len(row.prompt_ids) != row.prompt_length:
        raise ValueError(
            f"prompt_ids: {len(row.prompt_ids)} of {row.prompt_length} ids, and "
            "repetition_penalty needs them all"
        )


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    array = np.asarray(ids)
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if wrong.size:
        raise ValueError(
            f"{name}[{wrong[0]}]: id {array[wrong[0]]} is outside the vocabulary [0, {vocab_size})"
        )


def _histogram(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    return np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)


def _dense(biases: Any, vocab_size: int) -> np.ndarray:
    dense = np.zeros(vocab_size, np.float32)
    for token, value in biases:
        dense[token] = value
    return dense


def _number(
    name: str, value: Any, low: float, high: float = _PENALTY, *, above: bool = False
) -> float:
    """A float in [low, high], or (low, high] if `above`; bools and NaN are none."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not low <= value <= high or (above and value == low):
        bracket = "(" if above else "["
        raise ValueError(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}")
    return float(value)


def _integer(name: str, value: Any, low: int = 0, high: int = _INT32) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    return int(value)


def _temperature(value: Any) -> float:
    checked = _number("temperature", value, 0, _HOTTEST)
    if 0 < checked < _COLDEST:
        raise ValueError(f"temperature must be 0 or at least {_COLDEST:g}, got {value!r}")
    return checked


def _ids(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str):
        raise ValueError(f"{name} must be a sequence of token ids, got {values!r}")
    return tuple(_integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def _stop(values: Any) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else values
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop must be strings that are not empty, got {values!r}")
    return tuple(strings)


def _logit_bias(values: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token, value) for token, value in dict(values).items()]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, got {values!r}") from None
    return tuple(
        (
            _integer("logit_bias: a token id", token),
            value if value == -math.inf else _number("logit_bias", value, -_PENALTY),
        )
        for token, value in pairs
    )
