"""`generate` against plain decoding of each prompt: ids, texts, ends, log-probabilities."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.generate import generate
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.requests import Completion
from qwen4jax.forward_pass import forward
from tests.decode.small import (
    DRAWN,
    EOS,
    GREEDY,
    LONGEST,
    MODEL,
    SAID,
    ids,
    one_bucket,
    params,
    plain,
    text_of,
    tokenizer,
    until_string,
)

# at and around the edges of blocks of 4, of chunks of 64 and of pages
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257, 384, 512, 699, 700)
TEXTS = (
    "Hello",
    "你好世界",
    "👩‍👩‍👧‍👦",
    "def f(x):\n    return x",
    " ",
    "naïve café",
    "a",
    "ab " * 40,
)
CHATS = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}],
    [{"role": "user", "content": [{"type": "text", "text": "x" * 90}]}],
)
NEVER_ENDS = dataclasses.replace(GREEDY, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_bucket(monkeypatch):
    one_bucket(monkeypatch)


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt as a caller gives it, what it is in ids, and its options without stops."""

    prompt: Any
    ids: list[int]
    sampling: Sampling


def cases() -> list[Case]:
    """40 prompts of every kind, in an order in which neighbours differ."""
    kinds: list[Any] = [list, tuple, np.asarray, jnp.asarray]
    prompts = [(kinds[i % 4](ids(n)), ids(n)) for i, n in enumerate(LENGTHS)]
    prompts += [(text, tokenizer().encode(text)) for text in TEXTS]
    prompts += [(chat, tokenizer().chat_ids(chat)) for chat in CHATS]
    prompts += [(ids(n, 1), ids(n, 1)) for n in range(20, 36, 2)]
    order = np.random.default_rng(0).permutation(len(prompts))
    found = []
    for number, index in enumerate(order):
        options = dataclasses.replace(NEVER_ENDS, max_new_tokens=4 + number % 7)
        if number % 3 == 2:
            options = dataclasses.replace(DRAWN, seed=number, max_new_tokens=4 + number % 6)
        found.append(Case(*prompts[index], options))
    return found


@functools.cache
def known() -> list[Any]:
    """What plain decoding gives for the cases."""
    return plain([c.ids for c in cases()], [c.sampling for c in cases()])


def check(got: Completion, prompt: list[int], want_ids: list[int], reason: str):
    assert got.token_ids == want_ids
    assert got.finish_reason == reason
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(prompt), len(want_ids))
    assert got.usage.cached_tokens == 0


def test_forty_mixed_prompts_in_four_slots():
    """Each as alone; ends by length, by a stop id and by a stop string, in the caller's order."""
    prompts, samplings, wanted = [], [], []
    for number, (case, one) in enumerate(zip(cases(), known(), strict=True)):
        options, ended = case.sampling, (one.ids, text_of(one), one.reason)
        # sampled ids are as good a stop as any, wherever they came first
        target = one.ids[number % len(one.ids)]
        if number % 4 == 1 and options.min_new_tokens == 0:
            options = dataclasses.replace(options, stop_ids=[target, 3])
            new = one.ids[: one.ids.index(target) + 1]
            ended = (new, tokenizer().decode(new[:-1]), "stop")
        elif number % 4 == 3:
            pairs = [tokenizer().decode(one.ids[i : i + 2]) for i in range(3)]
            stops = ("é", *(pair for pair in pairs if "\ufffd" not in pair))
            options = dataclasses.replace(options, stop=stops)
            if found := until_string(one.ids, stops):
                ended = (*found, "stop")
        prompts.append(case.prompt)
        samplings.append(options)
        wanted.append(ended)
    assert (
        sum(
            options.stop != () and w[2] == "stop"
            for options, w in zip(samplings, wanted, strict=True)
        )
        > 2
    )
    found = generate(params(), prompts, sampling=samplings, tokenizer=tokenizer(), logprobs=True)
    assert len(found) == len(prompts) == 40
    for case, one, got, (new, text, reason) in zip(cases(), known(), found, wanted, strict=True):
        check(got, case.ids, new, reason)
        assert got.text == text
        np.testing.assert_allclose(got.logprobs, one.logprobs[: len(new)], atol=2e-4)
        assert got.timings.rounds >= (len(new) - 1) / 4
        assert got.timings.prefill_s >= 0 <= got.timings.decode_s
    # drafts were accepted, or the test would show nothing of bursts
    rounds = sum(got.timings.rounds for got in found)
    assert rounds < 0.98 * sum(len(got.token_ids) - 1 for got in found)


def test_log_probabilities_are_those_of_the_forward_pass():
    case, one = cases()[3], known()[3]
    got = generate(
        params(), case.prompt, sampling=case.sampling, tokenizer=tokenizer(), logprobs=True
    )
    sequence = [*case.ids, *got.token_ids]
    logits = jax.nn.log_softmax(forward(params(), [sequence])[0])
    places = np.arange(len(case.ids) - 1, len(sequence) - 1)
    np.testing.assert_allclose(got.logprobs, logits[places, got.token_ids], atol=2e-4)
    assert got.token_ids == one.ids


def test_samples_differ_and_are_repeatable():
    prompt = ids(5)
    many = Sampling(temperature=1.5, n=4, seed=3, max_new_tokens=8)

    def run(*options: Sampling) -> list[list[list[int]]]:
        given = list(options) if len(options) > 1 else options[0]
        found = generate(params(), [prompt] * len(options), sampling=given, logprobs=True)
        return [
            [c.token_ids for c in one] if isinstance(one, list) else [one.token_ids]
            for one in found
        ]

    (first,) = run(many)
    assert len({tuple(new) for new in first}) == 4
    alone = dataclasses.replace(many, n=1)
    other = dataclasses.replace(many, seed=4)
    # beside other prompts, in other slots; sample 0 is what n=1 gives; None is seed 0
    again, one, others, zero, none = run(
        many, alone, other, *(dataclasses.replace(alone, seed=s) for s in (0, None))
    )
    assert again == first
    assert one == first[:1]
    assert not {tuple(new) for new in others} & {tuple(new) for new in first}
    assert zero == none != one
    want = plain([prompt] * 4, [many] * 4, samples=range(4))
    assert [w.ids for w in want] == first


def test_one_prompt_of_several_samples_is_a_list():
    found = generate(params(), ids(3), sampling=dataclasses.replace(DRAWN, n=2), logprobs=True)
    assert [type(one) for one in found] == [Completion, Completion]


@pytest.mark.parametrize("prompts", [[ids(4)], (ids(4),), np.asarray([ids(4)]), [tuple(ids(4))]])
def test_a_list_of_one_gives_a_list(prompts: Any):
    (one,) = generate(params(), prompts, sampling=[NEVER_ENDS], logprobs=True)
    alone = generate(params(), ids(4), sampling=NEVER_ENDS, logprobs=True)
    assert one.token_ids == alone.token_ids
    assert alone.text is None


@pytest.mark.parametrize("most", [1, 2, 4])
def test_few_new_tokens(most: int):
    case, one = cases()[0], known()[0]
    options = dataclasses.replace(case.sampling, max_new_tokens=most)
    got = generate(params(), case.ids, sampling=options, logprobs=True)
    check(got, case.ids, one.ids[:most], "length")
    assert (got.tokens_per_round is None) == (most == 1)
    assert len(got.logprobs or []) == len(got.token_ids)


def test_the_first_token_may_be_the_last():
    """By a stop id, by the end of a document, by a stop string."""
    case, one = cases()[1], known()[1]
    first = one.ids[0]
    by_id = dataclasses.replace(case.sampling, stop_ids=[first])
    by_eos = dataclasses.replace(GREEDY, logit_bias={EOS: 1e4})
    by_text = dataclasses.replace(GREEDY, logit_bias={SAID[0]: 1e4}, stop="a")
    ignored = dataclasses.replace(by_eos, ignore_eos=True, max_new_tokens=3)
    late = dataclasses.replace(by_eos, min_new_tokens=3)
    options = [by_id, by_eos, by_text, ignored, late]
    found = generate(
        params(), [case.ids] * 5, sampling=options, tokenizer=tokenizer(), logprobs=True
    )
    assert [one.finish_reason for one in found] == ["stop", "stop", "stop", "length", "stop"]
    assert [one.token_ids for one in found[:4]] == [[first], [EOS], [SAID[0]], [EOS] * 3]
    assert [one.text for one in found[:3]] == ["", "", ""]
    assert found[3].text == "<|im_end|>" * 3
    assert found[4].token_ids.index(EOS) == 3 == len(found[4].token_ids) - 1


@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_a_sequence_ends_with_the_positions(room: int):
    prompt = ids(LONGEST - room)
    got = generate(params(), prompt, sampling=NEVER_ENDS, logprobs=True)
    (want,) = plain([prompt], [NEVER_ENDS])
    check(got, prompt, want.ids, "length")
    assert len(got.token_ids) == room


def test_logits_that_are_not_finite_end_one_request():
    """A NaN in one row of the embedding: the prompt that reads it ends, the next goes on."""
    broken = params().replace(embed_tokens=params().embed_tokens.at[7].set(jnp.nan))
    prompt = [i for i in ids(30) if i != 7]
    found = generate(broken, [[7], prompt], sampling=NEVER_ENDS, logprobs=True, keep_state=True)
    assert (found[0].token_ids, found[0].finish_reason, found[0].state) == ([], "error", None)
    assert found[1].finish_reason == "length"
    assert len(found[1].token_ids) == NEVER_ENDS.max_new_tokens


def test_internals_have_a_row_for_every_position():
    case = cases()[5]
    names = ["layer01.indexer.selected", "layer*.residual", "layer00.router.*", "*.attn.inject"]
    found = generate(
        params(), [case.ids, [5, 6]], sampling=NEVER_ENDS, logprobs=True, capture=names
    )
    for one, prompt in zip(found, (case.ids, [5, 6]), strict=True):
        shapes = {name: value.shape for name, value in one.captured.items()}
        places = (1, len(prompt) + len(one.token_ids))
        assert shapes["layer01.indexer.selected"][:2] == places
        assert shapes["layer00.residual"] == (*places, MODEL.hc_count, MODEL.hidden_size)
        assert shapes["layer00.router.ids"] == (*places, MODEL.num_experts_per_tok)
        assert all(shape[:2] == places for shape in shapes.values())
        assert {name.split(".", 1)[1] for name in shapes if name.startswith("layer01")} == {
            "indexer.selected",
            "residual",
            "attn.inject",
        }
    short = forward(params(), [[5, 6, *found[1].token_ids]], capture=["layer01.residual"])[1]
    np.testing.assert_allclose(
        found[1].captured["layer01.residual"], short["layer01.residual"], atol=1e-4
    )


def test_progress_is_quiet_unless_asked_for(capfd):
    options = dataclasses.replace(NEVER_ENDS, max_new_tokens=2)
    generate(params(), [5, 6], sampling=options, logprobs=True)
    assert capfd.readouterr() == ("", "")
    generate(params(), [5, 6], sampling=options, logprobs=True, progress=True)
    assert "generating" in capfd.readouterr().err
