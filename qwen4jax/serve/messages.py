"""Answers as messages of the protocol."""

import importlib.metadata
from collections.abc import Iterator, Sequence

import jax

from qwen4jax.decode.running import Delta
from qwen4jax.decode.score import Score, bits_per_byte
from qwen4jax.serve.jobs import Gain, Times
from qwen4jax.serve.model import NAMED_IDS, STOP_IDS, Served
from qwen4jax.serve.v1 import generation_pb2 as pb
from qwen4jax.serve.validation import Generation, Scored

_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class Answer:
    """The chunks of a Generate call.

    Attributes:
        left: samples that have not ended.
    """

    def __init__(self, asked: Generation):
        self.left = len(asked.requests)
        self._asked = asked
        self._tokens = [0] * self.left

    def chunks(self, gains: Sequence[Gain]) -> Iterator[pb.GenerateChunk]:
        """What samples gained, one chunk for each of them: bursts that came together are joined."""
        by_sample: dict[int, list[Gain]] = {}
        for gain in gains:
            by_sample.setdefault(gain.sample, []).append(gain)
        for sample, own in by_sample.items():
            yield self._chunk(sample, [gain.delta for gain in own], own[-1].times)

    def _chunk(self, sample: int, deltas: Sequence[Delta], times: Times | None) -> pb.GenerateChunk:
        chunk = pb.GenerateChunk(
            sample=sample,
            text="".join(delta.text for delta in deltas),
            rounds=sum(delta.rounds for delta in deltas),
        )
        for delta in deltas:
            chunk.token_ids.extend(delta.token_ids)
            if self._asked.logprobs:
                chunk.logprobs.extend(delta.logprobs or ())
            if self._asked.top:
                chunk.top_logprobs.extend(
                    _best(pairs[: self._asked.top]) for pairs in delta.top or ()
                )
        self._tokens[sample] += len(chunk.token_ids)
        if times is not None:
            self.left -= 1
            request = self._asked.requests[sample]
            reason = _REASONS[deltas[-1].finish_reason or ""]
            usage = pb.Usage(prompt_tokens=len(request.ids), completion_tokens=self._tokens[sample])
            chunk.finish.CopyFrom(
                pb.Finish(
                    reason=reason,
                    usage=usage,
                    timing=_timing(times, self._tokens[sample]),
                    seed=request.sampling.seed or 0,
                )
            )
        return chunk


def score_message(score: Score, asked: Scored) -> pb.ScoreResponse:
    """The answer to a Score call."""
    answer = pb.ScoreResponse(
        token_ids=asked.ids, logprobs=score.logprobs.tolist(), total=score.total
    )
    if score.tokens and asked.bytes:
        answer.bits_per_byte = bits_per_byte(-score.total, asked.bytes) or 0.0
    if asked.named and score.named is not None:
        width = len(asked.named)
        rows = score.named[:, :width].tolist()
        answer.named.extend(pb.NamedLogprobs(logprobs=row) for row in rows)
    if asked.top and score.top_ids is not None and score.top_logprobs is not None:
        for ids, values in zip(score.top_ids.tolist(), score.top_logprobs.tolist(), strict=True):
            answer.top_logprobs.append(_best(list(zip(ids, values, strict=True))[: asked.top]))
    return answer


def model_message(served: Served) -> pb.GetModelResponse:
    """What is served."""
    config, tokenizer = served.params.config, served.tokenizer
    templates = tokenizer is not None and tokenizer.chat_template is not None
    return pb.GetModelResponse(
        name=served.name,
        version=importlib.metadata.version("qwen4jax") if _is_installed() else "",
        vocab_size=config.vocab_size,
        max_context=served.max_context,
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_experts=config.num_experts,
        dtype=config.dtype,
        kv_dtype=served.sizes.kv_dtype or config.dtype,
        experts_form=config.quantization.experts,
        parameter_bytes=served.parameter_bytes,
        drafts=served.sizes.drafts,
        index_share=config.ablation.index_share,
        eos_token_ids=served.eos_ids,
        has_tokenizer=tokenizer is not None,
        has_chat_template=templates,
        max_top_logprobs=served.top_logprobs,
        max_stop_token_ids=STOP_IDS - len(served.eos_ids),
        max_named_token_ids=NAMED_IDS,
        notes=served.notes,
        device=jax.devices()[0].device_kind,
        jax_version=jax.__version__,
    )


def _is_installed() -> bool:
    # a checkout may be run without being installed
    return any(importlib.metadata.distributions(name="qwen4jax"))


def _best(pairs: Sequence[tuple[int, float]]) -> pb.TopLogprobs:
    return pb.TopLogprobs(
        tokens=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in pairs]
    )


def _timing(times: Times, tokens: int) -> pb.Timing:
    timing = pb.Timing(
        queue_seconds=times.queue,
        prefill_seconds=times.prefill,
        decode_seconds=times.decode,
        rounds=times.rounds,
    )
    if times.rounds:
        timing.tokens_per_round = (tokens - 1) / times.rounds
    return timing
