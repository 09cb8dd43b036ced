"""The engine and the thread around it, in this process: turns, shapes, a device that fails."""

import asyncio
import dataclasses
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import pytest

from qwen4jax.decode.batching import Engine, Sizes
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.requests import Request
from qwen4jax.decode.running import Delta
from qwen4jax.serve import engine as engine_module
from qwen4jax.serve.engine import DeviceLoop, Phase
from qwen4jax.serve.errors import CallError
from qwen4jax.serve.faults import parse_fault
from qwen4jax.serve.jobs import GenerateJob, Job, Mailbox, ScoreJob
from qwen4jax.serve.metrics import Metrics
from tests.decode.small import ids, mode, params
from tests.serve.running import PATIENCE, until

SIZES = Sizes(slots=4, max_length=1024, drafts=3, chunk=64, rows=1, ends=((4, 16),))
LONG = Sampling(temperature=0, max_new_tokens=900, ignore_eos=True)


def engine() -> Engine:
    return Engine(params(), SIZES, mode(), logprobs=True)


def advance(one: Engine) -> list[Any]:
    return list(one.advance())


def request(length: int, options: Sampling = LONG) -> Request:
    return Request(0, 0, tuple(ids(length)), options)


@pytest.mark.parametrize(
    ("left", "shape"), [(0, (4, 16)), (16, (4, 16)), (17, (1, 64)), (64, (1, 64)), (900, (1, 64))]
)
def test_steps_depend_on_the_prompt_alone(left: int, shape: tuple[int, int]):
    assert SIZES.prefill_shape(left) == shape
    assert dataclasses.replace(SIZES, slots=2).prefill_shape(left) == (min(shape[0], 2), shape[1])


def test_turns():
    """A round between any two chunks; prompts in turn; a cancelled request is gone at once."""
    one = engine()
    one.admit(0, request(5))
    advance(one)
    one.admit(1, request(300))
    one.admit(2, request(200))
    one.admit(3, request(7))
    assert one.free == 0
    begun: list[int] = []
    for turn in itertools.count(1):
        deltas = advance(one)
        # the first stream has a burst in every turn but the first, whose round is in flight
        assert turn == 1 or [d.request for d in deltas].count(0) == 1
        begun += [d.request for d in deltas if d.request not in (0, *begun)]
        if not one.feeding:
            break
    # 300 are 5 steps, 200 are 4, 7 one: the short one comes before the ends of the others
    assert turn == 10
    advance(one)
    assert begun[0] == 3
    with pytest.raises(StopIteration):
        one.cancel(9)
    one.cancel(1)
    assert one.free == 1
    assert one.finished[1].reason == "cancelled"
    assert {d.request for d in advance(one)} <= {0, 2, 3}
    one.admit(4, request(300))
    one.cancel(4)
    assert not one.feeding
    # its slot is taken again while its last round is in flight
    one.admit(5, request(5, dataclasses.replace(LONG, max_new_tokens=30)))
    tokens: dict[int, list[int]] = {}
    while 5 not in one.finished:
        for delta in one.advance():
            tokens.setdefault(delta.request, []).extend(delta.token_ids)
    assert tokens[5] == one.running[0].ids[:30]
    assert set(tokens) == {0, 2, 3, 5}


def test_an_engine_told_not_to_feed():
    """Has its rounds: a text to score takes the place of the chunk."""
    one = engine()
    one.admit(0, request(5))
    advance(one)
    one.admit(1, request(100))
    fed, rounds = one.prefills, one.rounds
    for _ in range(5):
        list(one.advance(feed=False))
    assert (one.prefills, one.rounds) == (fed, rounds + 5)


def loop(load: Callable[[], Any]) -> DeviceLoop:
    made = DeviceLoop(load, slots=1, queue=1, metrics=Metrics())
    made.start()
    return made


def until_it_serves(device: DeviceLoop) -> None:
    until(lambda: device.phase is not Phase.LOADING)
    assert device.phase is Phase.SERVING, device.detail


def test_a_device_that_cannot_begin():
    """It fails with the reason, and takes nothing."""

    def load() -> Any:
        raise ValueError("model.safetensors: is cut off")

    async def main() -> None:
        failed = loop(load)
        until(lambda: failed.phase is Phase.FAILED)
        assert failed.detail == "ValueError: model.safetensors: is cut off"
        with pytest.raises(CallError, match="the server is failed: ValueError: model"):
            failed.submit(GenerateJob("id", [request(5)], deadline=None))
        failed.drain("told to")
        assert failed.phase is Phase.FAILED

    asyncio.run(main())


class FakeEngine:
    """Answers each request with one token, and fails where it is told to, once that may be."""

    def __init__(self, may_fail: threading.Event):
        self._may_fail = may_fail
        self.state, self.rounds, self.prefills, self.feeding = jnp.zeros(3), 0, 0, False
        self.running: dict[int, Any] = {}
        self.finished: dict[int, Any] = {}

    @property
    def free(self) -> int:
        return 1 - len(self.running)

    def admit(self, number: int, asked: Request) -> None:
        if asked.ids == (666,):
            assert self._may_fail.wait(PATIENCE)
            raise RuntimeError("no memory for it")
        self.running[number] = types.SimpleNamespace(number=number, ids=[], slot=0)

    def advance(self, *, feed: bool) -> Iterator[Delta]:
        for number, row in tuple(self.running.items()):
            row.ids, row.rounds, row.times = [7], 0, {"admitted": (0.0, 0.0)}
            row.seconds = lambda start, end: 0.0
            self.finished[number] = self.running.pop(number)
            yield Delta(number, [7], [-0.5], "a", "length")

    def cancel(self, number: int) -> None:
        self.finished[number] = self.running.pop(number)


class FakeScoring:
    """Has its score at once."""

    def wait(self) -> None:
        pass

    def advance(self) -> bool:
        return False

    def scores(self) -> list[Any]:
        return ["score"]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The engines that a loop makes; of a model that is broken only the first."""
    made: list[FakeEngine] = []

    def new(served: Any) -> FakeEngine:
        if served.broken and made:
            raise RuntimeError("the device is gone")
        made.append(FakeEngine(served.may_fail))
        return made[-1]

    monkeypatch.setattr(engine_module, "new_engine", new)
    monkeypatch.setattr(engine_module, "warm_up", lambda engine, served, say: None)
    return made


def model(*, broken: bool = False, may_fail: bool = True) -> types.SimpleNamespace:
    """What `faked` makes engines of."""
    event = threading.Event()
    if may_fail:
        event.set()
    return types.SimpleNamespace(parameter_bytes=1, notes=(), broken=broken, may_fail=event)


async def end_of(job: Job) -> Any:
    return (await asyncio.wait_for(job.mailbox.take(), PATIENCE))[-1]


def test_what_cannot_be_admitted_ends_and_the_next_is_served(faked: list[FakeEngine]):
    async def main() -> None:
        serving = loop(model)
        until_it_serves(serving)
        bad = GenerateJob("bad", [Request(0, 0, (666,), LONG)], deadline=None)
        good = GenerateJob("good", [request(3)], deadline=None)
        serving.submit(bad)
        serving.submit(good)
        error = await end_of(bad)
        assert isinstance(error, CallError)
        assert error.message == "the round of this request failed; the server goes on"
        assert (await end_of(good)).delta.token_ids == [7]
        until(lambda: serving.held == 0)
        assert len(faked) == 2
        assert "no memory for it" in serving.last_fault

    asyncio.run(main())


def test_who_is_told_the_end_finds_the_place_free(
    faked: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
):
    """Of an answer, a score and a failure: at once, in what is accepted and in the metrics."""
    monkeypatch.setattr(engine_module, "new_scoring", lambda served, ids, named: FakeScoring())
    metrics, seen = Metrics(), []

    def watched[J: Job](job: J, serving: DeviceLoop) -> J:
        put = job.mailbox.put

        def look(item: Any) -> None:
            seen.append((job.request_id, serving.held, metrics.value("waiting")))
            put(item)

        monkeypatch.setattr(job.mailbox, "put", look)
        return job

    async def main() -> None:
        serving = DeviceLoop(model, slots=1, queue=0, metrics=metrics)
        serving.start()
        until_it_serves(serving)
        jobs = (
            GenerateJob("good", [request(3)], deadline=None),
            ScoreJob("scored", [1, 2], (), deadline=None),
            GenerateJob("bad", [Request(0, 0, (666,), LONG)], deadline=None),
            GenerateJob("late", [request(3)], deadline=0.0),
        )
        for job in jobs:
            # no place to wait in: the next is accepted as soon as the last is told
            serving.submit(watched(job, serving))
            await end_of(job)

    asyncio.run(main())
    assert seen == [(name, 0, 0.0) for name in ("good", "scored", "bad", "late")]


def test_what_is_accepted_is_seen_at_once(faked: list[FakeEngine]):
    """While the device is in a step it counts as waiting; a place is in one of two sums, always."""
    metrics = Metrics()

    async def main() -> None:
        served = model(may_fail=False)
        serving = DeviceLoop(lambda: served, slots=1, queue=2, metrics=metrics)
        serving.start()
        until_it_serves(serving)
        jobs = [GenerateJob(str(n), [Request(0, 0, (666,), LONG)], deadline=None) for n in range(3)]
        for count, job in enumerate(jobs, start=1):
            serving.submit(job)
            assert sum(serving.counts()) == serving.held == count
        # admitted as far as the metrics know: it is the device that does not go on
        until(lambda: serving.counts() == (1, 2))
        assert (metrics.value("running"), metrics.value("waiting")) == (1.0, 2.0)
        served.may_fail.set()
        for job in jobs:
            assert (await end_of(job)).code.name == "INTERNAL"
        assert serving.counts() == (0, 0)
        assert (metrics.value("running"), metrics.value("waiting")) == (0.0, 0.0)

    asyncio.run(main())


def test_a_hold_ends_with_its_release_or_with_a_job(faked: list[FakeEngine]):
    """What tests of the server wait at: no sooner than they say, whichever comes first."""

    async def main() -> None:
        serving = loop(model)
        until_it_serves(serving)
        for ends in ("release", "cancel", "deadline", "release before it begins"):
            if ends == "release before it begins":
                serving.release()
            fault, deadline = parse_fault("hold=0"), 0.0 if ends == "deadline" else None
            held = GenerateJob("held", [request(3)], deadline=None, fault=fault)
            behind = GenerateJob("behind", [request(3)], deadline=deadline)
            serving.submit(held)
            if ends != "release before it begins":
                until(lambda: serving.counts() == (1, 0))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(held.mailbox.take(), 0.05)
            serving.submit(behind)
            if ends == "release":
                serving.release()
            elif ends == "cancel":
                serving.cancel(behind)
            assert (await end_of(held)).delta.token_ids == [7]
            until(lambda: serving.held == 0)

    asyncio.run(main())


def test_a_device_that_does_not_come_back(faked: list[FakeEngine]):
    """All that was accepted is told, and the phase says that the process has to go."""

    async def main() -> None:
        served = model(broken=True, may_fail=False)
        failing = loop(lambda: served)
        until_it_serves(failing)
        bad = GenerateJob("bad", [Request(0, 0, (666,), LONG)], deadline=None)
        behind = GenerateJob("behind", [request(3)], deadline=None)
        failing.submit(bad)
        failing.submit(behind)
        # not before both are accepted
        served.may_fail.set()
        assert (await end_of(bad)).code.name == "INTERNAL"
        assert (await end_of(behind)).code.name == "UNAVAILABLE"
        until(lambda: failing.phase is Phase.FAILED)
        assert failing.detail == "RuntimeError: the device is gone"
        with pytest.raises(CallError, match="the server is failed"):
            failing.submit(behind)

    asyncio.run(main())


def test_a_mailbox_takes_from_any_thread():
    """All items, in order, however they come; taking waits for the first."""

    async def main() -> None:
        box: Mailbox[int] = Mailbox()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.take(), 0.01)

        def fill(numbers: Sequence[int]) -> None:
            for number in numbers:
                box.put(number)

        filled = asyncio.to_thread(fill, range(1000))
        task, got = asyncio.create_task(filled), []
        while len(got) < 1000:
            got += await box.take()
        await task
        assert got == list(range(1000))

    asyncio.run(main())
