"""What a call asks for and what it gets: prompts of every kind, and their completions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qwen4jax.decode.options import Sampling
from qwen4jax.decode.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one completion.

    Attributes:
        prompt_tokens: before the completion, those of a given state included.
        completion_tokens: generated.
        cached_tokens: tokens of the prompt that a given state held: they were not fed again.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Timings:
    """Where the seconds of one completion went.

    Attributes:
        rounds: decode rounds it took part in.
        compile_s: compiling during the call, shared by all its completions.
        prefill_s: from admission to the first token, without compiling.
        decode_s: from the first token to the last, without compiling.
    """

    rounds: int
    compile_s: float
    prefill_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sample of one prompt.

    Attributes:
        token_ids: generated ids; a stop id is the last of them, a stop string is not cut from them.
        text: their text without a final stop id, cut before a stop string; None without a
            tokenizer.
        finish_reason: `stop`, `length` or `error` (logits were not finite).
        logprobs: of each id under the model's own distribution; None if not asked for.
        usage: token counts.
        timings: seconds and rounds.
        captured: internals by name at every position of prompt and completion, if asked for.
        state: the decode state after the completion, if asked for; its last token is pending. None
            after an error.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[float] | None
    usage: Usage
    timings: Timings
    # large arrays: not printed, and of no use in a comparison
    captured: Any = dataclasses.field(default=None, repr=False, compare=False)
    state: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def tokens_per_round(self) -> float | None:
        """Mean tokens that a round gave; None without a round."""
        rounds = self.timings.rounds
        return (len(self.token_ids) - 1) / rounds if rounds else None


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample to generate, checked.

    Attributes:
        prompt: which prompt of the call.
        sample: which of its samples.
        ids: prompt ids.
        sampling: options.
    """

    prompt: int
    sample: int
    ids: tuple[int, ...]
    sampling: Sampling


def is_many(prompts: Any, name: str = "prompts") -> bool:
    """Whether `prompts` is a list of prompts rather than one.

    Raises:
        TypeError: it is neither; `name` is what the caller calls it.
    """
    if isinstance(prompts, str):
        return False
    if isinstance(prompts, np.ndarray | jax.Array):
        return prompts.ndim > 1
    if not _is_list(prompts):
        raise TypeError(
            f"{name}: a string, ids, chat messages or a list of these is expected, "
            f"found {type(prompts).__name__}"
        )
    return not all(_is_id(p) or isinstance(p, bool | Mapping) for p in prompts)


def prompt_ids(prompt: Any, where: str, vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of one prompt: a string, ids, or chat messages.

    Raises:
        TypeError, ValueError: names `where` and what is wrong with it.
    """
    ids = prompt
    if isinstance(prompt, np.ndarray | jax.Array):
        # of an array the values, so that each is checked as an int
        ids = np.asarray(prompt)
        if ids.ndim != 1:
            raise TypeError(f"{where}: an array of {ids.ndim} axes, ids have one")
        ids = ids.tolist()
    is_chat = _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str) or is_chat:
        known = _needed(tokenizer, where, "chat messages" if is_chat else "text")
        try:
            ids = known.encode(prompt) if isinstance(prompt, str) else known.chat_ids(prompt)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{where}: {error}") from error
    if not _is_list(ids):
        raise TypeError(
            f"{where}: a string, ids or chat messages are expected, found {type(ids).__name__}"
        )
    if len(ids) == 0:
        raise ValueError(f"{where}: is empty")
    for place, token in enumerate(ids):
        if not _is_id(token):
            raise TypeError(f"{where}[{place}]: an id is expected, found {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}[{place}]: id {token} is not in [0, {vocab_size})")
    return [int(token) for token in ids]


def make_requests(
    prompts: Sequence[Any],
    sampling: Any,
    *,
    vocab_size: int,
    longest: int,
    history: int,
    tokenizer: Tokenizer | None,
    eos_ids: Sequence[int],
    many: bool,
    pending: int | None = None,
) -> list[Request]:
    """The samples of a call, prompt by prompt.

    Args:
        prompts: of the call.
        sampling: for all, or one per prompt.
        vocab_size: of the model.
        longest: tokens a sequence may have.
        history: tokens before every prompt (of a state that is continued); prompts may be empty
            then.
        tokenizer: for text and chat prompts.
        eos_ids: that end a sequence.
        many: whether the caller gave a list, for the names in errors.
        pending: the last token of the history where it was not fed; every prompt begins with it.

    Raises:
        TypeError, ValueError: names the argument and index.
    """
    if not len(prompts):
        raise ValueError("prompts: is empty")
    each = per_prompt(sampling, len(prompts))
    before = [] if pending is None else [pending]
    requests = []
    for index, (prompt, options) in enumerate(zip(prompts, each, strict=True)):
        where = f"prompts[{index}]" if many else "prompts"
        name = "sampling" if isinstance(sampling, Sampling) else f"sampling[{index}]"
        empty = history > 0 and isinstance(prompt, str | Sequence) and len(prompt) == 0
        own = [] if empty else prompt_ids(prompt, where, vocab_size, tokenizer)
        ids = (*before, *own)
        try:
            options.validate_for(vocab_size, eos_ids)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if options.stop and tokenizer is None:
            raise ValueError(f"{name}: stop strings need a tokenizer")
        if history and options.repetition_penalty != 1:
            raise ValueError(
                f"{name}: repetition_penalty needs the ids of the whole prompt, a state has none"
            )
        if history + len(ids) + 1 > longest:
            raise ValueError(
                f"{where}: {history + len(ids)} tokens leave no room below {longest} positions"
            )
        requests += [Request(index, s, ids, options) for s in range(options.n)]
    return requests


def per_prompt(sampling: Any, count: int) -> list[Sampling]:
    """The options of each of `count` prompts, from one for all or a list."""
    if isinstance(sampling, Sampling):
        return [sampling] * count
    if not _is_list(sampling):
        raise TypeError(
            f"sampling: a Sampling or a list of them is expected, found {type(sampling).__name__}"
        )
    for index, one in enumerate(sampling):
        if not isinstance(one, Sampling):
            raise TypeError(f"sampling[{index}]: {type(one).__name__} is no Sampling")
    if len(sampling) != count:
        raise ValueError(f"sampling: {len(sampling)} for {count} prompts")
    return list(sampling)


def _is_list(value: Any) -> bool:
    # bytes are sequences of integers, and never meant as ids
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _needed(tokenizer: Tokenizer | None, where: str, what: str) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(
            f"{where}: is {what}, which needs a tokenizer; pass tokenizer=Tokenizer.load(DIR)"
        )
    return tokenizer
