"""Answers are those of `generate`; alone or in company, whatever else shares the batch."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen4jax.decode.generate import generate
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.score import score
from qwen4jax.decode.text import Tokenizer
from qwen4jax.serve.client import Answer, AsyncClient, Client
from qwen4jax.weights.load import load
from tests.serve.running import RunningServer, in_background

Ids = Callable[..., list[int]]
# of every kind: each alone would compile to another program in a notebook
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 1},
    "truncated": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2},
    "min_p": {"min_p": 0.05, "seed": 3},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 4},
    "greedy and penalised": {"temperature": 0.0, "frequency_penalty": 0.4},
    "biased": {"logit_bias": {7: 4.0, 9: -float("inf")}, "seed": 5},
    "late stop": {"min_new_tokens": 8, "stop_token_ids": list(range(0, 300, 11)), "seed": 2**63},
}
LENGTHS = (1, 16, 17, 64, 65, 70, 130, 300)
SCORED = (1, 2, 64, 65, 300)


STOPS = ["a", "e", " "]
SAMPLES: dict[str, Any] = {"n": 6, "seed": 3}
TEXT = "naïve café"
NEW = 16


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Tokenizer]:
    """The served model in this process."""
    return load(model, dtype="float32"), Tokenizer.load(model)


def prompts(ids: Ids) -> list[list[int]]:
    return [ids(length, seed=5) for length in LENGTHS]


def test_answers_are_those_of_generate(client: Client, loaded: Any, ids: Ids):
    """Ids, texts, log-probabilities, ends and counts; one call of `generate` has all kinds."""
    params, tokenizer = loaded
    stopping: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "stop": STOPS}
    kinds = [*KINDS.values(), stopping, SAMPLES]
    names = {"stop_token_ids": "stop_ids"}
    options = [
        Sampling(**{names.get(n, n): v for n, v in kind.items()}, max_new_tokens=NEW)
        for kind in kinds
    ]
    given = [*prompts(ids), ids(10), ids(20)]
    want = generate(
        params, given, sampling=options, tokenizer=tokenizer, logprobs=True, slots=4, chunk=64
    )
    for prompt, kind, one in zip(given[:-1], kinds, want, strict=False):
        got = client.generate(prompt, max_new_tokens=NEW, logprobs=True, **kind)
        assert (got.token_ids, got.text) == (one.token_ids, one.text)
        np.testing.assert_allclose(got.logprobs, one.logprobs, atol=1e-4)
        assert got.finish.reason == one.finish_reason
        assert got.finish.prompt_tokens == len(prompt)
        assert got.finish.completion_tokens == len(got.token_ids)
        assert got.finish.rounds == one.timings.rounds
    # more samples than slots
    samples = client.samples(given[-1], max_new_tokens=NEW, **SAMPLES)
    assert [one.token_ids for one in samples] == [one.token_ids for one in want[-1]]
    assert len({tuple(one.token_ids) for one in samples}) > 1


def alone_and_together(client: Client, ids: Ids) -> tuple[list[Answer], list[Any]]:
    def asked(prompt: list[int], kind: dict[str, Any]) -> Answer:
        return client.generate(
            prompt, max_new_tokens=NEW, ignore_eos=True, logprobs=True, top_logprobs=3, **kind
        )

    pairs = list(zip(prompts(ids), KINDS.values(), strict=True))
    alone = [asked(*pair) for pair in pairs]
    with in_background(*(lambda pair=pair: asked(*pair) for pair in reversed(pairs))) as together:
        pass
    return alone, list(reversed(together))


def test_company_changes_nothing(client: Client, server: RunningServer, ids: Ids):
    """Eight kinds alone, then at once on four slots: the same bits, and nothing is compiled."""
    before = server.status().compiled_programs
    alone, together = alone_and_together(client, ids)
    # what differs: times, and seeds that were not used
    drop = dict(queue_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0, seed=0)
    for one, other in zip(alone, together, strict=True):
        assert isinstance(other, Answer), other
        strip = lambda a: dataclasses.replace(a, finish=dataclasses.replace(a.finish, **drop))  # noqa: E731
        assert strip(one) == strip(other)
        assert 8 < len(one.token_ids) == len(one.logprobs) == len(one.top_logprobs) <= NEW
    client.score(ids(100), named_token_ids=[3], top_logprobs=2)
    client.samples(ids(20), n=3, seed=9, max_new_tokens=5)
    assert server.status().compiled_programs == before


def test_top_logprobs_are_those_of_the_model(client: Client, ids: Ids):
    got = client.generate(ids(9), temperature=0.0, max_new_tokens=12, logprobs=True, top_logprobs=5)
    for token, value, best in zip(got.token_ids, got.logprobs, got.top_logprobs, strict=True):
        assert len(best) == 5
        # greedy: the most probable one was taken
        assert best[0] == (token, value)
        assert [pair[1] for pair in best] == sorted((pair[1] for pair in best), reverse=True)


def test_seeds(client: Client, ids: Ids):
    """The same seed, the same tokens; without one the server says which it drew."""
    first = client.generate(ids(12), max_new_tokens=12, ignore_eos=True)
    other = client.generate(ids(12), max_new_tokens=12, ignore_eos=True)
    assert first.finish.seed != other.finish.seed
    again = client.generate(ids(12), max_new_tokens=12, ignore_eos=True, seed=first.finish.seed)
    assert again.token_ids == first.token_ids


def test_text_chat_and_ids_are_one_prompt(client: Client, loaded: Any):
    tokenizer, options = loaded[1], {"temperature": 0.0, "max_new_tokens": 8}
    text = "The naïve café — 你好 😀"
    by_text = client.generate(text, **options)
    assert by_text.token_ids == client.generate(tokenizer.encode(text), **options).token_ids
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    by_chat = client.generate(messages, **options)
    assert by_chat.token_ids == client.generate(tokenizer.chat_ids(messages), **options).token_ids
    assert by_chat.finish.prompt_tokens == len(tokenizer.chat_ids(messages))


def test_a_stop_string_ends_the_text(client: Client, ids: Ids):
    """Wherever the bursts end: chunks joined never show it, nor what may begin it."""
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    whole = client.generate(ids(10), **options).text
    for place in range(5, 25, 5):
        stop = whole[place : place + 3]
        got = client.generate(ids(10), stop=[stop, "\x00\x01"], **options)
        assert (got.text, got.finish.reason) == (whole[: whole.index(stop)], "stop")


def test_scores_are_those_of_score(client: Client, loaded: Any, ids: Ids):
    params, tokenizer = loaded
    texts = [*map(ids, SCORED), TEXT]
    wanted: Any = score(params, texts, tokenizer=tokenizer, token_ids=[3, 5], top=2)
    for text, want in zip(texts, wanted, strict=True):
        got = client.score(text, named_token_ids=[3, 5], top_logprobs=2)
        assert got.token_ids == want.token_ids.tolist()
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
        np.testing.assert_allclose(got.named, want.named, atol=1e-4)
        assert [[token for token, _ in row] for row in got.top_logprobs] == want.top_ids.tolist()
        assert got.total == pytest.approx(want.total, abs=1e-3)
        assert got.bits_per_byte == pytest.approx(want.bits_per_byte, abs=1e-4)
    plain = client.score(TEXT)
    assert plain.bits_per_byte is not None
    assert plain.named == plain.top_logprobs == []


def test_the_client_for_event_loops(server: RunningServer, client: Client, ids: Ids):
    """The same answers, many at once, and a score between them."""
    options: Any = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    want = [client.generate(ids(n), **options).token_ids for n in (3, 30, 90)]

    async def ask() -> tuple[Any, ...]:
        async with AsyncClient(server.target) as one:
            calls = [one.generate(ids(n), **options) for n in (3, 30, 90)]
            scored, model = one.score(ids(80)), one.model()
            return await asyncio.gather(*calls, scored, model, one.status())

    *answers, scored, model, status = asyncio.run(ask())
    assert [one.token_ids for one in answers] == want
    assert scored == client.score(ids(80))
    assert model == client.model()
    assert status.slots == 4
