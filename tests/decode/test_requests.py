"""What a call asks for, on the host alone: kinds of prompts, options, errors with their index."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.options import Sampling
from qwen4jax.decode.requests import (
    Completion,
    Timings,
    Usage,
    is_many,
    make_requests,
    per_prompt,
    prompt_ids,
)
from tests.decode.sample_tokenizers import HELLO, qwen_style
from tests.decode.small import unchecked

VOCAB = 408


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6],
        (5, 6),
        range(5, 7),
        [np.int32(5), 6],
        np.asarray([5, 6], np.int64),
        np.asarray([5, 6], np.uint8),
        jnp.asarray([5, 6]),
    ],
)
def test_ids_of_every_kind(prompt: Any):
    assert not is_many(prompt)
    found = prompt_ids(prompt, "prompts", VOCAB, None)
    assert found == [5, 6]
    assert [type(token) for token in found] == [int, int]


def test_text_and_chats_become_ids():
    known = qwen_style()
    assert prompt_ids("Hello", "prompts", VOCAB, known) == known.encode("Hello")
    assert prompt_ids(HELLO, "prompts", VOCAB, known) == known.chat_ids(HELLO)


@pytest.mark.parametrize(
    ("prompts", "many"),
    [
        ("ab", False),
        ([1, 2], False),
        (HELLO, False),
        ([], False),
        (np.zeros(3, int), False),
        ([True, 1], False),
        (["ab"], True),
        ([[1], [2]], True),
        ([HELLO], True),
        (np.zeros((2, 3), int), True),
        (jnp.zeros((2, 3), int), True),
        ((np.zeros(3, int),), True),
        (["ab", [1], HELLO], True),
        ([1, "ab"], True),
    ],
)
def test_one_prompt_or_a_list(prompts: Any, many: bool):
    assert is_many(prompts) == many


@pytest.mark.parametrize("prompts", [None, 5, {"role": "user"}, {1, 2}, b"ab", iter([1])])
def test_what_is_no_prompt_is_refused(prompts: Any):
    with pytest.raises(TypeError, match=r"^prompts: a string, ids, chat messages or a list of"):
        is_many(prompts)


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ([], ValueError, "prompts[3]: is empty"),
        ("", ValueError, "prompts[3]: is empty"),
        ([5, -1], ValueError, "prompts[3][1]: id -1 is not in [0, 408)"),
        ([5, 408], ValueError, "prompts[3][1]: id 408 is not in [0, 408)"),
        ([2**70], ValueError, f"prompts[3][0]: id {2**70} is not in [0, 408)"),
        (np.asarray([1, 2**33]), ValueError, f"prompts[3][1]: id {2**33} is not in"),
        ([5, 6.0], TypeError, "prompts[3][1]: an id is expected, found 6.0"),
        ([5, True], TypeError, "prompts[3][1]: an id is expected, found True"),
        ([5, None], TypeError, "prompts[3][1]: an id is expected, found None"),
        ([5, [6]], TypeError, "prompts[3][1]: an id is expected, found [6]"),
        (np.asarray([1.5]), TypeError, "prompts[3][0]: an id is expected, found 1.5"),
        (np.asarray(5), TypeError, "prompts[3]: an array of 0 axes, ids have one"),
        (np.zeros((1, 2), int), TypeError, "prompts[3]: an array of 2 axes, ids have one"),
        (b"ab", TypeError, "prompts[3]: a string, ids or chat messages are expected, found bytes"),
        (None, TypeError, "prompts[3]: a string, ids or chat messages are expected, found None"),
        (7, TypeError, "prompts[3]: a string, ids or chat messages are expected, found int"),
        ("a\ud800", ValueError, "prompts[3]: text: a lone surrogate at character 1"),
        ([{"role": "user"}], ValueError, "prompts[3]: messages[0].content: is missing"),
        ([*HELLO, 5], TypeError, "prompts[3]: messages[1]"),
    ],
)
def test_a_bad_prompt_is_named(prompt: Any, kind: type[Exception], message: str):
    with pytest.raises(kind, match="^" + re.escape(message)):
        prompt_ids(prompt, "prompts[3]", VOCAB, qwen_style())


@pytest.mark.parametrize(("prompt", "what"), [("Hello", "text"), (HELLO, "chat messages")])
def test_text_needs_a_tokenizer(prompt: Any, what: str):
    with pytest.raises(ValueError, match=f"^prompts: is {what}, which needs a tokenizer; pass"):
        prompt_ids(prompt, "prompts", VOCAB, None)


def requests(prompts: Any, sampling: Any = Sampling(), **changes: Any) -> Any:  # noqa: B008
    arguments: Any = dict(
        vocab_size=VOCAB, longest=64, history=0, tokenizer=None, eos_ids=(1,), many=True
    )
    return unchecked(make_requests)(prompts, sampling, **(arguments | changes))


def test_samples_stand_prompt_by_prompt():
    options = [Sampling(n=2), Sampling(n=1, seed=4)]
    found = requests([[5], [6, 7]], options)
    assert [(r.prompt, r.sample, r.ids) for r in found] == [
        (0, 0, (5,)),
        (0, 1, (5,)),
        (1, 0, (6, 7)),
    ]
    assert found[2].sampling is options[1]


def test_a_pending_token_begins_every_prompt():
    found = requests([[], "", [6]], history=3, pending=9)
    assert [r.ids for r in found] == [(9,), (9,), (9, 6)]


@pytest.mark.parametrize(
    ("sampling", "kind", "message"),
    [
        (None, TypeError, "sampling: a Sampling or a list of them is expected, found NoneType"),
        ({"temperature": 1}, TypeError, "sampling: a Sampling or a list of them is expected"),
        ([Sampling(), 5], TypeError, "sampling[1]: int is no Sampling"),
        ([Sampling()], ValueError, "sampling: 1 for 2 prompts"),
        ([Sampling(), Sampling(stop="a")], ValueError, "sampling[1]: stop strings need a tok"),
        (Sampling(stop_ids=[408]), ValueError, "sampling: stop_ids[0]: 408 is outside the voc"),
        ([Sampling(), Sampling(logit_bias={500: 1})], ValueError, "sampling[1]: logit_bias[0]"),
        (
            Sampling(logit_bias={i: float("-inf") for i in range(VOCAB)}),
            ValueError,
            "sampling: logit_bias and min_new_tokens together ban every id",
        ),
    ],
)
def test_bad_options_are_named(sampling: Any, kind: type[Exception], message: str):
    with pytest.raises(kind, match="^" + re.escape(message)):
        requests([[5], [6]], sampling)


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "prompts: is empty"),
        ([[5], []], {}, "prompts[1]: is empty"),
        ([[5], [5] * 64], {}, "prompts[1]: 64 tokens leave no room below 64 positions"),
        ([[5] * 64], {"many": False}, "prompts: 64 tokens leave no room below 64 positions"),
        ([[5], [6] * 4], {"history": 60}, "prompts[1]: 64 tokens leave no room below 64"),
        ([[5]], {"history": 62, "pending": 3}, "prompts[0]: 64 tokens leave no room below 64"),
        ([[5]], {"history": 9, "sampling": Sampling(repetition_penalty=1.1)},
         "sampling: repetition_penalty needs the ids of the whole prompt"),
    ],
)  # fmt: skip
def test_bad_lengths_are_named(prompts: Any, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        requests(prompts, **changes)


def test_the_last_position_may_be_generated():
    assert len(requests([[5] * 63])[0].ids) == 63


def test_one_sampling_serves_all():
    one = Sampling(seed=3)
    assert per_prompt(one, 3) == [one] * 3
    assert per_prompt((one,), 1) == [one]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Completion)])
def test_completions_cannot_be_changed(field: str):
    one = Completion([1], None, "stop", None, Usage(1, 1), Timings(0, 0.0, 0.0, 0.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, field, None)


def test_completions_print_and_compare_without_their_arrays():
    parts: Any = ([1], None, "stop", None, Usage(1, 1), Timings(0, 0.0, 0.0, 0.0))
    one, other = Completion(*parts, {"x": np.zeros(9)}, np.ones(9)), Completion(*parts)
    assert one == other
    assert "array" not in repr(one)


@pytest.mark.parametrize(("rounds", "mean"), [(0, None), (2, 1.5)])
def test_tokens_per_round_leave_out_the_first(rounds: int, mean: float | None):
    one = Completion([1] * 4, None, "stop", None, Usage(1, 4), Timings(rounds, 0.0, 0.0, 0.0))
    assert one.tokens_per_round == mean
