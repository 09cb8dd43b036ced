"""`stream`: bursts as they come, text across characters, and what closing frees."""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterable

import jax
import pytest

from qwen4jax.decode import call
from qwen4jax.decode.batching import Engine
from qwen4jax.decode.generate import generate, stream
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.running import Delta
from tests.decode.sample_tokenizers import byte_level
from tests.decode.small import DRAWN, GREEDY, ids, one_bucket, params, plain, tokenizer

LONG = dataclasses.replace(GREEDY, max_new_tokens=40, ignore_eos=True)
PROMPTS = [ids(n, 3) for n in (3, 70, 9, 40, 1, 130)]
OPTIONS = [
    LONG,
    dataclasses.replace(DRAWN, n=2),
    dataclasses.replace(LONG, stop=("é", "ab", "ba")),
    dataclasses.replace(LONG, max_new_tokens=1),
    dataclasses.replace(LONG, stop_ids=range(0, 408, 2)),
    dataclasses.replace(DRAWN, seed=8),
]


def joined(parts: Iterable[list]) -> list:
    return list(itertools.chain.from_iterable(parts))


@pytest.fixture(autouse=True)
def _one_bucket(monkeypatch):
    one_bucket(monkeypatch)


def test_deltas_joined_are_what_generate_returns():
    """Texts, ids, log-probabilities and ends; samples are numbered prompt by prompt."""
    options = [*OPTIONS[:4], dataclasses.replace(LONG, stop_ids=[200]), OPTIONS[5]]
    whole = generate(params(), PROMPTS, sampling=options, tokenizer=tokenizer(), logprobs=True)
    flat = [one for entry in whole for one in (entry if isinstance(entry, list) else [entry])]
    deltas = list(stream(params(), PROMPTS, sampling=options, tokenizer=tokenizer(), logprobs=True))
    assert {delta.request for delta in deltas} == set(range(7))
    for number, one in enumerate(flat):
        own = [delta for delta in deltas if delta.request == number]
        assert joined(delta.token_ids for delta in own) == one.token_ids
        assert joined(delta.logprobs or [] for delta in own) == one.logprobs
        assert "".join(delta.text for delta in own) == one.text
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == one.finish_reason
        # a burst is the first token, or a round's: never token by token
        assert len(own) == one.timings.rounds + 1
    # requests take turns: no one waits for another that came first to end
    order = [delta.request for delta in deltas]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)


def test_a_character_is_whole_in_every_delta():
    """The tokens of an emoji by force, one after the other; then bytes that are no character."""
    smile = [byte_level().token_to_id(token) for token in "ðŁĺĢ"]
    assert None not in smile
    options = [
        Sampling(temperature=0, max_new_tokens=1, logit_bias={token: 1e4}) for token in smile
    ]
    kept, texts, state = [], [], None
    for one in options:
        found = generate(
            params(), [5, 6] if state is None else [], sampling=one, state=state,
            tokenizer=tokenizer(), logprobs=True, keep_state=True,
        )  # fmt: skip
        state, texts = found.state, [*texts, found.text]
        kept += found.token_ids
    # alone, each is no character, and says so
    assert kept == smile
    assert texts == ["\ufffd"] * 4
    assert tokenizer().decode(kept) == "😀"
    # in one stream they are: the bias orders them, the penalty sends each to the end of the queue
    bias = {token: 4000.0 - 10 * place for place, token in enumerate(smile)}
    given = dataclasses.replace(LONG, logit_bias=bias, frequency_penalty=40)
    deltas = list(stream(params(), [5], sampling=given, tokenizer=tokenizer(), logprobs=True))
    assert joined(delta.token_ids for delta in deltas) == smile * 10
    assert "".join(delta.text for delta in deltas) == "😀" * 10
    assert {delta.text for delta in deltas} <= {"", "😀"}
    # cut in the middle of one, the last delta says so
    short = dataclasses.replace(given, max_new_tokens=6)
    deltas = list(stream(params(), [5], sampling=short, tokenizer=tokenizer(), logprobs=True))
    assert "".join(delta.text for delta in deltas) == "😀\ufffd"
    assert deltas[-1].text == "\ufffd"


def test_closing_frees_the_engine(monkeypatch):
    """At once, with what it has on the device; the next call works."""
    engines = []

    class Watched(Engine):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            engines.append((weakref.ref(self), weakref.ref(self.state.residual)))

    monkeypatch.setattr(call, "Engine", Watched)
    stream(params(), PROMPTS, sampling=LONG, logprobs=True).close()
    gc.collect()
    before = len(jax.live_arrays())
    deltas = stream(params(), PROMPTS, sampling=LONG, logprobs=True)
    assert isinstance(next(deltas), Delta)
    assert engines[-1][0]() is not None
    deltas.close()
    assert [ref() for pair in engines for ref in pair] == [None] * 4
    assert next(deltas, None) is None
    # left behind without closing, they go too
    deltas = stream(params(), PROMPTS, sampling=LONG, logprobs=True)
    next(deltas)
    del deltas
    assert engines[-1][0]() is None
    gc.collect()
    assert len(jax.live_arrays()) <= before
    got = generate(params(), PROMPTS[0], sampling=LONG, logprobs=True)
    assert got.token_ids == plain(PROMPTS[:1], [LONG])[0].ids


def test_two_streams_run_side_by_side():
    first = stream(params(), PROMPTS[0], sampling=LONG, logprobs=True)
    second = stream(params(), PROMPTS[1], sampling=LONG, logprobs=True)
    pairs = list(itertools.zip_longest(first, second))
    want = plain(PROMPTS[:2], [LONG] * 2)
    for number, one in enumerate(want):
        assert joined(pair[number].token_ids for pair in pairs if pair[number]) == one.ids


def test_wrong_arguments_raise_before_the_first_delta():
    with pytest.raises(ValueError, match=r"^prompts\[1\]\[0\]: id 408 is not in"):
        stream(params(), [[5], [408]])
    with pytest.raises(ValueError, match=r"^draft: 8 is not in 0..7"):
        stream(params(), [5], draft=8)
