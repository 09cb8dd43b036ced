"""One server for most tests of a process; compiled programs are shared by all of a run."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen4jax.serve.client import Client
from qwen4jax.serve.options import EMBEDDED
from tests.serve.running import RunningServer


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all processes of this run."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "serve"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def model() -> Path:
    """The served checkpoint."""
    return EMBEDDED


@pytest.fixture(scope="session")
def start(model: Path, shared: Path) -> Callable[..., RunningServer]:
    """Starts a server with flags of its own.

    What it compiles once for all servers of the run, it runs often: loops are optimised.
    """
    optimised = "--xla_backend_optimization_level=1"

    def started(*flags: str, model: Path = model) -> RunningServer:
        return RunningServer(model, shared / "programs", *flags, xla_flags=optimised)

    return started


@pytest.fixture(scope="session")
def server(start: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """A server that serves; every test leaves it idle."""
    with start(*"--metrics-port 0 --ping-interval 0.05 --watchdog 2".split()) as running:
        yield running.ready()
        # SRV-05: whatever it went through, it ends, and waits for nobody
        running.signal()
        assert running.exit_code() == 0


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    """A client of an idle server."""
    with server.client() as one:
        yield one
    # what a test has dropped holds no place when the next one wants all
    server.idle()


@pytest.fixture(scope="session")
def vocabulary(server: RunningServer) -> int:
    with server.client() as client:
        return client.model().vocab_size


@pytest.fixture(scope="session")
def ids(vocabulary: int) -> Callable[..., list[int]]:
    """Random ids of a length, the same in every run."""

    def made(length: int, seed: int = 0) -> list[int]:
        chance = random.Random(1000 * length + seed)
        return [chance.randrange(vocabulary) for _ in range(length)]

    return made
