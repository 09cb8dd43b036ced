"""What the client's calls take and give: plain values, and the messages they travel as."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import grpc

from qwen4jax.serve.v1 import generation_pb2 as pb

REQUEST_ID = "x-request-id"
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

# text, token ids, or chat messages (mappings of role and content)
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class SamplingOptions(TypedDict, total=False):
    """How a prompt is continued; `generation.proto` says what each means and its default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int


class ServerError(Exception):
    """A call that ended with a status.

    Attributes:
        code: name of the gRPC status, as `INVALID_ARGUMENT`.
        message: what the server says; names the field where one is wrong.
        request_id: under which the server's log has the call; None if it never arrived.
    """

    def __init__(self, code: str, message: str, request_id: str | None):
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.request_id = code, message, request_id


@dataclasses.dataclass(frozen=True)
class Finish:
    """How a sample ended.

    Attributes:
        reason: `stop` or `length`.
        prompt_tokens: before the answer.
        completion_tokens: of the answer.
        queue_seconds: from arrival to a slot.
        prefill_seconds: from the slot to the first token.
        decode_seconds: from the first token to the last.
        rounds: speculative rounds that it took part in.
        tokens_per_round: their mean; None without a round.
        seed: that was used.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    rounds: int
    tokens_per_round: float | None
    seed: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What a sample gained.

    Attributes:
        sample: of the call.
        text: new text that is certain.
        token_ids: new ids.
        logprobs: of each id; empty if not asked for.
        top_logprobs: of each id the most probable (id, log-probability), best first; empty if not
            asked for.
        rounds: speculative rounds that gave it.
        finish: None while it runs.
    """

    sample: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    rounds: int
    finish: Finish | None


@dataclasses.dataclass(frozen=True)
class Answer:
    """A complete sample; the attributes are those of `Chunk`, joined."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish: Finish


@dataclasses.dataclass(frozen=True)
class Scored:
    """What the model thinks of a text.

    Attributes:
        token_ids: of the text.
        logprobs: of each id but the first.
        named: of the ids asked for, after each id of the text; empty if none were.
        top_logprobs: after each id the most probable (id, log-probability); empty if not asked for.
        total: sum of `logprobs`.
        bits_per_byte: of a text; None for ids, and for one token.
    """

    token_ids: list[int]
    logprobs: list[float]
    named: list[list[float]]
    top_logprobs: list[list[tuple[int, float]]]
    total: float
    bits_per_byte: float | None


def generate_request(
    prompt: Prompt,
    options: Mapping[str, Any],
    *,
    logprobs: bool,
    top_logprobs: int,
    template_arguments: Mapping[str, Any] | None,
) -> pb.GenerateRequest:
    """The message of a Generate call."""
    request = pb.GenerateRequest(logprobs=logprobs, top_logprobs=top_logprobs)
    _set_prompt(request, prompt, template_arguments)
    bias = dict(options.get("logit_bias") or {})
    given = {name: value for name, value in options.items() if name != "logit_bias"}
    request.sampling.CopyFrom(pb.Sampling(**given, logit_bias=bias))
    return request


def score_request(
    prompt: Prompt, *, named_token_ids: Sequence[int], top_logprobs: int
) -> pb.ScoreRequest:
    """The message of a Score call."""
    request = pb.ScoreRequest(named_token_ids=named_token_ids, top_logprobs=top_logprobs)
    _set_prompt(request, prompt, None)
    return request


def _set_prompt(request: Any, prompt: Any, arguments: Mapping[str, Any] | None) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        messages = [pb.ChatMessage(role=m["role"], content=m["content"]) for m in prompt]
        request.chat.messages.extend(messages)
        request.chat.template_arguments.update(arguments or {})
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))


def chunk_of(message: pb.GenerateChunk) -> Chunk:
    """The value of a message."""
    return Chunk(
        sample=message.sample,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=list(message.logprobs),
        top_logprobs=_pairs(message.top_logprobs),
        rounds=message.rounds,
        finish=_finish_of(message.finish) if message.HasField("finish") else None,
    )


def scored_of(message: pb.ScoreResponse) -> Scored:
    """The value of a message."""
    return Scored(
        token_ids=list(message.token_ids),
        logprobs=list(message.logprobs),
        named=[list(row.logprobs) for row in message.named],
        top_logprobs=_pairs(message.top_logprobs),
        total=message.total,
        bits_per_byte=message.bits_per_byte if message.HasField("bits_per_byte") else None,
    )


def joined(chunks: Iterable[Chunk]) -> list[Answer]:
    """The samples that chunks of complete answers make, in order."""
    by_sample: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_sample.setdefault(chunk.sample, []).append(chunk)
    answers = []
    for _, own in sorted(by_sample.items()):
        finish = own[-1].finish
        assert finish is not None, "an answer without its end"
        answers.append(
            Answer(
                text="".join(chunk.text for chunk in own),
                token_ids=[token for chunk in own for token in chunk.token_ids],
                logprobs=[value for chunk in own for value in chunk.logprobs],
                top_logprobs=[best for chunk in own for best in chunk.top_logprobs],
                finish=finish,
            )
        )
    return answers


def error_of(error: grpc.RpcError) -> ServerError:
    """A failed call as the client raises it."""
    call: Any = error
    trailing = dict(call.trailing_metadata() or ())
    return ServerError(call.code().name, call.details() or "", trailing.get(REQUEST_ID))


def _finish_of(message: pb.Finish) -> Finish:
    timing, usage = message.timing, message.usage
    return Finish(
        reason=_REASONS.get(message.reason, "unspecified"),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_seconds=timing.queue_seconds,
        prefill_seconds=timing.prefill_seconds,
        decode_seconds=timing.decode_seconds,
        rounds=timing.rounds,
        tokens_per_round=timing.tokens_per_round if timing.HasField("tokens_per_round") else None,
        seed=message.seed,
    )


def _pairs(rows: Iterable[pb.TopLogprobs]) -> list[list[tuple[int, float]]]:
    return [[(one.token_id, one.logprob) for one in row.tokens] for row in rows]
