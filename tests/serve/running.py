"""Real servers in processes of their own, and what tests ask them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qwen4jax.serve.client import Client
from qwen4jax.serve.v1 import generation_pb2 as pb

ROOT = Path(__file__).parents[2]
# the smallest sizes that show everything; float32, in which alone and in company are the same bits
SIZES = "--dtype float32 --max-slots 4 --queue 4 --chunk 64 --max-context 2304".split()
# seconds that a server which is told to stop waits for what it has not ended: more than `PATIENCE`,
# so that one that holds a place too many is found without a limit that a busy machine could miss
GRACE = ["--grace", "1800"]
SERVICE = "qwen4jax.v1.Generation"
# a server compiles for a quarter of a minute on two free cores; with ten others it took over 300 s
PATIENCE = 600.0


class RunningServer:
    """`python -m qwen4jax.serve` on free ports."""

    def __init__(self, model: Path, cache: Path, *flags: str, xla_flags: str | None = None):
        given = ["--model", str(model), "--compilation-cache", str(cache), "--port", "0"]
        given += [*SIZES, *GRACE, "--test-faults", *flags]
        command = [sys.executable, "-m", "qwen4jax.serve", *given]
        # as many threads as users get: each of XLA's keeps memory of its own
        own = {name: value for name, value in os.environ.items() if name != "NPROC"}
        if xla_flags is not None:
            own["XLA_FLAGS"] = xla_flags
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=own
        )
        self.lines: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.noise.append(line)

    def wait_for(self, event: str) -> dict[str, Any]:
        """The first line of the log that begins with `event`."""
        return self.logged(lambda line: line["event"].startswith(event))

    def logged(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first such line of the log: it comes by a pipe, later than what it tells of."""

        def found() -> dict[str, Any] | None:
            # asked first: nothing is read after the end
            ended = not self._reader.is_alive()
            line = next(filter(wanted, self.lines.copy()), None)
            assert line or not ended, (self.lines[-3:], self.noise[-20:])
            return line

        return until(found)

    def ready(self) -> Self:
        self.wait_for("serving")
        return self

    @property
    def port(self) -> int:
        return self.wait_for("listening")["port"]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self, **arguments: Any) -> Client:
        return Client(self.target, **arguments)

    def status(self) -> pb.GetStatusResponse:
        with self.client() as client:
            return client.status(timeout=60)

    def idle(self) -> pb.GetStatusResponse:
        """The status once nothing runs or waits."""

        def found() -> pb.GetStatusResponse | None:
            status = self.status()
            return None if status.running or status.waiting else status

        return until(found)

    def release(self) -> None:
        """Ends the hold that a call has asked for."""
        with grpc.insecure_channel(self.target) as channel:
            status = channel.unary_unary(f"/{SERVICE}/GetStatus")
            status(b"", timeout=60, metadata=fault("release")["metadata"])

    def serves(self) -> None:
        """Returns once health says so: the watchdog may have seen a turn that took too long."""
        until(lambda: self.health() == self.health(SERVICE) == "SERVING")

    def health(self, service: str = "") -> str:
        with grpc.insecure_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def metrics(self) -> dict[str, float]:
        """Values by name with labels, as Prometheus writes them."""
        port = self.wait_for("listening")["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def own_bytes(self) -> int:
        """Memory that it has written to, wherever the system keeps it.

        Not what is resident: the system takes pages of files away and brings them back as it likes,
        hundreds of MB at a time.
        """
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        lines = (line.split() for line in text.splitlines())
        return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "VmSwap:"))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, timeout: float = PATIENCE) -> int:
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def fault(kind: str) -> dict[str, Any]:
    """Arguments of a call that asks for a fault of `serve/faults.py`."""
    return {"metadata": [("x-test-fault", kind)]}


def until[T](look: Callable[[], T | None], patience: float = PATIENCE) -> T:
    """What `look` finds, as soon as it finds something."""
    end = time.monotonic() + patience
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, f"waited {patience} s for {look.__qualname__}"
        time.sleep(0.02)


@contextlib.contextmanager
def in_background(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs calls in threads; the list has their results, or what they raised, after the block."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        # whatever it is, the test looks at it
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
