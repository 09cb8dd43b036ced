"""`generate`, `stream` and `prefill`: what researchers call."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from tqdm.auto import tqdm

from qwen4jax.ablation import Ablation, IndexShare
from qwen4jax.decode.batching import Delta, Engine, Sizes
from qwen4jax.decode.compiling import clock, report_new_signature
from qwen4jax.decode.portable import extract, graft
from qwen4jax.decode.prefill import prefill as feed_prompts
from qwen4jax.decode.requests import (
    Completion,
    Request,
    Timings,
    Usage,
    is_many,
    make_requests,
    prompt_ids,
)
from qwen4jax.decode.sampling import Row, Sampling, make_controls
from qwen4jax.decode.text import Tokenizer
from qwen4jax.forward_pass import check_capture, forward
from qwen4jax.params import Params
from qwen4jax.state import MAX_DRAFT, DecodeState, init_state

_CHUNKS = (16, 64, 256, 512)


def generate(
    params: Params,
    prompts: Any,
    *,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
    draft: int | None = None,
    index_share: IndexShare | None = None,
    tokenizer: Tokenizer | None = None,
    state: DecodeState | None = None,
    logprobs: bool = False,
    capture: Sequence[str] = (),
    keep_state: bool = False,
    slots: int = 8,
    chunk: int = 256,
    kv_dtype: str | None = None,
    progress: bool | None = None,
) -> Any:
    """Continues prompts, with speculative decoding.

    Greedy and sampled ids do not depend on `draft`, `index_share`, `slots`, `chunk` or the other
    prompts: exactly in float32, in bfloat16 as far as the margins exceed its error.

    Args:
        params: of the model.
        prompts: a string, token ids, chat messages (dicts of role and content), or a list of these.
        sampling: options for all prompts, or one per prompt.
        draft: draft tokens per round, 0 to 7; by default 3, and 0 without a draft head.
        index_share: how draft steps select tokens; by default as `params.config.ablation` says.
        tokenizer: for text and chat prompts, texts and stop strings.
        state: a state of one request (from `prefill` or `keep_state`) that every prompt continues;
            prompts may then be empty lists.
        logprobs: whether completions have the log-probability of each id.
        capture: names or patterns of internals, see `qwen4jax.layers.capture.NAMES`; they come
            from a forward pass over the finished sequence (without `state` only).
        keep_state: whether completions have the decode state that follows them.
        slots: requests that run together.
        chunk: most prompt tokens of a row in one prefill step.
        kv_dtype: of cached keys and values, by default the model's.
        progress: a progress bar; by default in a terminal or notebook only.

    Returns:
        A `Completion` for one prompt, a list in order for a list; where `sampling.n` is over 1, a
        list of the prompt's samples in its place.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named with its index, and nothing ran.
    """
    call = _Call(
        params, prompts, sampling, draft, index_share, tokenizer, state, logprobs, slots, chunk,
        kv_dtype,
    )  # fmt: skip
    if capture:
        check_capture(params, capture)
        if state is not None:
            raise ValueError("capture: internals of a continued state are not kept")
    compiled = clock.seconds
    engine = call.engine()
    kept: dict[int, list[float]] = {}
    texts: dict[int, str] = {}
    states: dict[int, DecodeState] = {}
    with _bar(call.requests, progress) as bar:
        for delta in engine.run(call.requests):
            bar.set_description("generating")
            bar.update(len(delta.token_ids))
            texts[delta.request] = texts.get(delta.request, "") + delta.text
            kept.setdefault(delta.request, []).extend(delta.logprobs or [])
            if delta.finish_reason and keep_state:
                states[delta.request] = _state_after(call, engine, delta.request)
    compile_s = clock.seconds - compiled
    completions: list[list[Completion]] = [[] for _ in call.prompts]
    for number, request in enumerate(call.requests):
        row = engine.finished[number]
        captured = None
        if capture:
            captured = forward(params, [[*request.ids, *row.ids]], capture=capture)[1]
        completions[request.prompt].append(
            Completion(
                token_ids=row.ids,
                text=None if call.tokenizer is None else texts[number],
                finish_reason=row.reason,
                logprobs=kept[number] if logprobs else None,
                usage=Usage(call.history + len(request.ids), len(row.ids)),
                timings=Timings(
                    rounds=row.rounds,
                    compile_s=compile_s,
                    prefill_s=row.seconds("admitted", "first"),
                    decode_s=row.seconds("first", "last"),
                ),
                captured=captured,
                state=states.get(number),
            )
        )
    results = [one if call.samples[i] > 1 else one[0] for i, one in enumerate(completions)]
    return results if call.many else results[0]


def stream(
    params: Params,
    prompts: Any,
    *,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
    draft: int | None = None,
    index_share: IndexShare | None = None,
    tokenizer: Tokenizer | None = None,
    state: DecodeState | None = None,
    logprobs: bool = False,
    slots: int = 8,
    chunk: int = 256,
    kv_dtype: str | None = None,
) -> Iterator[Delta]:
    """As `generate`, one `Delta` per burst of a request; closing the iterator frees everything.

    A delta's `request` counts samples in order: with `n` samples per prompt, sample `s` of prompt
    `p` is `p * n + s`. Wrong arguments raise here, before the first delta is asked for.
    """
    call = _Call(
        params, prompts, sampling, draft, index_share, tokenizer, state, logprobs, slots, chunk,
        kv_dtype,
    )  # fmt: skip
    # a generator's frame holds the engine, and with it every device buffer
    return (delta for delta in call.engine().run(call.requests))


def prefill(
    params: Params,
    prompt: Any,
    *,
    max_length: int | None = None,
    draft: int | None = None,
    tokenizer: Tokenizer | None = None,
    chunk: int = 256,
) -> DecodeState:
    """The state after a prompt, to be continued by `generate(params, ..., state=...)`.

    Args:
        params: of the model.
        prompt: a string, token ids or chat messages.
        max_length: tokens the state can hold; by default as many as the prompt has.
        draft: as `generate`; a state made for drafts serves any number of them.
        tokenizer: for text and chat prompts.
        chunk: prompt tokens of one step.
    """
    ids = prompt_ids(prompt, "prompt", params.config.vocab_size, tokenizer)
    state = init_state(
        params.config,
        slots=1,
        max_length=max(len(ids), max_length or 0),
        drafts=_drafts(params, draft),
    )
    return feed_prompts(params, state, [ids], [0], chunk=_chunk_for(len(ids), chunk))[0]


class _Call:
    """The arguments of a call, checked."""

    def __init__(
        self, params, prompts, sampling, draft, index_share, tokenizer, state, logprobs, slots,
        chunk, kv_dtype,
    ):  # fmt: skip
        if not isinstance(params, Params):
            raise TypeError(f"params: {type(params).__name__} is no Params")
        for name, value, least in (("slots", slots, 1), ("chunk", chunk, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: {value!r} is no integer from {least}")
        config = params.config
        self.drafts = _drafts(params, draft)
        share = config.ablation.index_share if index_share is None else index_share
        self.params = params.replace(config=config.replace(ablation=Ablation(index_share=share)))
        self.tokenizer, self.logprobs, self.source = tokenizer, logprobs, state
        self.history = 0 if state is None else _check_state(state, config, self.drafts)
        # with a state to continue, an empty list is one prompt of no tokens
        alone = state is not None and isinstance(prompts, list) and not prompts
        self.many = not alone and is_many(prompts)
        self.prompts = list(prompts) if self.many else [prompts]
        self.eos_ids = _eos_ids(config, tokenizer)
        longest = config.max_position_embeddings
        self.requests = make_requests(
            self.prompts,
            sampling,
            vocab_size=config.vocab_size,
            longest=longest,
            history=self.history,
            tokenizer=tokenizer,
            eos_ids=self.eos_ids,
            many=self.many,
            may_be_empty=state is not None,
        )
        if state is not None and int(state.token[0]) >= 0:
            # the pending token of a kept state is the first that has not been fed
            pending = int(state.token[0])
            self.requests = [
                Request(r.prompt, r.sample, (pending, *r.ids), r.sampling) for r in self.requests
            ]
        each = [sampling] * len(self.prompts) if isinstance(sampling, Sampling) else list(sampling)
        self.samples = [one.n for one in each]
        need = [self.history + len(r.ids) + r.sampling.max_new_tokens for r in self.requests]
        feed = max(len(r.ids) for r in self.requests)
        self.sizes = Sizes(
            slots=min(slots, _power_of_two(len(self.requests))),
            max_length=min(_power_of_two(max(64, *need)), longest),
            drafts=self.drafts,
            chunk=_chunk_for(feed, chunk),
            kv_dtype=kv_dtype,
        )

    def engine(self) -> Engine:
        """An engine for the call's requests."""
        rows = [
            Row(r.sampling, max(len(r.ids), 1), prompt_ids=r.ids, sample=r.sample)
            for r in self.requests
        ]
        vocab = self.params.config.vocab_size
        mode = make_controls(rows, len(rows), vocab, eos_ids=self.eos_ids)
        signature = {
            "slots": self.sizes.slots,
            "max_length": self.sizes.max_length,
            "draft": self.sizes.drafts,
            "chunk": self.sizes.chunk,
            "kv_dtype": self.sizes.kv_dtype,
            "logprobs": self.logprobs,
            "state": None if self.source is None else self.source.capacity,
            "sampling": tuple(k for k, v in vars(mode).items() if v is not None),
            "stop_ids": mode.stop_ids.shape[1],
        }
        report_new_signature(self.params.config, signature)
        return Engine(
            self.params,
            self.sizes,
            mode,
            tokenizer=self.tokenizer,
            eos_ids=self.eos_ids,
            logprobs=self.logprobs,
            source=self.source,
        )


def _state_after(call: _Call, engine: Engine, number: int) -> DecodeState:
    """The state of a request that has just ended: its last token pending, all before it live."""
    row = engine.finished[number]
    live = call.history + len(row.request.ids) + len(row.ids) - 1
    kept = extract(engine.state, row.slot)
    if int(kept.length[0]) == live:
        return kept.replace(token=jnp.asarray([row.ids[-1]], jnp.int32))
    # a stop string was seen late: feed what was kept, as if the rest had never been
    state = init_state(
        call.params.config, slots=1, max_length=engine.state.capacity, drafts=call.drafts
    )
    if call.source is not None:
        state = graft(state, jnp.int32(0), call.source)
    ids = [*row.request.ids, *row.ids[:-1]]
    if ids:
        state, _ = feed_prompts(call.params, state, [ids], [0], chunk=call.sizes.chunk)
    return state.replace(token=jnp.asarray([row.ids[-1]], jnp.int32))


def _drafts(params: Params, draft: int | None) -> int:
    has_head = params.config.mtp_num_hidden_layers > 0
    if draft is None:
        return 3 if has_head else 0
    if not isinstance(draft, int) or isinstance(draft, bool) or not 0 <= draft <= MAX_DRAFT:
        raise ValueError(f"draft: {draft!r} is not in 0..{MAX_DRAFT}")
    if draft and not has_head:
        raise ValueError(f"draft: {draft}, but the model has no draft head (mtp)")
    return draft


def _check_state(state: DecodeState, config: Any, drafts: int) -> int:
    """Tokens that a given state holds."""
    if not isinstance(state, DecodeState):
        raise TypeError(f"state: {type(state).__name__} is no DecodeState")
    if state.slots != 1:
        raise ValueError(f"state: has {state.slots} slots, one is expected")
    if len(state.layers) != config.num_hidden_layers:
        raise ValueError(
            f"state: is of a model of {len(state.layers)} layers, not {config.num_hidden_layers}"
        )
    if drafts and state.mtp is None:
        raise ValueError("state: was made without a draft head; pass draft=0")
    length = int(state.length[0])
    if not length:
        raise ValueError("state: holds no tokens")
    return length


def _eos_ids(config: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a sequence: the tokenizer's, else the configuration's."""
    own = config.eos_token_id
    own = (own,) if isinstance(own, int) else own
    found = tokenizer.eos_ids if tokenizer is not None and tokenizer.eos_ids else own
    return tuple(i for i in found if 0 <= i < config.vocab_size)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _chunk_for(tokens: int, most: int) -> int:
    """The smallest bucket that holds a prompt, at most `most`."""
    return min(next((c for c in _CHUNKS if c >= tokens), most), most)


@contextlib.contextmanager
def _bar(requests: Sequence[Request], progress: bool | None) -> Iterator[Any]:
    shown = progress if progress is not None else sys.stderr.isatty() or "ipykernel" in sys.modules
    total = sum(r.sampling.max_new_tokens for r in requests)
    with tqdm(total=total, unit="tok", disable=not shown, desc="compiling or prefilling") as bar:
        yield bar
