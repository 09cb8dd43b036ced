"""A small model and its tokenizer for tests of the public calls, and plain decoding beside them.

Compiling dominates. So nearly all tests run one pair of programs: `one_bucket` makes every call
use the same slots, lengths, chunks and sampling mode, whatever it asks for.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.config import LINEAR, SPARSE
from qwen4jax.decode import call, generate
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.prefill import decode_token, logits_of, prefill
from qwen4jax.decode.sampling import sample
from qwen4jax.decode.stopping import Controls, count_tokens
from qwen4jax.decode.text import Tokenizer
from qwen4jax.state import init_state
from tests.decode.sample_tokenizers import byte_level, qwen_style
from tests.tiny import T0, random_params

VOCAB, EOS, LONGEST, SLOTS, CHUNK = 408, 402, 1024, 4, 64
MODEL = T0.replace(
    vocab_size=VOCAB,
    num_hidden_layers=2,
    layer_types=(LINEAR, SPARSE),
    ple_layer_ids=(1,),
    max_position_embeddings=LONGEST,
)
# what the model likes to say: so few ids that drafts are often right; the bytes of two letters
SAID = tuple(byte_level().token_to_id(token) for token in ("a", "b", "Ã", "©", "Ċ"))

GREEDY = Sampling(temperature=0, max_new_tokens=10)
DRAWN = Sampling(
    temperature=0.9,
    top_k=60,
    top_p=0.98,
    min_p=0.001,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={SAID[0]: 0.5},
    min_new_tokens=2,
    max_new_tokens=9,
)
ROWS = 48


@functools.cache
def params() -> Any:
    """Random weights whose output prefers `SAID`."""
    made = random_params(MODEL)
    liked = np.isin(np.arange(VOCAB), SAID)
    return made.replace(lm_head=made.lm_head * jnp.where(liked, 1.0, 0.05)[:, None])


def tokenizer() -> Tokenizer:
    """Byte-level, with a chat template; its `<|im_end|>` ends a sequence."""
    return qwen_style()


def ids(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng([length, seed])
    return rng.integers(0, VOCAB, length).tolist()


@functools.cache
def mode() -> Controls:
    """Controls with every field."""
    return make_controls([Row(DRAWN, 1, (0,))], 1, VOCAB)


def one_bucket(monkeypatch: Any) -> None:
    """Makes every call run the same programs."""
    for module in (call, generate):
        monkeypatch.setattr(module, "bucket", lambda length, longest: LONGEST)
        monkeypatch.setattr(module, "chunk_for", lambda tokens, most: CHUNK)
    monkeypatch.setattr(call, "slots_for", lambda requests, most: SLOTS)
    monkeypatch.setattr(call.Call, "_mode", lambda self: mode())


def unchecked(function: Callable) -> Callable:
    """The function as users have it: without the type checks that tests put in front of it."""
    return inspect.unwrap(function)


@dataclasses.dataclass(frozen=True)
class Plain:
    """What a request gives; stop strings are not looked for."""

    ids: list[int]
    logprobs: list[float]
    reason: str


def plain(
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    samples: Sequence[int] | None = None,
    eos_ids: Sequence[int] = (EOS,),
) -> list[Plain]:
    """Up to `ROWS` prompts in one batch, one token at a time, without drafts."""
    count, weights = len(prompts), params()
    numbers = [0] * count if samples is None else samples
    rows = [
        Row(s, len(p), p, sample=n) for p, s, n in zip(prompts, samplings, numbers, strict=True)
    ]
    controls = make_controls(rows, ROWS, VOCAB, eos_ids=eos_ids, max_length=LONGEST, like=mode())
    state = init_state(MODEL, slots=ROWS, max_length=LONGEST, drafts=0)
    padded = [*map(list, prompts), *[[0]] * (ROWS - count)]
    state, hidden = prefill(weights, state, padded, range(ROWS), chunk=CHUNK)
    logits, last = logits_of(weights, hidden), np.asarray([p[-1] for p in padded])
    found = [Plain([], [], "") for _ in prompts]
    while any(not one.reason for one in found):
        controls, chosen, logprobs = _choose(controls, logits, jnp.asarray(last), state.length)
        last = np.asarray(chosen)
        for i, one in enumerate(found):
            if not one.reason:
                one.ids.append(int(last[i]))
                one.logprobs.append(float(logprobs[i]))
                found[i] = dataclasses.replace(one, reason=_reason(rows[i], one.ids, eos_ids))
        active = jnp.asarray([i < count and not found[i].reason for i in range(ROWS)])
        state, logits = decode_token(weights, state, chosen, active)
    return found


@jax.jit
def _choose(controls: Controls, logits: Any, last: Any, length: Any) -> Any:
    chosen = sample(logits[:, None], last[:, None], length[:, None], controls).ids
    controls = count_tokens(controls, chosen, jnp.ones_like(length))
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=1)
    return controls, chosen[:, 0], logprobs[:, 0]


def _reason(row: Row, new: Sequence[int], eos_ids: Sequence[int]) -> str:
    options = row.sampling
    if new[-1] in options.stops(eos_ids) and len(new) > options.min_new_tokens:
        return "stop"
    ended = len(new) == options.max_new_tokens or row.prompt_length + len(new) == LONGEST
    return "length" if ended else ""


def until_string(new: Sequence[int], stops: Sequence[str]) -> tuple[list[int], str] | None:
    """The ids up to the first stop string, and the text before it; None where there is none."""
    for end in range(1, len(new) + 1):
        text = tokenizer().decode(new[:end])
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return list(new[:end]), text[: min(found)]
    return None


def text_of(one: Any) -> str:
    """The text of a completion that no stop string has ended."""
    return tokenizer().decode(one.ids[:-1] if one.reason == "stop" else one.ids)
