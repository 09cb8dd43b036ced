"""What is wrong with a call is said by a status that names the field; the next call works."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from qwen4jax.serve.client import Client, ServerError
from qwen4jax.serve.v1 import generation_pb2 as pb
from tests.serve.running import RunningServer

Ids = Callable[..., list[int]]
NAN, INF = float("nan"), float("inf")


def refused(client: Client, message: str, prompt: Any = (5, 6), **arguments: Any) -> None:
    """The call is refused with a message that begins so, and a plain call works afterwards."""
    with pytest.raises(ServerError) as caught:
        client.samples(prompt, **{"max_new_tokens": 2, **arguments})
    assert (caught.value.code, caught.value.request_id is not None) == ("INVALID_ARGUMENT", True)
    assert caught.value.message.startswith(message), caught.value.message
    assert "Traceback" not in caught.value.message
    assert len(client.generate([5, 6], max_new_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("wrong", [-1, 0, 2**31, 2**32 + 5, 2**63 - 1])
def test_ids_outside_the_vocabulary(client: Client, server: RunningServer, vocabulary, wrong: int):
    """SRV-01: also those that would be right after narrowing; the index is named."""
    wrong = wrong or vocabulary
    end = f"{wrong} is not in [0, {vocabulary})"
    refused(client, f"token_ids.ids[0]: {end}", [wrong])
    refused(client, f"token_ids.ids[2]: {end}", [5, 6, wrong, 7, wrong])
    with pytest.raises(ServerError, match=r"INVALID_ARGUMENT: token_ids.ids\[1\]"):
        client.score([5, wrong])
    server.serves()


def test_ids_in_other_fields(client: Client, vocabulary: int):
    """SRV-02"""
    for wrong in (vocabulary, -1, 2**40):
        field = f"sampling.stop_token_ids[1]: {wrong} is not in [0, {vocabulary})"
        refused(client, field, stop_token_ids=[5, wrong])
        field = f"sampling.logit_bias[{wrong}]: is not in [0, {vocabulary})"
        refused(client, field, logit_bias={5: 1.0, wrong: 1.0})
        with pytest.raises(ServerError, match=r"INVALID_ARGUMENT: named_token_ids\[0\]"):
            client.score([5], named_token_ids=[wrong])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "sampling.temperature must be of type float, 0 to"),
        ({"temperature": NAN}, "sampling.temperature must"),
        ({"temperature": INF}, "sampling.temperature must"),
        ({"top_p": 0.0}, "sampling.top_p must"),
        ({"top_p": 1.5}, "sampling.top_p must"),
        ({"top_k": -1}, "sampling.top_k must"),
        ({"min_p": 1.1}, "sampling.min_p must"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty must"),
        ({"presence_penalty": NAN}, "sampling.presence_penalty must"),
        ({"frequency_penalty": 1e5}, "sampling.frequency_penalty must"),
        ({"logit_bias": {3: NAN}}, "sampling.logit_bias[3] must"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens must"),
        ({"max_new_tokens": 2**40}, "sampling.max_new_tokens must"),
        ({"min_new_tokens": -1}, "sampling.min_new_tokens must"),
        ({"min_new_tokens": 3}, "sampling.min_new_tokens must not exceed max_new_tokens=2"),
        ({"n": 0}, "sampling.n must"),
        ({"n": 2, "temperature": 0.0}, "sampling.n=2 samples at temperature 0"),
        ({"n": 9}, "sampling.n: 9 is over 8"),
        ({"stop": ["a", ""]}, "sampling.stop[1]: is empty"),
        ({"stop": ["a"] * 33}, "sampling.stop: 33 strings, at most 32"),
        ({"stop_token_ids": range(100)}, "sampling.stop_token_ids: 10"),
        ({"top_logprobs": 6}, "top_logprobs: 6 is not in 0..5"),
        ({"top_logprobs": -1}, "top_logprobs: -1 is not in 0..5"),
    ],
    ids=str,
)
def test_contradictory_options(client: Client, options: dict[str, Any], message: str):
    """SMP-08 over the wire: a stated rule or INVALID_ARGUMENT."""
    refused(client, message, **options)


def test_options_at_their_edges_are_served(client: Client, vocabulary: int):
    for options in (
        {"temperature": 1e-9},
        {"temperature": 1e9},
        {"top_p": 1.0, "top_k": 0},
        {"top_k": vocabulary},
        {"top_k": vocabulary + 1},
        {"logit_bias": {5: -INF}, "seed": 2**64 - 1},
        {"stop_token_ids": range(20)},
    ):
        answer = client.generate([5, 6], max_new_tokens=3, logprobs=True, **options)
        assert 1 <= len(answer.token_ids) <= 3
        assert all(value <= 0 for value in answer.logprobs)


def test_prompts_that_do_not_fit(client: Client, ids: Ids):
    """Empty, missing, and around the end of the context, which prompt and output share."""
    refused(client, "token_ids.ids: is empty", [])
    refused(client, "text: is empty", "")
    refused(client, "token_ids.ids: 2304 tokens leave no room in a context of 2304", ids(2304))
    refused(
        client,
        "sampling.max_new_tokens: 2303 prompt tokens and 2 new ones are over the context of 2304",
        ids(2303),
    )
    assert len(client.generate(ids(2303), max_new_tokens=1).token_ids) == 1
    # what is left is what is given, if no length is asked for
    answer = client.generate(ids(2300), ignore_eos=True)
    assert (len(answer.token_ids), answer.finish.reason) == (4, "length")
    with pytest.raises(ServerError, match="2305 tokens are over the context of 2304"):
        client.score(ids(2305))


def test_messages_that_are_none(server: RunningServer):
    """Not UTF-8, cut off, without a prompt: bytes as they come, sent without a client."""
    text = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="QQ")]))
    stop = pb.GenerateRequest(text="a", sampling=pb.Sampling(stop=["a", "b", "QQ"]))
    cases = {
        b"\x0a\x02\xff\xfe": "text: byte 0: is not UTF-8",
        text.SerializeToString().replace(b"QQ", b"Q\xff"): (
            "chat.messages[0].content: byte 1: is not UTF-8"
        ),
        stop.SerializeToString().replace(b"QQ", b"\xc3\x28"): (
            "sampling.stop[2]: byte 0: is not UTF-8"
        ),
        b"\x0a\x05a": "the request's bytes are no qwen4jax.v1.GenerateRequest",
        b"": "prompt: is missing; give one of text, token_ids and chat",
    }
    with grpc.insecure_channel(server.target) as channel:
        generate = channel.unary_stream(f"/{pb.DESCRIPTOR.package}.Generation/Generate")
        for raw, message in cases.items():
            with pytest.raises(grpc.RpcError) as caught:
                list(generate(raw, timeout=60))
            error: Any = caught.value
            assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)
    server.serves()


def test_a_message_that_is_too_large(client: Client):
    """The limit of the transport, with its own status."""
    with pytest.raises(ServerError, match="RESOURCE_EXHAUSTED") as caught:
        client.generate("a" * (5 << 20))
    assert "max" in caught.value.message
    assert client.generate([5, 6], max_new_tokens=1).token_ids


def test_chats_that_are_wrong(client: Client):
    hello = {"role": "user", "content": "Hello"}
    with pytest.raises(ServerError, match=r"INVALID_ARGUMENT: chat\.template_arguments: 'templ"):
        client.generate([hello], template_arguments={"template": "x"})
    assert client.generate([hello], max_new_tokens=1).token_ids
