"""The soak, in short; `make soak` has 2,000 calls."""

from collections.abc import Callable

from tests.serve.running import RunningServer
from tests.serve.soak import FLAGS, soak


def test_a_hundred_calls_from_sixteen_clients(start: Callable[..., RunningServer]):
    """SPC-22 too: answers equal those alone, nothing is lost, drafts go on being accepted."""
    with start(*FLAGS) as server:
        figures = soak(server.ready(), count=100, clients=16, distinct=16, mean_output=12)
        assert figures["codes"]["OK"] > 40
        server.signal()
        assert server.exit_code() == 0
