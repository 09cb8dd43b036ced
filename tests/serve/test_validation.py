"""Checks of calls without a server: chat templates, and checkpoints that lack a tokenizer."""

import dataclasses
from typing import Any

import pytest

from qwen4jax.decode.batching import Sizes
from qwen4jax.serve import validation
from qwen4jax.serve.errors import CallError
from qwen4jax.serve.model import Served
from qwen4jax.serve.v1 import generation_pb2 as pb
from tests.decode.small import EOS, params, tokenizer

SERVED = Served(
    name="small",
    params=params(),
    tokenizer=tokenizer(),
    eos_ids=(EOS,),
    sizes=Sizes(slots=1, max_length=64, drafts=0, chunk=16),
    max_context=200,
    top_logprobs=5,
    parameter_bytes=0,
    drafting_off_reason="",
    notes=(),
)
HELLO = {"role": "user", "content": "Hello"}


def checked(served: Served = SERVED, **fields: Any) -> validation.Generation:
    return validation.generation(pb.GenerateRequest(**fields), served, most_samples=4, seed=7)


def chat(*messages: dict[str, str], **fields: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(**message) for message in messages], **fields)


def test_chats_go_through_the_template():
    plain = checked(chat=chat(HELLO)).requests[0].ids
    assert list(plain) == tokenizer().chat_ids([HELLO])
    closed = checked(chat=chat(HELLO, add_generation_prompt=False)).requests[0].ids
    assert list(closed) == tokenizer().chat_ids([HELLO], add_generation_prompt=False)
    asked = chat(HELLO)
    asked.template_arguments.update(
        {"enable_thinking": False, "tools": [{"most": 3, "least": 0.5}]}
    )
    expected = tokenizer().chat_ids(
        [HELLO], enable_thinking=False, tools=[{"least": 0.5, "most": 3}]
    )
    # a Struct keeps no order, and has floats only: 3 is 3 again, not 3.0
    assert list(checked(chat=asked).requests[0].ids) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat": chat()}, "chat.messages: the list is empty"),
        (
            {"chat": chat(HELLO, {"role": "system", "content": "late"})},
            "chat: chat_template.jinja: cannot be rendered for these messages: TemplateError: "
            "System message must be at the beginning.",
        ),
        ({"text": "a" * 300}, "text: 300 tokens leave no room in a context of 200"),
        ({"text": "a", "sampling": pb.Sampling(n=5)}, "sampling.n: 5 is over 4"),
        ({}, "prompt: is missing; give one of text, token_ids and chat"),
    ],
    ids=["empty", "refused by the template", "long", "samples", "missing"],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str):
    with pytest.raises(CallError) as caught:
        checked(**fields)
    assert (caught.value.code.name, caught.value.message) in {
        ("INVALID_ARGUMENT", message),
        ("INVALID_ARGUMENT", f"{message}, the samples taken at once"),
    }


def test_without_a_tokenizer():
    bare = dataclasses.replace(SERVED, tokenizer=None)
    assert checked(bare, token_ids=pb.TokenIds(ids=[5])).requests[0].ids == (5,)
    for fields, message in (
        ({"text": "a"}, "text: the served checkpoint has no tokenizer; give token_ids"),
        ({"chat": chat(HELLO)}, "chat: the served checkpoint has no tokenizer"),
        (
            {"token_ids": pb.TokenIds(ids=[5]), "sampling": pb.Sampling(stop=["a"])},
            "sampling.stop: the served checkpoint has no tokenizer",
        ),
    ):
        with pytest.raises(CallError) as caught:
            checked(bare, **fields)
        assert caught.value.message.startswith(message)


def test_defaults():
    """What is unset is the default of `Sampling`, with the server's seed and what room there is."""
    options = checked(text="a").requests[0].sampling
    assert (options.temperature, options.seed, options.n) == (1.0, 7, 1)
    assert options.max_new_tokens == 199
    greedy = checked(text="a", sampling=pb.Sampling(temperature=0.0, seed=0)).requests[0].sampling
    assert (greedy.temperature, greedy.seed) == (0.0, 0)
