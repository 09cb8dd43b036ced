"""What a call asks for and what it gets: prompts of every kind, and their completions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qwen4jax.decode.sampling import Sampling
from qwen4jax.decode.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one completion."""

    prompt_tokens: int
    completion_tokens: int


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
        text: their text, cut before a stop string; None without a tokenizer.
        finish_reason: `stop`, `length` or `error` (logits were not finite).
        logprobs: of each id under the model's own distribution; None if not asked for.
        usage: token counts.
        timings: seconds and rounds.
        captured: internals by name at every position of prompt and completion, if asked for.
        state: the decode state after the completion, if asked for; its last token is pending.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[float] | None
    usage: Usage
    timings: Timings
    captured: Any = None
    state: Any = None

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


def is_many(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts rather than one."""
    if isinstance(prompts, str | np.ndarray):
        return isinstance(prompts, np.ndarray) and prompts.ndim > 1
    if not isinstance(prompts, Sequence):
        raise TypeError(
            "prompts: a string, ids, chat messages or a list of these is expected, "
            f"found {type(prompts).__name__}"
        )
    return not all(isinstance(p, int | np.integer | Mapping) for p in prompts)


def prompt_ids(prompt: Any, where: str, vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of one prompt: a string, ids, or chat messages.

    Raises:
        TypeError, ValueError: names `where` and what is wrong with it.
    """
    if isinstance(prompt, str):
        ids: Any = _needed(tokenizer, where, "text").encode(prompt)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        try:
            ids = _needed(tokenizer, where, "chat messages").chat_ids(prompt)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    else:
        ids = prompt
    if not isinstance(ids, Sequence | np.ndarray):
        raise TypeError(
            f"{where}: a string, ids or chat messages are expected, found {type(ids).__name__}"
        )
    if len(ids) == 0:
        raise ValueError(f"{where}: is empty")
    for place, token in enumerate(ids):
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise TypeError(f"{where}[{place}]: an id is expected, found {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}[{place}]: id {token} is not in [0, {vocab_size})")
    return [int(token) for token in ids]


def make_requests(
    prompts: Sequence[Any],
    sampling: Sampling | Sequence[Sampling],
    *,
    vocab_size: int,
    longest: int,
    history: int,
    tokenizer: Tokenizer | None,
    eos_ids: Sequence[int],
    many: bool,
    may_be_empty: bool = False,
) -> list[Request]:
    """The samples of a call, prompt by prompt.

    Args:
        prompts: of the call.
        sampling: for all, or one per prompt.
        vocab_size: of the model.
        longest: tokens a sequence may have.
        history: tokens before every prompt (of a state that is continued).
        tokenizer: for text and chat prompts.
        eos_ids: that end a sequence.
        many: whether the caller gave a list, for the names in errors.
        may_be_empty: a prompt of no tokens is allowed (there is a history).

    Raises:
        TypeError, ValueError: names the argument and index.
    """
    if not len(prompts):
        raise ValueError("prompts: is empty")
    if isinstance(sampling, Sampling):
        each = [sampling] * len(prompts)
    else:
        each = list(sampling)
        for index, one in enumerate(each):
            if not isinstance(one, Sampling):
                raise TypeError(f"sampling[{index}]: {type(one).__name__} is no Sampling")
        if len(each) != len(prompts):
            raise ValueError(f"sampling: {len(each)} for {len(prompts)} prompts")
    requests = []
    for index, (prompt, options) in enumerate(zip(prompts, each, strict=True)):
        where = f"prompts[{index}]" if many else "prompts"
        empty = may_be_empty and not isinstance(prompt, np.ndarray) and not prompt
        ids = [] if empty else prompt_ids(prompt, where, vocab_size, tokenizer)
        try:
            options.validate_for(vocab_size, eos_ids)
        except ValueError as error:
            name = "sampling" if isinstance(sampling, Sampling) else f"sampling[{index}]"
            raise ValueError(f"{name}: {error}") from None
        if options.stop and tokenizer is None:
            raise ValueError("sampling: stop strings need a tokenizer")
        if history + len(ids) + 1 > longest:
            raise ValueError(
                f"{where}: {history + len(ids)} tokens leave no room below {longest} positions"
            )
        requests += [Request(index, s, tuple(ids), options) for s in range(options.n)]
    return requests


def _needed(tokenizer: Tokenizer | None, where: str, what: str) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(
            f"{where}: is {what}, which needs a tokenizer; pass tokenizer=Tokenizer.load(DIR)"
        )
    return tokenizer
