"""Clients that go, wait, or are slow: slots come back, the others do not notice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from qwen4jax.serve.client import Answer, Chunk, Client, Scored, ServerError
from tests.serve.running import ROOT, RunningServer, fault, in_background, until

Ids = Callable[..., list[int]]
LONG: dict[str, Any] = {"max_new_tokens": 2000, "ignore_eos": True, "seed": 7}
SHORT: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}


def started(client: Client, prompt: list[int], **options: Any) -> Any:
    """A stream that has given its first chunk."""
    stream = client.stream(prompt, **options)
    next(stream)
    return stream


def stopped(server: RunningServer) -> None:
    """Nothing runs or waits, and what rounds there were is counted: none is made any more."""
    before = server.idle().rounds
    assert server.status().rounds == before


def test_a_cancelled_stream_frees_its_slot(server: RunningServer, client: Client, ids: Ids):
    """SRV-04: in mid-stream; the company's tokens are those it has alone."""
    want = client.generate(ids(20), **{**SHORT, "max_new_tokens": 60})
    before = server.status()
    with in_background(lambda: client.generate(ids(20), **{**SHORT, "max_new_tokens": 60})) as got:
        # the device holds still until it goes
        stream = client.stream(ids(10), **LONG, **fault("hold=30"))
        seen = 0
        while seen < 30:
            seen += len(next(stream).token_ids)
        stream.close()
    assert got[0].token_ids == want.token_ids
    stopped(server)
    # of 2,000 that it asked for, those of a round past the hold, and of one that was in flight
    own = server.status().generated_tokens - before.generated_tokens - 60
    assert own < 30 + 2 * 4


def test_cancelled_in_prefill_and_in_the_queue(server: RunningServer, client: Client, ids: Ids):
    """SRV-04: of 2,000 tokens no more than a few chunks are fed; a queued call never starts."""
    before = server.idle().prefill_steps
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        # the device holds still while the client goes
        client.generate(ids(2000), max_new_tokens=1, timeout=0.1, **fault("hold=0"))
    assert server.idle().prefill_steps - before <= 2

    streams = [started(client, ids(4), **LONG) for _ in range(3)]
    streams.append(started(client, ids(4), **LONG, **fault("hold=1")))
    admitted = server.status().prompt_tokens
    # it ends the hold; the four go on
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        client.generate(ids(50), max_new_tokens=1, timeout=0.2)
    until(lambda: server.status().waiting == 0)
    for stream in streams:
        stream.close()
    stopped(server)
    assert server.status().prompt_tokens == admitted


def test_a_stream_that_goes_while_another_prefills(server: RunningServer, client: Client, ids: Ids):
    """SRV-05: A has a long prompt, B streams and is dropped, then C comes."""
    want_a, want_c = client.generate(ids(2000), **SHORT), client.generate(ids(30), **SHORT)
    stream = started(client, ids(5), **LONG)
    with in_background(lambda: client.generate(ids(2000), **SHORT, **fault("hold=0"))) as results:
        until(lambda: server.status().running == 2)
        # until now the device has held still before the first chunk
        stream.close()
        answer = client.generate(ids(30), **SHORT)
    assert answer.token_ids == want_c.token_ids
    assert results[0].token_ids == want_a.token_ids
    stopped(server)


def test_a_long_prompt_stalls_no_stream(server: RunningServer, client: Client, ids: Ids):
    """Between two chunks of 2,000 tokens the running stream has a round."""
    stream = started(client, ids(5), **LONG)
    before = server.status()
    client.generate(ids(2000), max_new_tokens=1)
    after = server.status()
    stream.close()
    steps = after.prefill_steps - before.prefill_steps
    assert steps == 2000 // 64 + 1
    assert after.rounds - before.rounds >= steps
    # and a text to score does not either
    stream = started(client, ids(5), **LONG)
    before = server.status()
    client.score(ids(2000))
    assert server.status().rounds - before.rounds >= steps
    stream.close()
    stopped(server)


def test_deadlines(server: RunningServer, client: Client, ids: Ids):
    """SRV-08: past, at once, in prefill, in mid-decode; the slot is free each time."""
    for timeout in (-1, 0.001, 0.05, 0.2):
        with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
            client.generate(ids(5), timeout=timeout, **LONG)
        stopped(server)
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        client.generate(ids(2000), timeout=0.1, max_new_tokens=300, ignore_eos=True)
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        client.score(ids(2000), timeout=0.01)
    stopped(server)
    # what comes before the deadline is not lost, and nothing comes after it
    seen: list[Chunk] = []
    began = time.monotonic()
    started(client, ids(5), **LONG).close()
    # late enough for a chunk on a machine as busy as this; then the device holds still until then
    timeout = 1 + 20 * (time.monotonic() - began)
    stream = client.stream(ids(5), timeout=timeout, **LONG, **fault("hold=1"))
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        seen.extend(stream)
    assert next(stream, None) is None
    assert seen
    assert all(chunk.finish is None for chunk in seen)
    assert client.generate(ids(5), **SHORT, timeout=60).finish.reason == "length"


def test_a_full_queue(server: RunningServer, client: Client, ids: Ids):
    """Four run, four wait, the ninth is refused at once; the others are answered."""
    want = client.generate(ids(8), **SHORT).token_ids
    streams = [started(client, ids(4), **LONG) for _ in range(4)]
    with in_background(*[lambda: client.generate(ids(8), **SHORT)] * 4) as waiting:
        until(lambda: server.status().waiting == 4)
        for call in (client.generate, client.score):
            with pytest.raises(ServerError, match="RESOURCE_EXHAUSTED: the queue is full: 8 "):
                call(ids(8))
        server.serves()
        streams.pop().close()
    assert [one.token_ids for one in waiting] == [want] * 4
    for stream in streams:
        stream.close()
    stopped(server)


def test_a_slow_reader_holds_nobody_up(server: RunningServer, client: Client, ids: Ids):
    """It reads when all is over: the slot was free long before, and nothing is missing."""
    options = {**LONG, "max_new_tokens": 300, "logprobs": True, "top_logprobs": 5, "n": 2}
    slow = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    with server.client(options=slow) as other:
        stream = other.stream(ids(6), **options)
        chunks = [next(stream)]
        assert client.generate(ids(8), **SHORT).token_ids
        server.idle()
        assert client.generate(ids(8), **SHORT).token_ids
        chunks += stream
    for sample in range(2):
        own = [chunk for chunk in chunks if chunk.sample == sample]
        assert sum(len(chunk.token_ids) for chunk in own) == 300
        assert sum(len(chunk.top_logprobs) for chunk in own) == 300
        assert own[-1].finish is not None
        assert sum(chunk.rounds for chunk in own) == own[-1].finish.rounds
    # what waited came in few pieces
    assert len(chunks) < 300


def test_clients_that_are_killed(server: RunningServer, client: Client, ids: Ids):
    """kill -9 in mid-stream: no goodbye, and the slots are free."""
    arguments = "--max-new-tokens 2000 --ignore-eos --ids 5,6 --target".split()
    command = [sys.executable, "-m", "qwen4jax.serve.client", *arguments, server.target]
    killed = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ)
        for _ in range(3)
    ]
    for process in killed:
        assert process.stdout is not None
        assert process.stdout.read(1)
    assert server.status().running >= 1
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]
    stopped(server)
    assert client.generate(ids(8), **SHORT).finish.reason == "length"


def test_ten_long_calls_with_eager_pings(server: RunningServer, ids: Ids):
    """SRV-07: no data for a while, pings all the time: no GOAWAY, all are answered.

    Ten minutes and pings every 30 s are here three seconds and 0.2 s.
    """
    eager = [
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with server.client(options=eager) as client:
        # the device holds still at the first: all wait for it
        stalled = {**SHORT, **fault("stall=3")}
        calls: list[Callable[[], Any]] = [lambda: client.generate(ids(5), **stalled)]
        calls += [lambda: client.generate(ids(5), **SHORT)] * 6
        calls += [lambda: client.score(ids(9))] * 3
        with in_background(*calls) as results:
            pass
    # eight have a place, and two may come too early for one
    refused = [one for one in results if isinstance(one, ServerError)]
    assert {one.code for one in refused} <= {"RESOURCE_EXHAUSTED"}
    assert len(refused) <= 2
    assert all(isinstance(one, Answer | Scored | ServerError) for one in results), results
    server.idle()
