"""SIGTERM: what was accepted ends or is told so, and the process goes in time."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from qwen4jax.serve.client import Answer, ServerError
from tests.serve.running import RunningServer, fault, in_background, until

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
    with start("--grace", "15") as server, server.ready().client() as client:
        endless = lambda: client.generate([7], **ENDLESS)  # noqa: E731
        stalls = lambda: client.generate([6], **ENDLESS, **fault("stall=3600"))  # noqa: E731
        with in_background(*[endless] * 3) as running:
            until(lambda: server.status().running == 3)
            with in_background(stalls) as stalling:
                until(lambda: server.status().running == 4)
                with in_background(*[endless] * 3) as waiting:
                    until(lambda: server.status().waiting == 3)
                    server.signal()
                    until(lambda: server.health() == "NOT_SERVING")
                    # it says so while it goes, and takes nothing new
                    with pytest.raises(ServerError, match="UNAVAILABLE: the server is draining"):
                        client.generate([8], **SHORT)
                    # one that waited for the device would take the hour that it stalls
                    assert server.exit_code() == 0
        answers, told = ended(running + stalling + waiting)
        assert (answers + told, told >= 4) == (7, True)


def test_under_load_none_vanish(start: Start):
    """What was accepted is answered; what comes later is told; the process ends by itself."""
    with start("--queue", "40") as server:
        server.ready()
        with server.client() as client:
            want = client.generate([5, 6], **SHORT).token_ids
            # nothing ends before the signal has come
            held = lambda: client.generate([5, 6], **SHORT, **fault("hold=0"))  # noqa: E731
            calls = [lambda: client.generate([5, 6], **SHORT)] * 30
            with in_background(held) as first:
                until(lambda: server.status().running == 1)
                with in_background(*calls) as results:
                    until(lambda: server.status().waiting > 0)
                    server.signal()
                    server.release()
            assert server.exit_code() == 0
    results += first
    answers, _ = ended(results)
    assert answers > 0
    assert all(one.token_ids == want for one in results if isinstance(one, Answer))
    (line,) = (one for one in server.lines if one["event"] == "stopped")
    assert line["unfinished"] == 0


def test_a_second_signal_ends_at_once(start: Start):
    """While a request runs that has minutes of grace, and does not end by itself."""
    with start() as server, server.ready().client() as client:
        stream = client.stream([5], **ENDLESS, **fault("hold=1"))
        next(stream)
        server.signal(signal.SIGINT)
        until(lambda: server.health() == "NOT_SERVING")
        server.signal(signal.SIGINT)
        with pytest.raises(ServerError, match="UNAVAILABLE: the server stops"):
            list(stream)
        assert server.exit_code() == 0


def test_while_it_loads(model: Path, tmp_path: Path):
    """The socket answers from the first moment; a signal ends it there too.

    It has all to compile: what takes the calls milliseconds takes it a quarter of a minute.
    """
    with RunningServer(model, tmp_path / "programs") as server:
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
        assert server.exit_code() == 0
    # gone: the port is free, and a call says so
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/x/y")(b"", timeout=5)
