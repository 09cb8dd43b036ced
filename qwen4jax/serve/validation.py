"""What a call asks for, checked before anything is queued; errors name the field and index."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict

from qwen4jax.decode.chat import TokenizerError
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.requests import Request
from qwen4jax.decode.text import Tokenizer
from qwen4jax.serve.errors import invalid
from qwen4jax.serve.model import NAMED_IDS, STOP_IDS, STOP_STRINGS, Served
from qwen4jax.serve.v1 import generation_pb2 as pb

_DEFAULT_NEW_TOKENS = 256
# fields of the message that are options of the same name
_SCALARS = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "max_new_tokens min_new_tokens ignore_eos n"
).split()
_NOT_FOR_TEMPLATES = {"messages", "template", "add_generation_prompt"}


@dataclasses.dataclass(frozen=True)
class Generation:
    """A checked Generate call.

    Attributes:
        requests: one per sample.
        logprobs: whether chunks have them.
        top: alternatives that chunks have.
    """

    requests: list[Request]
    logprobs: bool
    top: int


@dataclasses.dataclass(frozen=True)
class Scored:
    """A checked Score call.

    Attributes:
        ids: of the text.
        bytes: UTF-8 bytes of the text; None where there is none.
        named: ids that are asked for in every place.
        top: alternatives that are asked for in every place.
    """

    ids: list[int]
    bytes: int | None
    named: list[int]
    top: int


def generation(
    request: pb.GenerateRequest, served: Served, *, most_samples: int, seed: int
) -> Generation:
    """Checks a Generate call.

    Args:
        request: as it came.
        served: the model.
        most_samples: samples that the server takes at once.
        seed: for a call that has none.

    Raises:
        CallError: INVALID_ARGUMENT, naming the field.
    """
    field, ids = _prompt(request, served)
    context = served.max_context
    if len(ids) >= context:
        raise invalid(f"{field}: {len(ids)} tokens leave no room in a context of {context}")
    options = _sampling(request.sampling, served, room=context - len(ids), seed=seed)
    if options.n > most_samples:
        raise invalid(f"sampling.n: {options.n} is over {most_samples}, the samples taken at once")
    return Generation(
        requests=[Request(0, sample, tuple(ids), options) for sample in range(options.n)],
        logprobs=request.logprobs,
        top=_top(request.top_logprobs, served),
    )


def scored(request: pb.ScoreRequest, served: Served) -> Scored:
    """Checks a Score call.

    Raises:
        CallError: INVALID_ARGUMENT, naming the field.
    """
    field, ids = _prompt(request, served)
    if len(ids) > served.max_context:
        raise invalid(f"{field}: {len(ids)} tokens are over the context of {served.max_context}")
    named = list(request.named_token_ids)
    _check_ids("named_token_ids", named, served)
    if len(named) > NAMED_IDS:
        raise invalid(f"named_token_ids: {len(named)} ids, at most {NAMED_IDS}")
    size = len(request.text.encode()) if field == "text" else None
    return Scored(ids, size, named, _top(request.top_logprobs, served))


def _prompt(request: Any, served: Served) -> tuple[str, list[int]]:
    """The field that has the prompt, for messages, and the prompt's ids."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise invalid("prompt: is missing; give one of text, token_ids and chat")
    if kind == "token_ids":
        field, ids = "token_ids.ids", list(request.token_ids.ids)
        _check_ids(field, ids, served)
    else:
        if served.tokenizer is None:
            raise invalid(f"{kind}: the served checkpoint has no tokenizer; give token_ids")
        field = kind
        ids = (
            served.tokenizer.encode(request.text)
            if kind == "text"
            else _chat_ids(request.chat, served.tokenizer)
        )
        # a tokenizer may know more ids than the model has rows
        _check_ids(f"{field} (as token ids)", ids, served)
    if not ids:
        raise invalid(f"{field}: is empty")
    return field, ids


def _chat_ids(chat: pb.Chat, tokenizer: Tokenizer) -> list[int]:
    arguments = _plain(MessageToDict(chat.template_arguments))
    for name in _NOT_FOR_TEMPLATES & set(arguments):
        raise invalid(f"chat.template_arguments: {name!r} has a field of its own")
    opening = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    messages = [{"role": m.role, "content": m.content} for m in chat.messages]
    try:
        return tokenizer.chat_ids(messages, add_generation_prompt=opening, **arguments)
    except TokenizerError as error:
        # where the server keeps its files is not the client's business
        raise invalid("chat: " + str(error).replace(f"{tokenizer.origin}/", "")) from None
    except (TypeError, ValueError) as error:
        raise invalid(f"chat.{error}") from None


def _plain(value: Any) -> Any:
    """JSON of a protobuf Struct, which has floats only and no order, the same each time."""
    if isinstance(value, dict):
        return {name: _plain(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sampling(message: pb.Sampling, served: Served, *, room: int, seed: int) -> Sampling:
    given: dict[str, Any] = {n: getattr(message, n) for n in _SCALARS if message.HasField(n)}
    _check_ids("sampling.stop_token_ids", message.stop_token_ids, served)
    for token in message.logit_bias:
        if not 0 <= token < served.params.config.vocab_size:
            raise invalid(f"sampling.logit_bias[{token}]: {_outside(served)}")
    _check_stops(message.stop, served)
    if "max_new_tokens" not in given:
        given["max_new_tokens"] = min(_DEFAULT_NEW_TOKENS, room)
    try:
        options = Sampling(
            **given,
            logit_bias=dict(message.logit_bias),
            seed=message.seed if message.HasField("seed") else seed,
            stop=tuple(message.stop),
            stop_ids=tuple(message.stop_token_ids),
        )
        options.validate_for(served.params.config.vocab_size, served.eos_ids)
    except ValueError as error:
        raise invalid(f"sampling.{error}") from None
    stops = len(options.stops(served.eos_ids))
    if stops > STOP_IDS:
        raise invalid(
            f"sampling.stop_token_ids: {stops} ids with the model's own, at most {STOP_IDS}"
        )
    if options.max_new_tokens > room:
        raise invalid(
            f"sampling.max_new_tokens: {served.max_context - room} prompt tokens and "
            f"{options.max_new_tokens} new ones are over the context of {served.max_context}"
        )
    return options


def _check_stops(stops: Sequence[str], served: Served) -> None:
    if stops and served.tokenizer is None:
        raise invalid("sampling.stop: the served checkpoint has no tokenizer")
    if len(stops) > STOP_STRINGS:
        raise invalid(f"sampling.stop: {len(stops)} strings, at most {STOP_STRINGS}")
    for index, stop in enumerate(stops):
        if not stop:
            raise invalid(f"sampling.stop[{index}]: is empty")


def _check_ids(field: str, ids: Sequence[int], served: Served) -> None:
    """Checks ids while they have all 64 bits: narrowed, a wrong one may look right."""
    array = np.asarray(ids, np.int64)
    bad = np.flatnonzero((array < 0) | (array >= served.params.config.vocab_size))
    if bad.size:
        raise invalid(f"{field}[{bad[0]}]: {array[bad[0]]} {_outside(served)}")


def _outside(served: Served) -> str:
    return f"is not in [0, {served.params.config.vocab_size}), the vocabulary"


def _top(asked: int, served: Served) -> int:
    if not 0 <= asked <= served.top_logprobs:
        raise invalid(f"top_logprobs: {asked} is not in 0..{served.top_logprobs}")
    return asked
