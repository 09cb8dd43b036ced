"""Who may call: TLS with or without client certificates, and bearer tokens."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from qwen4jax.serve.metrics import Metrics
from qwen4jax.serve.options import Options, OptionsError

_OPEN = "/grpc.health.v1.Health/"
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


def credentials(options: Options) -> grpc.ServerCredentials | None:
    """What the options' files say; None for a connection that is not encrypted.

    Raises:
        OptionsError: a file cannot be used.
    """
    if options.tls_cert is None or options.tls_key is None:
        return None
    authorities = options.tls_client_ca and _bytes_of("--tls-client-ca", options.tls_client_ca)
    return grpc.ssl_server_credentials(
        [(_bytes_of("--tls-key", options.tls_key), _bytes_of("--tls-cert", options.tls_cert))],
        root_certificates=authorities,
        require_client_auth=authorities is not None,
    )


def tokens_of(file: Path | None) -> tuple[bytes, ...]:
    """The tokens of a file, one a line; none without a file.

    Raises:
        OptionsError: there is no token in it.
    """
    if file is None:
        return ()
    tokens = tuple(line.strip() for line in file.read_bytes().splitlines() if line.strip())
    if not tokens:
        raise OptionsError(f"--token-file: there is no token in {file}")
    return tokens


class TokenCheck(grpc.aio.ServerInterceptor):
    """Lets only calls with a known token through; health is for all, orchestrators have none."""

    def __init__(self, tokens: Sequence[bytes], metrics: Metrics):
        """A check for some tokens, at least one."""
        self._tokens, self._metrics = tokens, metrics

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, or one that refuses."""
        details: Any = handler_call_details
        if details.method.startswith(_OPEN) or self._known(details.invocation_metadata):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(self._refuse(details.method))

    def _known(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        given = next((value for key, value in metadata if key == "authorization"), "")
        given = given.encode() if isinstance(given, str) else given
        # all are compared, each in constant time: a duration tells nothing
        same = [hmac.compare_digest(given, b"Bearer " + token) for token in self._tokens]
        return any(same)

    def _refuse(self, method: str) -> Any:
        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            code = grpc.StatusCode.UNAUTHENTICATED
            self._metrics.requests.labels(method.rpartition("/")[2], code.name).inc()
            await context.abort(code, "metadata authorization: no known bearer token")

        return refuse


def _bytes_of(flag: str, file: Path) -> bytes:
    text = file.read_bytes()
    if b"-----BEGIN" not in text:
        raise OptionsError(f"{flag}: {file} is no PEM file")
    return text
