"""Accepted calls on their way between the event loop and the thread that owns the device."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence

from qwen4jax.decode.requests import Request
from qwen4jax.decode.running import Delta
from qwen4jax.decode.score import Score
from qwen4jax.serve.errors import CallError
from qwen4jax.serve.faults import Fault


@dataclasses.dataclass(frozen=True)
class Times:
    """Where a finished sample's seconds went.

    Attributes:
        queue: from arrival to a slot.
        prefill: from the slot to the first token.
        decode: from the first token to the last.
        rounds: that it took part in.
    """

    queue: float
    prefill: float
    decode: float
    rounds: int


@dataclasses.dataclass(frozen=True)
class Gain:
    """What a sample of a job gained.

    Attributes:
        sample: of the job.
        delta: new tokens.
        times: None while it runs.
    """

    sample: int
    delta: Delta
    times: Times | None


class Mailbox[T]:
    """A queue from any thread to one task of an event loop.

    It takes whatever comes and never waits: what a slow reader has not fetched is at most one
    answer.
    """

    def __init__(self):
        """For the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[T] = []

    def put(self, item: T) -> None:
        """Adds an item, from any thread."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self) -> list[T]:
        """All items so far, at least one."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            with self._lock:
                items, self._items = self._items, []
            if items:
                return items


class Job:
    """An accepted call.

    Attributes:
        request_id: of the call.
        deadline: of the call, by `time.monotonic`; None without one.
        places: how many places it holds in slots and queue; one less with each sample that ends.
        accepted: when it came, by `time.perf_counter`.
        cancelled: whether nobody waits for it any more.
        fault: to happen to it; in tests of the server only.
        mailbox: what it gained, and at most one error, which ends it.
    """

    def __init__(
        self, request_id: str, *, deadline: float | None, places: int, fault: Fault | None
    ):
        self.request_id, self.deadline, self.places = request_id, deadline, places
        self.accepted = time.perf_counter()
        self.cancelled = False
        self.fault = fault
        self.mailbox: Mailbox[Gain | Score | CallError] = Mailbox()

    @property
    def over(self) -> bool:
        """Whether nobody waits for it any more, or its deadline has passed."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.cancelled or late


class GenerateJob(Job):
    """An accepted Generate call.

    Attributes:
        requests: one per sample.
    """

    def __init__(
        self,
        request_id: str,
        requests: Sequence[Request],
        *,
        deadline: float | None,
        fault: Fault | None = None,
    ):
        super().__init__(request_id, deadline=deadline, places=len(requests), fault=fault)
        self.requests = requests


class ScoreJob(Job):
    """An accepted Score call.

    Attributes:
        ids: of the text.
        named: ids that are asked for in every place.
    """

    def __init__(
        self,
        request_id: str,
        ids: Sequence[int],
        named: Sequence[int],
        *,
        deadline: float | None,
        fault: Fault | None = None,
    ):
        super().__init__(request_id, deadline=deadline, places=1, fault=fault)
        self.ids, self.named = ids, named
