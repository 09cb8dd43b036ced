"""The thread that owns the device: it loads, compiles, and runs accepted jobs step by step."""

import collections
import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc
import jax

from qwen4jax.decode.batching import Engine
from qwen4jax.decode.compiling import clock
from qwen4jax.decode.running import Delta
from qwen4jax.decode.score import Score, Scoring
from qwen4jax.serve.errors import CallError, internal, unavailable
from qwen4jax.serve.jobs import Gain, GenerateJob, Job, ScoreJob, Times
from qwen4jax.serve.logs import event
from qwen4jax.serve.metrics import Metrics
from qwen4jax.serve.model import Served
from qwen4jax.serve.warm_up import new_engine, new_scoring, warm_up

# seconds after which an idle thread says again that it lives
_IDLE = 0.5
_Say = Callable[[str], None]


class Phase(enum.Enum):
    """What the thread does; by its value it is spoken of."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class DeviceLoop:
    """Runs jobs on the device.

    One turn of its loop takes what has come, drops what has ended, admits what there is room for,
    and does one step: a chunk of one kind of prompt, and a round of all running streams. So no
    stream waits longer than a chunk for its next round, whatever else is asked for.

    Attributes:
        phase: what it does.
        detail: progress while it loads, or why it failed.
        beat: when it last began a turn, by `time.monotonic`.
        served: the model; None while it loads.
        last_fault: the last round that failed or sample that was not finite.
    """

    def __init__(self, load: Callable[[], Served], *, slots: int, queue: int, metrics: Metrics):
        """A loop that has not started.

        Args:
            load: reads the model; called in the thread.
            slots: samples that run together.
            queue: samples and scores that wait.
            metrics: to keep.
        """
        self.phase, self.detail = Phase.LOADING, "not started"
        self.beat = time.monotonic()
        self.served: Served | None = None
        self.last_fault = ""
        self._load, self._slots, self._queue, self._metrics = load, slots, queue, metrics
        metrics.compile_seconds.set_function(lambda: clock.seconds)
        metrics.compiled_programs.set_function(lambda: clock.programs)
        metrics.running.set_function(lambda: self.counts()[0])
        metrics.waiting.set_function(lambda: self.counts()[1])
        self._wake = threading.Condition()
        # guarded by _wake
        self._inbox: list[Job] = []
        self._jobs: set[Job] = set()
        self._held = 0
        self._live: dict[int, tuple[GenerateJob, int]] = {}
        self._released = False
        # the thread's own
        self._engine: Engine | None = None
        self._numbers = itertools.count()
        self._waiting: collections.deque[tuple[GenerateJob, int]] = collections.deque()
        self._scores: collections.deque[ScoreJob] = collections.deque()
        self._scoring: ScoreJob | None = None
        self._text: Scoring | None = None
        self._score_next = False
        self._last_token: dict[int, float] = {}

    def start(self) -> None:
        """Starts the thread; the process may end while it runs."""
        threading.Thread(target=self._run, name="device", daemon=True).start()

    @property
    def held(self) -> int:
        """Samples and scores that were accepted and have not ended."""
        return self._held

    def counts(self) -> tuple[int, int]:
        """Samples in a slot, and samples and scores that wait, at one moment.

        Their sum is `held`: what was accepted is in one of them at once and until it has ended,
        also while the device does not come back from a step.
        """
        with self._wake:
            running = len(self._live)
            return running, self._held - running

    def progress(self, detail: str) -> None:
        """Says how far loading is, without a line in the log."""
        self.detail = detail

    def submit(self, job: Job) -> None:
        """Accepts a job.

        Raises:
            CallError: UNAVAILABLE while it does not serve, RESOURCE_EXHAUSTED if the queue is full.
        """
        with self._wake:
            if self.phase is not Phase.SERVING:
                raise unavailable(f"the server is {self.phase.value}: {self.detail}")
            if self._held + job.places > self._slots + self._queue:
                raise CallError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the queue is full: {self._held} requests run or wait, and there are "
                    f"{self._slots} slots and {self._queue} places to wait in",
                )
            self._held += job.places
            self._jobs.add(job)
            self._inbox.append(job)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Says that nobody waits for the job: what it holds is free at the next turn."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def drain(self, detail: str) -> None:
        """Accepts no more; what was accepted goes on."""
        with self._wake:
            if self.phase is not Phase.FAILED:
                self._become(Phase.DRAINING, detail)

    def release(self) -> None:
        """Ends a hold of `--test-faults`, the one there is or the next."""
        with self._wake:
            self._released = True
            self._wake.notify()

    def abandon(self, message: str) -> None:
        """Ends every job as UNAVAILABLE, without waiting for the thread."""
        with self._wake:
            for job in self._jobs:
                job.mailbox.put(unavailable(message))
                job.cancelled = True
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._say("reading the checkpoint")
            served = self._load()
            for note in served.notes:
                event("note", text=note)
            engine = new_engine(served)
            state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.state))
            self._metrics.state_bytes.set(state_bytes)
            self._metrics.parameter_bytes.set(served.parameter_bytes)
            warm_up(engine, served, self._say)
            self._engine, self.served = engine, served
            with self._wake:
                if self.phase is Phase.LOADING:
                    self._become(Phase.SERVING, "")
            while True:
                self._turn(served)
        except Exception as error:
            # before it serves, a wrong file or option is the usual reason: its message says which
            known = self.served is None and isinstance(error, ValueError | TypeError | MemoryError)
            event(f"failed: {error}", level=logging.ERROR, trace=not known)
            with self._wake:
                self._become(Phase.FAILED, f"{type(error).__name__}: {error}")
            self.abandon("the server has failed")

    def _become(self, phase: Phase, detail: str) -> None:
        # in this order: who sees the phase finds its reason
        self.detail = detail
        self.phase = phase

    def _say(self, detail: str) -> None:
        self.detail = detail
        event(detail)

    def _turn(self, served: Served) -> None:
        with self._wake:
            while not (self._inbox or self._held):
                self.beat = time.monotonic()
                self._wake.wait(_IDLE)
            came, self._inbox = self._inbox, []
        self.beat = time.monotonic()
        for job in came:
            if isinstance(job, GenerateJob):
                self._waiting.extend((job, sample) for sample in range(len(job.requests)))
            elif isinstance(job, ScoreJob):
                self._scores.append(job)
        self._drop_ended()
        failure = ""
        try:
            self._step(served)
        except Exception as error:
            event("a round failed", level=logging.ERROR, trace=True)
            failure = f"{type(error).__name__}: {error}"
        # not in the handler: the exception's frames hold the old state, and its memory
        if failure:
            self._recover(served, failure)

    def _step(self, served: Served) -> None:
        """Admits what there is room for; one step of everything that runs."""
        engine = self._engine
        assert engine is not None
        while self._waiting and engine.free:
            job, sample = self._waiting.popleft()
            number = next(self._numbers)
            # first, so that it ends with the others if it cannot be admitted
            with self._wake:
                self._live[number] = job, sample
            engine.admit(number, job.requests[sample])
            self._metrics.queue_time.observe(time.perf_counter() - job.accepted)
            self._metrics.prompt_tokens.inc(len(job.requests[sample].ids))
        self._do_faults(engine)
        feed = True
        if self._scoring or self._scores:
            # a chunk of a text or of a prompt, never both between two rounds
            feed = not (self._score_next or not engine.feeding)
            self._score_next = feed
        if not feed:
            self._score_step(served)
        counted = engine.rounds, engine.prefills
        # counted before they are delivered: who has an answer finds its rounds in the status
        for delta in engine.advance(feed=feed):
            counted = self._count_steps(engine, counted)
            self._deliver(delta)
        self._count_steps(engine, counted)

    def _count_steps(self, engine: Engine, counted: tuple[int, int]) -> tuple[int, int]:
        """Adds what the engine has dispatched since; returns how much that is in all."""
        self._metrics.rounds.inc(engine.rounds - counted[0])
        self._metrics.prefill_steps.inc(engine.prefills - counted[1])
        return engine.rounds, engine.prefills

    def _score_step(self, served: Served) -> None:
        if self._scoring is None:
            self._scoring = self._scores.popleft()
            self._text = new_scoring(served, self._scoring.ids, self._scoring.named)
            self._metrics.prompt_tokens.inc(len(self._scoring.ids))
        job, text = self._scoring, self._text
        assert text is not None
        text.wait()
        if not text.advance():
            (score,) = text.scores()
            self._end(job, score)

    def _deliver(self, delta: Delta) -> None:
        """Hands a burst to its job, and counts it."""
        assert self._engine is not None
        job, sample = self._live[delta.request]
        metrics, now, count = self._metrics, time.perf_counter(), len(delta.token_ids)
        metrics.generated_tokens.inc(count)
        last = self._last_token.get(delta.request)
        if last is None:
            # of logits that are not finite there is no token
            if count:
                metrics.first_token.observe(now - job.accepted)
        else:
            for _ in range(count):
                metrics.inter_token.observe((now - last) / count)
        self._last_token[delta.request] = now
        if delta.finish_reason is None:
            job.mailbox.put(Gain(sample, delta, None))
            return
        row = self._engine.finished.pop(delta.request)
        del self._last_token[delta.request]
        if row.rounds:
            metrics.tokens_per_round.observe((len(row.ids) - 1) / row.rounds)
        if delta.finish_reason == "error":
            metrics.non_finite.inc()
            self._note(f"sample {sample} of {job.request_id}: logits were not finite")
            self._free(job, [delta.request])
            self._end(job, internal(f"sample {sample}: logits were not finite"))
            return
        times = Times(
            queue=row.times["admitted"][0] - job.accepted,
            prefill=row.seconds("admitted", "first"),
            decode=row.seconds("first", "last"),
            rounds=row.rounds,
        )
        self._free(job, [delta.request])
        job.mailbox.put(Gain(sample, delta, times))

    def _drop_ended(self) -> None:
        """Ends jobs that nobody waits for and jobs whose deadline has passed."""
        with self._wake:
            jobs = tuple(self._jobs)
        for job in jobs:
            if job.cancelled:
                self._end(job)
            elif job.over:
                late = "the deadline passed before the answer was complete"
                self._end(job, CallError(grpc.StatusCode.DEADLINE_EXCEEDED, late))

    def _end(self, job: Job, last: Score | CallError | None = None) -> None:
        """Ends a job: its slots and places are free, and it gets its score or why it failed."""
        self._waiting = collections.deque(pair for pair in self._waiting if pair[0] is not job)
        self._scores = collections.deque(one for one in self._scores if one is not job)
        if self._scoring is job:
            self._scoring = self._text = None
        numbers = [n for n, (owner, _) in self._live.items() if owner is job]
        for number in numbers:
            self._last_token.pop(number, None)
            if self._engine is not None:
                self._engine.cancel(number)
                del self._engine.finished[number]
        self._free(job, numbers, waiting=job.places - len(numbers))
        if last is not None:
            job.mailbox.put(last)

    def _free(self, job: Job, numbers: Sequence[int], *, waiting: int = 0) -> None:
        """Gives back the slots of some samples and places that wait.

        Before the job is told that it ended: who has an answer finds its place free, and no
        trace of it in the status.
        """
        with self._wake:
            for number in numbers:
                del self._live[number]
            self._held -= len(numbers) + waiting
            job.places -= len(numbers) + waiting
            if not job.places:
                self._jobs.discard(job)
                # not yet looked at, and ended already
                self._inbox = [one for one in self._inbox if one is not job]

    def _recover(self, served: Served, failure: str) -> None:
        """After a failed step: ends what ran, and goes on with an empty state.

        The state was donated to the step, so nothing of it is left.

        Raises:
            Exception: the device cannot be used any more.
        """
        self._metrics.failed_rounds.inc()
        self._note(failure)
        # before the next one is made: there may be no room for two
        self._engine = None
        jobs: set[Job] = {job for job, _ in self._live.values()}
        if self._scoring is not None:
            jobs.add(self._scoring)
        for job in jobs:
            self._end(job, internal("the round of this request failed; the server goes on"))
        engine = new_engine(served)
        warm_up(engine, served, lambda detail: None)
        self._engine = engine

    def _do_faults(self, engine: Engine) -> None:
        for row in tuple(engine.running.values()):
            job, _ = self._live[row.number]
            if job.fault is not None and job.fault.is_due(len(row.ids)):
                fault, job.fault = job.fault, None
                fault.happen(engine, row.slot, self._hold)

    def _hold(self) -> None:
        """Holds still until it is released, or a job is over that is to be dropped."""
        with self._wake:
            while not (self._released or any(job.over for job in self._jobs)):
                self._wake.wait(0.01)
            self._released = False

    def _note(self, fault: str) -> None:
        self.last_fault = f"{time.strftime('%FT%TZ', time.gmtime())} {fault}"
