"""A client for `python -m qwen4jax.serve`, for programs and for the command line.

    from qwen4jax.serve.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_new_tokens=32, temperature=0).text)
        for chunk in client.stream([{"role": "user", "content": "Hello"}], seed=1):
            print(chunk.text, end="")

`AsyncClient` has the same methods as coroutines. `python -m qwen4jax.serve.client "prompt"` streams
an answer. It imports gRPC, and neither JAX nor the model.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import grpc

from qwen4jax.serve.client_values import (
    REQUEST_ID,
    Answer,
    Chunk,
    Finish,
    Prompt,
    SamplingOptions,
    Scored,
    ServerError,
    chunk_of,
    error_of,
    generate_request,
    joined,
    score_request,
    scored_of,
)
from qwen4jax.serve.v1 import generation_pb2 as pb
from qwen4jax.serve.v1 import generation_pb2_grpc as pb_grpc

__all__ = [
    "Answer",
    "AsyncClient",
    "Chunk",
    "Client",
    "Finish",
    "SamplingOptions",
    "Scored",
    "ServerError",
]

_UNLIMITED = ("grpc.max_receive_message_length", -1)


class _Connection:
    """What both clients need to reach a server."""

    def __init__(
        self,
        target: str,
        token: str | None,
        tls_ca: str | Path | None,
        tls_cert: str | Path | None,
        tls_key: str | Path | None,
        options: Sequence[tuple[str, Any]],
    ):
        self.target, self.token = target, token
        self.options = [_UNLIMITED, *options]
        self.secrets = None
        if tls_ca is not None:
            authority, cert, key = (
                None if file is None else Path(file).read_bytes()
                for file in (tls_ca, tls_cert, tls_key)
            )
            self.secrets = grpc.ssl_channel_credentials(authority, key, cert)

    def metadata(
        self, request_id: str | None, more: Sequence[tuple[str, str]] = ()
    ) -> tuple[tuple[str, str], ...]:
        token = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        own = () if request_id is None else ((REQUEST_ID, request_id),)
        return (*token, *own, *more)


class Client:
    """A connection to a server; threads may share it.

    All calls raise `ServerError` for a status other than OK. `timeout` is the call's deadline in
    seconds, None is none; `request_id` is what the server logs the call under; `metadata` is sent
    as it is.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ):
        """Connects when it is first used.

        Args:
            target: host and port.
            token: where the server asks for one.
            tls_ca: PEM file of the authority of the server's certificate; None is no TLS.
            tls_cert: PEM file of the client's own certificate.
            tls_key: PEM file of its private key.
            options: of the gRPC channel.
        """
        self._connection = c = _Connection(target, token, tls_ca, tls_cert, tls_key, options)
        self.channel = (
            grpc.insecure_channel(target, c.options)
            if c.secrets is None
            else grpc.secure_channel(target, c.secrets, c.options)
        )
        self._stub: Any = pb_grpc.GenerationStub(self.channel)

    def stream(
        self,
        prompt: Prompt,
        *,
        logprobs: bool = False,
        top_logprobs: int = 0,
        template_arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """Continues a prompt, chunk by chunk; closing the iterator cancels the call.

        Args:
            prompt: text, token ids, or chat messages (mappings of role and content).
            logprobs: whether chunks have the log-probability of each id.
            top_logprobs: alternatives to each id.
            template_arguments: what the chat template reads besides the messages.
            timeout: of the class.
            request_id: of the class.
            metadata: of the class.
            **options: of sampling.
        """
        request = generate_request(
            prompt,
            options,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            template_arguments=template_arguments,
        )
        sent = self._connection.metadata(request_id, metadata)
        call = self._stub.Generate(request, timeout=timeout, metadata=sent)
        try:
            with _errors():
                for message in call:
                    yield chunk_of(message)
        finally:
            call.cancel()

    def samples(self, prompt: Prompt, **arguments: Any) -> list[Answer]:
        """The `n` complete samples of a prompt; arguments as `stream`."""
        return joined(self.stream(prompt, **arguments))

    def generate(self, prompt: Prompt, **arguments: Any) -> Answer:
        """The complete answer to a prompt; arguments as `stream`, with `n` left at 1."""
        (answer,) = self.samples(prompt, **arguments)
        return answer

    def score(
        self,
        prompt: Prompt,
        *,
        named_token_ids: Sequence[int] = (),
        top_logprobs: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Scored:
        """Log-probabilities of a text.

        Args:
            prompt: as `stream`.
            named_token_ids: ids whose log-probability is wanted in every place.
            top_logprobs: alternatives in every place.
            timeout: of the class.
            request_id: of the class.
            metadata: of the class.
        """
        request = score_request(prompt, named_token_ids=named_token_ids, top_logprobs=top_logprobs)
        sent = self._connection.metadata(request_id, metadata)
        with _errors():
            return scored_of(self._stub.Score(request, timeout=timeout, metadata=sent))

    def model(self, *, timeout: float | None = None) -> pb.GetModelResponse:
        """What is served."""
        with _errors():
            sent = self._connection.metadata(None)
            return self._stub.GetModel(pb.GetModelRequest(), timeout=timeout, metadata=sent)

    def status(self, *, timeout: float | None = None) -> pb.GetStatusResponse:
        """What the server does."""
        with _errors():
            sent = self._connection.metadata(None)
            return self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout, metadata=sent)

    def close(self) -> None:
        """Closes the connection; calls in progress are cancelled."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class AsyncClient:
    """As `Client`, for an event loop."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ):
        """As `Client`."""
        self._connection = c = _Connection(target, token, tls_ca, tls_cert, tls_key, options)
        self.channel = (
            grpc.aio.insecure_channel(target, c.options)
            if c.secrets is None
            else grpc.aio.secure_channel(target, c.secrets, c.options)
        )
        self._stub: Any = pb_grpc.GenerationStub(self.channel)

    async def stream(
        self,
        prompt: Prompt,
        *,
        logprobs: bool = False,
        top_logprobs: int = 0,
        template_arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        **options: Unpack[SamplingOptions],
    ) -> AsyncIterator[Chunk]:
        """As `Client.stream`."""
        request = generate_request(
            prompt,
            options,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            template_arguments=template_arguments,
        )
        sent = self._connection.metadata(request_id, metadata)
        call = self._stub.Generate(request, timeout=timeout, metadata=sent)
        try:
            with _errors():
                async for message in call:
                    yield chunk_of(message)
        finally:
            call.cancel()

    async def samples(self, prompt: Prompt, **arguments: Any) -> list[Answer]:
        """As `Client.samples`."""
        return joined([chunk async for chunk in self.stream(prompt, **arguments)])

    async def generate(self, prompt: Prompt, **arguments: Any) -> Answer:
        """As `Client.generate`."""
        (answer,) = await self.samples(prompt, **arguments)
        return answer

    async def score(
        self,
        prompt: Prompt,
        *,
        named_token_ids: Sequence[int] = (),
        top_logprobs: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Scored:
        """As `Client.score`."""
        request = score_request(prompt, named_token_ids=named_token_ids, top_logprobs=top_logprobs)
        sent = self._connection.metadata(request_id, metadata)
        with _errors():
            return scored_of(await self._stub.Score(request, timeout=timeout, metadata=sent))

    async def model(self, *, timeout: float | None = None) -> pb.GetModelResponse:
        """What is served."""
        with _errors():
            sent = self._connection.metadata(None)
            return await self._stub.GetModel(pb.GetModelRequest(), timeout=timeout, metadata=sent)

    async def status(self, *, timeout: float | None = None) -> pb.GetStatusResponse:
        """What the server does."""
        with _errors():
            sent = self._connection.metadata(None)
            return await self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout, metadata=sent)

    async def close(self) -> None:
        """As `Client.close`."""
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self.close()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error) from None


if __name__ == "__main__":
    import sys

    from qwen4jax.serve.client_command import main

    sys.exit(main())
