"""`generate`, `stream` and `prefill`: what researchers call."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from qwen4jax.ablation import IndexShare
from qwen4jax.decode.batching import Engine
from qwen4jax.decode.call import (
    Call,
    bucket,
    check_integer,
    check_kv_dtype,
    check_params,
    chunk_for,
    drafts_of,
    known_tokenizer,
)
from qwen4jax.decode.capacity import require_room
from qwen4jax.decode.compiling import clock
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.portable import extract, graft
from qwen4jax.decode.prefill import prefill as feed_prompts
from qwen4jax.decode.requests import Completion, Request, Timings, Usage, prompt_ids
from qwen4jax.decode.running import Delta
from qwen4jax.forward_pass import check_capture, forward
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, init_state


def generate(
    params: Params,
    prompts: Any,
    *,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
    draft: int | None = None,
    index_share: IndexShare | None = None,
    tokenizer: Any = None,
    state: DecodeState | None = None,
    logprobs: bool = False,
    capture: Sequence[str] = (),
    keep_state: bool = False,
    slots: int = 8,
    chunk: int = 2048,
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
        tokenizer: for text and chat prompts, texts and stop strings: a `Tokenizer`, or an object
            like Hugging Face's.
        state: a state of one request (from `prefill` or `keep_state`) that every prompt continues;
            prompts may then be empty lists. Penalties count the ids that follow it only.
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
    call = Call(
        params, prompts, sampling, draft, index_share, tokenizer, state, logprobs, slots, chunk,
        kv_dtype,
    )  # fmt: skip
    if capture:
        check_capture(call.params, capture)
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
            # there is no state to go on from after an error
            if keep_state and delta.finish_reason in ("stop", "length"):
                states[delta.request] = _state_after(call, engine, delta.request)
    compile_s = clock.seconds - compiled
    completions: list[list[Completion]] = [[] for _ in call.samples]
    for number, request in enumerate(call.requests):
        row = engine.finished[number]
        captured = None
        if capture:
            captured = _internals(params, [*request.ids, *row.ids], capture)
        completions[request.prompt].append(
            Completion(
                token_ids=row.ids,
                text=None if call.tokenizer is None else texts[number],
                finish_reason=row.reason,
                logprobs=kept[number] if logprobs else None,
                usage=Usage(call.history + len(request.ids), len(row.ids), call.history),
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
    tokenizer: Any = None,
    state: DecodeState | None = None,
    logprobs: bool = False,
    slots: int = 8,
    chunk: int = 2048,
    kv_dtype: str | None = None,
) -> Iterator[Delta]:
    """As `generate`, one `Delta` per burst of a request; closing the iterator frees everything.

    A delta's `request` counts samples in order: with `n` samples per prompt, sample `s` of prompt
    `p` is `p * n + s`. Wrong arguments raise here, before the first delta is asked for.
    """
    call = Call(
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
    tokenizer: Any = None,
    chunk: int = 2048,
    kv_dtype: str | None = None,
) -> DecodeState:
    """The state after a prompt, to be continued by `generate(params, ..., state=...)`.

    Args:
        params: of the model.
        prompt: a string, token ids or chat messages.
        max_length: tokens the state can hold, at least; by default those of the prompt.
        draft: as `generate`; a state made for drafts serves any number of them.
        tokenizer: for text and chat prompts.
        chunk: prompt tokens of one step.
        kv_dtype: of cached keys and values, by default the model's.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named, and nothing ran.
    """
    check_params(params)
    drafts, known = drafts_of(params, draft), known_tokenizer(tokenizer)
    check_integer("chunk", chunk)
    check_kv_dtype(kv_dtype)
    longest = params.config.max_position_embeddings
    ids = prompt_ids(prompt, "prompt", params.config.vocab_size, known)
    if max_length is not None:
        check_integer("max_length", max_length, longest)
    if len(ids) > longest:
        raise ValueError(f"prompt: {len(ids)} tokens, the model has {longest} positions")
    room = bucket(max(len(ids), max_length or 0), longest)
    sizes: dict[str, Any] = dict(slots=1, max_length=room, drafts=drafts, kv_dtype=kv_dtype)
    chunk = chunk_for(len(ids), chunk)
    require_room(params.config, **sizes, prefill=(1, chunk))
    state = init_state(params.config, **sizes)
    return feed_prompts(params, state, [ids], [0], chunk=chunk)[0]


def _internals(params: Params, ids: Sequence[int], capture: Sequence[str]) -> dict[str, Any]:
    """Named internals at every position of a sequence, from a forward pass of a bucket's length."""
    length = bucket(len(ids), params.config.max_position_embeddings)
    tokens, mask = np.zeros((2, 1, length), np.int32)
    tokens[0, : len(ids)], mask[0, : len(ids)] = ids, 1
    _, captured = forward(params, tokens, mask=mask, capture=capture)
    return {name: value[:, : len(ids)] for name, value in captured.items()}


def _state_after(call: Call, engine: Engine, number: int) -> DecodeState:
    """The state of a request that has just ended: its last token pending, all before it live."""
    row = engine.finished[number]
    pending = jnp.asarray(row.ids[-1:], jnp.int32)
    live = call.history + len(row.request.ids) + len(row.ids) - 1
    kept = extract(engine.state, row.slot)
    if int(kept.length[0]) == live:
        return kept.replace(token=pending)
    # a stop string was seen late: feed what was kept, as if the rest had never been
    sizes = call.sizes
    state = init_state(
        call.params.config,
        slots=1,
        max_length=sizes.max_length,
        drafts=sizes.drafts,
        kv_dtype=sizes.kv_dtype,
    )
    if call.source is not None:
        state = graft(state, 0, call.source)
    ids = [*row.request.ids, *row.ids[:-1]]
    if ids:
        state, _ = feed_prompts(call.params, state, [ids], [0], chunk=sizes.chunk)
    return state.replace(token=pending)


@contextlib.contextmanager
def _bar(requests: Sequence[Request], progress: bool | None) -> Iterator[Any]:
    shown = progress if progress is not None else sys.stderr.isatty() or "ipykernel" in sys.modules
    total = sum(r.sampling.max_new_tokens for r in requests)
    with tqdm(total=total, unit="tok", disable=not shown, desc="compiling or prefilling") as bar:
        yield bar
