"""Rows whose continuation is known beforehand: drafts are planted, and live state is compared.

All tests of the round share the sizes and the sampling mode here, since compiling dominates.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from qwen4jax.ablation import Ablation, IndexShare
from qwen4jax.decode.burst import Burst
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.prefill import decode_token, logits_of, prefill, prefill_chunk
from qwen4jax.decode.round import begin_slots, run_round
from qwen4jax.decode.stopping import Controls, FinishReason
from qwen4jax.params import Params
from qwen4jax.state import AttentionCache, DecodeState, init_state
from qwen4jax.weights.load import load

GOLDEN = Path(__file__).parent.parent / "golden" / "t0"
SLOTS, PAGE, CAPACITY, CHUNK, VOCAB, RATIO = 24, 8, 96, 16, 64, 4
GREEDY = Sampling(temperature=0, max_new_tokens=40)
DRAWN = Sampling(
    temperature=1.3,
    top_k=40,
    top_p=0.97,
    min_p=0.002,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={2: 0.5},
    min_new_tokens=1,
    max_new_tokens=40,
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    prompt: tuple[int, ...]
    sampling: Sampling = GREEDY


@functools.cache
def golden() -> dict[str, np.ndarray]:
    """Inputs and outputs of the reference implementation."""
    return load_file(GOLDEN / "io.safetensors")


def golden_prompts() -> list[tuple[int, ...]]:
    io = golden()
    count = sum(name.endswith(".ids") and name != "batch.ids" for name in io)
    return [tuple(io[f"p{i}.ids"].tolist()) for i in range(count)]


@functools.cache
def _loaded() -> Params:
    return load(GOLDEN / "checkpoint", dtype="float32", progress=False)


@functools.cache
def t0(share: IndexShare = "fresh") -> Any:
    """The golden T0, its later draft steps selecting as `share` says."""
    params = _loaded()
    return params.replace(config=params.config.replace(ablation=Ablation(share)))


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng([length, seed])
    return tuple(int(i) for i in rng.integers(0, VOCAB, length))


def drawn(seed: int, **changes: Any) -> Sampling:
    """`DRAWN` with a seed of its own."""
    return dataclasses.replace(DRAWN, seed=seed, **changes)


@functools.cache
def mode() -> Controls:
    """Controls with every field, so that rows of all kinds run in one program."""
    return make_controls([Row(DRAWN, 1, (0,))], SLOTS, VOCAB)


def controls_of(
    requests: Sequence[Request],
    done: Sequence[Sequence[int]] | None = None,
    *,
    eos_ids: Sequence[int] = (),
    max_length: int = CAPACITY,
) -> Controls:
    """Request `i` in slot `i`, after the output `done[i]`."""
    rows = [
        Row(r.sampling, len(r.prompt), r.prompt, () if done is None else done[i])
        for i, r in enumerate(requests)
    ]
    return make_controls(rows, SLOTS, VOCAB, eos_ids=eos_ids, max_length=max_length, like=mode())


def new_state(params: Params, drafts: int) -> DecodeState:
    return init_state(
        params.config, slots=SLOTS, max_length=CAPACITY, page_size=PAGE, drafts=drafts
    )


def fed(
    params: Params, drafts: int, rows: Sequence[Sequence[int]]
) -> tuple[DecodeState, jax.Array]:
    """A state with `rows[i]` live in slot `i`, and the output head's inputs of all slots.

    The slots after them hold one token, so that there is one shape.
    """
    padded = [*rows, *[[0]] * (SLOTS - len(rows))]
    state = new_state(params, drafts)
    return prefill(t0(), state, padded, range(SLOTS), chunk=CHUNK)


@dataclasses.dataclass(frozen=True)
class HostBurst:
    """A `Burst` in NumPy."""

    tokens: np.ndarray
    count: np.ndarray
    accepted: np.ndarray
    finished: np.ndarray
    reason: np.ndarray


class Play:
    """Requests in the first slots of a state that decode together.

    Attributes:
        state, controls, active: as the round takes and gives them.
        ids: output of each request so far.
        reasons: why each request ended; NONE while it runs.
        bursts: of the rounds, in NumPy.
    """

    def __init__(
        self,
        params: Params,
        drafts: int,
        requests: Sequence[Request],
        *,
        done: Sequence[Sequence[int]] | None = None,
        **limits: Any,
    ):
        """Feeds prompts and `done`, the output so far, and samples the next token."""
        self.params, self.drafts, self.requests = params, drafts, list(requests)
        done = [()] * len(requests) if done is None else done
        rows = [[*r.prompt, *d] for r, d in zip(requests, done, strict=True)]
        self.state: Any
        self.state, hidden = fed(params, drafts, rows)
        self.ids: list[list[int]] = [list(d) for d in done]
        self.reasons = [FinishReason.NONE] * len(requests)
        self.bursts: list[HostBurst] = []
        self.active = jnp.zeros(SLOTS, bool)
        self.begin(hidden, controls_of(requests, done, **limits), range(len(requests)))

    def feed(self, rows: Mapping[int, Sequence[int]]) -> jax.Array:
        """Feeds known tokens to some slots, the others staying as they are."""
        tokens, count = np.zeros((SLOTS, CHUNK), np.int32), np.zeros(SLOTS, np.int32)
        for slot, ids in rows.items():
            tokens[slot, : len(ids)], count[slot] = ids, len(ids)
        self.state, hidden = prefill_chunk(
            t0(), self.state, jnp.arange(SLOTS), jnp.asarray(tokens), jnp.asarray(count)
        )
        return hidden

    def begin(self, hidden: jax.Array, controls: Controls, slots: Iterable[int]) -> HostBurst:
        """Samples the next token of some slots after what they were fed."""
        chosen = np.isin(np.arange(SLOTS), list(slots))
        self.state, self.controls, burst = begin_slots(
            self.params, self.state, controls, hidden, jnp.where(chosen, jnp.arange(SLOTS), SLOTS)
        )
        self.active = jnp.where(chosen, ~burst.finished, self.active)
        return self._take(burst)

    def plant(self, drafts: Sequence[Sequence[int]]) -> None:
        """Replaces the drafts of the first slots."""
        planted = np.array(self.state.drafts)
        planted[: len(drafts)] = drafts
        self.state = self.state.replace(drafts=jnp.asarray(planted))

    def plant_known(self, known: Sequence[Sequence[int]], wrong: Sequence[int]) -> None:
        """Drafts what follows in `known`, with an error at index `wrong[i]` of row `i`."""
        rows = zip(known, self.ids, wrong, strict=True)
        self.plant([drafts_with_error(k, len(ids), self.drafts, at) for k, ids, at in rows])

    def round(self) -> HostBurst:
        """One round of the rows that run."""
        self.state, self.controls, self.active, burst = run_round(
            self.params, self.state, self.controls, self.active
        )
        self.bursts.append(self._take(burst))
        return self.bursts[-1]

    def finish(self, plant: Any = None) -> list[list[int]]:
        """Rounds until no row runs, `plant(self)` before each; the output of each request."""
        while np.asarray(self.active).any():
            if plant is not None and self.drafts:
                plant(self)
            self.round()
        return self.ids

    def _take(self, burst: Burst) -> HostBurst:
        names = [field.name for field in dataclasses.fields(HostBurst)]
        host = HostBurst(**{name: np.asarray(getattr(burst, name)) for name in names})
        for i, ids in enumerate(self.ids):
            ids += host.tokens[i, : host.count[i]].tolist()
            if host.finished[i]:
                self.reasons[i] = FinishReason(int(host.reason[i]))
        return host


def decoded(
    prompts: Sequence[Sequence[int]], steps: int, choose: Callable[[np.ndarray, list[int]], int]
) -> list[list[int]]:
    """`steps` tokens after each prompt, fed one at a time; `choose(logits, output so far)`."""
    state, hidden = fed(t0(), 3, prompts)
    logits = np.asarray(logits_of(t0(), hidden))
    ids: list[list[int]] = [[] for _ in prompts]
    active = jnp.arange(SLOTS) < len(prompts)
    for _ in range(steps):
        for row, so_far in zip(logits, ids, strict=False):
            so_far.append(choose(row, so_far))
        tokens = np.zeros(SLOTS, np.int32)
        tokens[: len(ids)] = [so_far[-1] for so_far in ids]
        state, logits = decode_token(t0(), state, jnp.asarray(tokens), active)
        logits = np.asarray(logits)
    return ids


def most_probable(logits: np.ndarray, _: Sequence[int]) -> int:
    return int(logits.argmax())


@functools.cache
def plain(requests: tuple[Request, ...]) -> list[list[int]]:
    """What the requests give without drafts."""
    return Play(t0(), 0, requests).finish()


def drafts_with_error(known: Sequence[int], emitted: int, drafts: int, wrong: int) -> list[int]:
    """The `drafts` tokens after the first `emitted` of `known`, the one at index `wrong` not so."""
    following = list(known[emitted : emitted + drafts])
    following += [0] * (drafts - len(following))
    if wrong < drafts:
        following[wrong] = (following[wrong] + 1 + wrong) % VOCAB
    return following


def live(state: DecodeState, slot: int) -> dict[str, np.ndarray]:
    """All that a slot's future depends on, in the order of its tokens.

    A ring holds what the last block of tokens may still need; draft-head rows are live up to the
    one of the pending token, or the one before where none is pending.
    """
    get: Any = jax.tree.map(np.asarray, state)
    length = int(get.length[slot])
    pages = get.page_table[slot]
    rows = length if get.token[slot] >= 0 else length - 1
    names = ("length", "token", "rope_delta", "ngram_ids", "residual")
    found: dict[str, Any] = {name: getattr(get, name)[slot] for name in names}

    def last(ring: Any, end: int) -> np.ndarray:
        kept = np.arange((end - 1) // RATIO * RATIO, end)
        return ring[slot, kept % ring.shape[1]]

    def attention(name: str, cache: AttentionCache, end: int) -> None:
        token, per_page = np.arange(end), PAGE // RATIO
        block = np.arange(end // RATIO)
        for field in ("key", "value"):
            found[f"{name}.{field}"] = getattr(cache, field)[pages[token // PAGE], token % PAGE]
        found[f"{name}.index_key"] = cache.index_key[pages[block // per_page], block % per_page]
        found[f"{name}.ring"] = last(cache.ring, end)

    found["rope_ring"] = last(get.rope_ring, length)
    for i, cache in enumerate(get.layers):
        if isinstance(cache, AttentionCache):
            attention(f"layer{i}", cache, length)
        else:
            found[f"layer{i}.conv"] = cache.conv[slot]
            found[f"layer{i}.recurrent"] = cache.recurrent[slot]
    for i, history in enumerate(get.ple):
        found[f"ple{i}"] = history[slot]
    attention("mtp", get.mtp, rows)
    return found


def assert_same_live(
    got: DecodeState,
    want: DecodeState,
    slots: Sequence[int] = range(SLOTS),
    want_slots: Sequence[int] | None = None,
    *,
    drafts: bool = True,
) -> None:
    """Live state of `slots` is equal: integers exactly, floats to 1e-5 of the largest value.

    Args:
        got: a state.
        want: the state it is held against.
        slots: of `got`.
        want_slots: of `want`; by default the same.
        drafts: the proposed drafts, a function of the live state, are equal too.
    """
    got, want = jax.tree.map(np.asarray, (got, want))
    for slot, other in zip(slots, want_slots or slots, strict=True):
        ours, theirs = live(got, slot), live(want, other)
        if drafts:
            ours["drafts"] = np.asarray(got.drafts[slot])
            theirs["drafts"] = np.asarray(want.drafts[other])
        for name, value in theirs.items():
            what = f"slot {slot}: {name}"
            if np.issubdtype(value.dtype, np.integer):
                np.testing.assert_array_equal(ours[name], value, err_msg=what)
            else:
                scale = max(1.0, float(np.abs(value).max(initial=0)))
                np.testing.assert_allclose(
                    ours[name], value, rtol=0, atol=1e-5 * scale, err_msg=what
                )
