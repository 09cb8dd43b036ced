"""What a client is told when a call fails: a status and a sentence, never a trace."""

import grpc


class CallError(Exception):
    """A call ends with a status.

    Attributes:
        code: gRPC status.
        message: for the client; names the field and index where one is wrong.
    """

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code, self.message = code, message


def invalid(message: str) -> CallError:
    """INVALID_ARGUMENT; the message begins with the field's path."""
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, message)


def unavailable(message: str) -> CallError:
    """UNAVAILABLE: another server, or this one later, may answer."""
    return CallError(grpc.StatusCode.UNAVAILABLE, message)


def internal(message: str) -> CallError:
    """INTERNAL: not the client's fault."""
    return CallError(grpc.StatusCode.INTERNAL, message)
