"""What every call has: a request id, a deadline, one status in the end, a line in the log."""

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from qwen4jax.serve.errors import CallError
from qwen4jax.serve.faults import METADATA, Fault, parse_fault
from qwen4jax.serve.logs import event
from qwen4jax.serve.metrics import Metrics

REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
# a status travels in a header, which has room for some kilobytes
_MOST_DETAILS = 1000


@dataclasses.dataclass(frozen=True)
class Call:
    """A call in progress.

    Attributes:
        request_id: the client's, or one made up.
        deadline: by `time.monotonic`; None without one.
        fault: that the call asks for; in tests only.
    """

    request_id: str
    deadline: float | None
    fault: Fault | None


class Calls:
    """All calls of a server.

    Attributes:
        active: calls in progress.
    """

    def __init__(self, metrics: Metrics, *, test_faults: bool):
        """No calls yet.

        Args:
            metrics: to keep.
            test_faults: whether metadata may ask for faults.
        """
        self.active = 0
        self._metrics, self._test_faults = metrics, test_faults

    @contextlib.asynccontextmanager
    async def call(
        self, method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Call]:
        """A call from its first moment to its status; what is raised inside becomes the status."""
        metadata = {str(k): v for k, v in context.invocation_metadata() or ()}
        request_id = metadata.get(REQUEST_ID)
        if not isinstance(request_id, str) or not _USABLE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        began, left = time.monotonic(), context.time_remaining()
        deadline = None if left is None else began + left
        code, details = grpc.StatusCode.OK, ""
        context.set_trailing_metadata(((REQUEST_ID, request_id),))
        self.active += 1
        try:
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
            yield Call(request_id, deadline, self._fault(metadata))
        except CallError as error:
            code, details = error.code, error.message
        except asyncio.CancelledError:
            late = deadline is not None and time.monotonic() >= deadline
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception:
            event("a call failed", level=logging.ERROR, trace=True, request_id=request_id)
            code = grpc.StatusCode.INTERNAL
            details = f"internal error; the server's log has it under request id {request_id}"
        finally:
            self.active -= 1
            self._metrics.requests.labels(method, code.name).inc()
            fields: dict[str, Any] = dict(method=method, request_id=request_id, code=code.name)
            fields |= {"details": details} if details else {}
            event("call", **fields, seconds=round(time.monotonic() - began, 4))
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details[:_MOST_DETAILS])

    def _fault(self, metadata: Mapping[str, Any]) -> Fault | None:
        asked = metadata.get(METADATA) if self._test_faults else None
        return None if asked is None else parse_fault(str(asked))
