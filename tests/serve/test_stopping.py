"""SIGTERM: what was accepted ends or is told so, and the process goes in time."""

import signal
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from qwen4jax.serve.client import Answer, ServerError
from tests.serve.running import RunningServer, in_background, until

Ids = Callable[..., list[int]]
Start = Callable[..., RunningServer]
ENDLESS: dict[str, Any] = {"max_new_tokens": 2200, "ignore_eos": True, "seed": 1}
SHORT: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True, "seed": 2}


def ended(results: list[Any]) -> tuple[int, int]:
    """Answers, and calls that were told UNAVAILABLE: there is nothing else."""
    answers = [one for one in results if isinstance(one, Answer)]
    told = [one for one in results if isinstance(one, ServerError)]
    assert len(answers) + len(told) == len(results), results
    assert {one.code for one in told} <= {"UNAVAILABLE"}, told
    return len(answers), len(told)


def test_streams_and_a_queue_within_the_grace(start: Start):
    """SRV-10: four streams on a device that stalls, three that wait; each gets an end."""
    with start("--grace", "3") as server, server.ready().client() as client:
        stall = {"metadata": [("x-test-fault", "stall=0.5")]}
        calls = [
            lambda: client.generate([6], **ENDLESS, **stall),
            *[lambda: client.generate([7], **ENDLESS)] * 6,
        ]
        with in_background(*calls) as results:
            until(lambda: server.status().waiting == 3)
            server.signal()
            began = time.monotonic()
            until(lambda: server.health() == "NOT_SERVING")
            # it says so while it goes, and takes nothing new
            with pytest.raises(ServerError, match="UNAVAILABLE: the server is draining"):
                client.generate([8], **SHORT)
            assert server.exit_code(10) == 0
        # the grace, the flush, and the machine's other work
        assert time.monotonic() - began < 10
        answers, told = ended(results)
        assert (answers + told, told >= 3) == (7, True)


def test_under_load_none_vanish(start: Start):
    """What was accepted is answered; what comes later is told; the process ends by itself."""
    with start("--queue", "40") as server:
        server.ready()
        with server.client() as client:
            want = client.generate([5, 6], **SHORT).token_ids
            calls = [lambda: client.generate([5, 6], **SHORT)] * 30
            with in_background(*calls) as results:
                until(lambda: server.status().running > 0)
                server.signal()
            assert server.exit_code() == 0
    answers, _ = ended(results)
    assert answers > 0
    assert all(one.token_ids == want for one in results if isinstance(one, Answer))
    (line,) = (one for one in server.lines if one["event"] == "stopped")
    assert line["unfinished"] == 0


def test_a_second_signal_ends_at_once(start: Start):
    """While a request runs that has minutes of grace."""
    with start("--grace", "600") as server, server.ready().client() as client:
        stream = client.stream([5], **ENDLESS)
        next(stream)
        server.signal(signal.SIGINT)
        until(lambda: server.health() == "NOT_SERVING")
        server.signal(signal.SIGINT)
        with pytest.raises(ServerError, match="UNAVAILABLE: the server stops"):
            list(stream)
        assert server.exit_code(10) == 0


def test_while_it_loads(start: Start):
    """The socket answers from the first moment; a signal ends it there too."""
    with start() as server:
        server.wait_for("listening")
        assert server.health() == server.health("qwen4jax.v1.Generation") == "NOT_SERVING"
        with server.client() as client:
            with pytest.raises(ServerError, match="UNAVAILABLE: the server is loading: "):
                client.generate([5])
            with pytest.raises(ServerError, match="UNAVAILABLE: the server is loading: "):
                client.model()
            assert client.status().state == 1
            assert client.status().detail
        server.signal()
        assert server.exit_code(10) == 0
    # gone: the port is free, and a call says so
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/x/y")(b"", timeout=5)
