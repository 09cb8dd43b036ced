"""The server: a socket that answers from the first moment, and an orderly end."""

import asyncio
import contextlib
import logging
import signal
import time

import grpc
import jax
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from qwen4jax.serve.calls import Calls
from qwen4jax.serve.engine import DeviceLoop, Phase
from qwen4jax.serve.logs import event, set_up
from qwen4jax.serve.metrics import Metrics
from qwen4jax.serve.model import load_served
from qwen4jax.serve.options import Options, OptionsError
from qwen4jax.serve.security import TokenCheck, credentials, tokens_of
from qwen4jax.serve.service import NAME, Service

# seconds between two looks at the device's thread
_LOOK = 0.1
# most seconds that answers already written get to reach their clients; it goes once they have
_FLUSH = 3.0
_HEALTH = health_pb2.HealthCheckResponse


def run(options: Options) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    0 after an orderly end, 1 if it failed while serving, 2 if it could not begin.
    """
    set_up(options.log_level, options.log_format)
    if options.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.compilation_cache))
        # small programs too: a server has few, and waits for all of them
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    try:
        return asyncio.run(Server(options).serve())
    except OptionsError as error:
        event(str(error), level=logging.ERROR)
        return 2


class Server:
    """One model behind one socket."""

    def __init__(self, options: Options):
        """A server that does not listen yet."""
        self._options = options
        self._metrics = Metrics()
        self._device = DeviceLoop(
            lambda: load_served(
                options,
                lambda done, total: self._device.progress(f"read {done / max(total, 1):.0%}"),
            ),
            slots=options.max_slots,
            queue=options.queue,
            metrics=self._metrics,
        )
        self._calls = Calls(self._metrics, test_faults=options.test_faults)
        self._health = HealthServicer()
        self._signals = 0
        self._signalled = asyncio.Event()

    async def serve(self) -> int:
        """Serves to the end; the exit code is that of `run`.

        Raises:
            OptionsError: an address, a port or a file cannot be used.
        """
        server, port, metrics_port = self._listen()
        await self._set_health(_HEALTH.NOT_SERVING)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        await server.start()
        # not before it answers, and before a signal is an orderly end
        event("listening", host=self._options.host, port=port, metrics_port=metrics_port)
        self._device.start()
        await self._watch()
        await self._stop(server)
        if self._device.phase is not Phase.FAILED:
            return 0
        return 2 if self._device.served is None else 1

    def _listen(self) -> tuple[grpc.aio.Server, int, int | None]:
        """A server that has not started, its port, and that of its metrics."""
        options, tokens = self._options, tokens_of(self._options.token_file)
        server = grpc.aio.server(
            interceptors=[TokenCheck(tokens, self._metrics)] if tokens else [],
            options=_channel_options(options),
        )
        service = Service(options, self._device, self._calls, self._metrics)
        server.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if options.reflection:
            names = (NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        host = f"[{options.host}]" if ":" in options.host.strip("[]") else options.host
        address, secrets = f"{host}:{options.port}", credentials(options)
        try:
            if secrets is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, secrets)
        except RuntimeError:
            why = "is it taken?" if secrets is None else "is it taken, or a PEM file wrong?"
            raise OptionsError(f"--port: cannot listen on {address}; {why}") from None
        metrics_port = options.metrics_port
        if metrics_port is not None:
            try:
                metrics_port = self._metrics.listen(options.host, metrics_port)
            except OSError as error:
                raise OptionsError(f"--metrics-port: {metrics_port}: {error.strerror}") from None
        return server, port, metrics_port

    def _on_signal(self) -> None:
        self._signals += 1
        event("told to stop", signals=self._signals)
        self._signalled.set()

    async def _watch(self) -> None:
        """Keeps health true to the device's thread until a signal or its failure."""
        healthy = False
        while not self._signals and self._device.phase is not Phase.FAILED:
            silent = time.monotonic() - self._device.beat
            stalled = silent > self._options.watchdog
            now = self._device.phase is Phase.SERVING and not stalled
            if now != healthy:
                healthy = now
                await self._set_health(_HEALTH.SERVING if now else _HEALTH.NOT_SERVING)
                if now:
                    event("serving")
                else:
                    event("no round", level=logging.ERROR, seconds=round(silent, 1))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signalled.wait(), _LOOK)

    async def _stop(self, server: grpc.aio.Server) -> None:
        """Lets accepted calls end, as long as the grace lasts and no second signal comes."""
        self._device.drain("it was told to stop")
        await self._health.enter_graceful_shutdown()
        end = time.monotonic() + self._options.grace
        while (
            (self._device.held or self._calls.active)
            and self._signals < 2
            and self._device.phase is not Phase.FAILED
            and time.monotonic() < end
        ):
            await asyncio.sleep(_LOOK / 2)
        self._device.abandon("the server stops")
        # the last of an answer may still be on its way
        await server.stop(_FLUSH)
        event("stopped", unfinished=self._device.held)

    async def _set_health(self, status: "_HEALTH.ServingStatus") -> None:
        for name in ("", NAME):
            await self._health.set(name, status)


def _channel_options(options: Options) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", int(options.max_message_mb * 2**20)),
        ("grpc.max_send_message_length", -1),
        # a port is one server's, not shared with another that has it already
        ("grpc.so_reuseport", 0),
        # a client that is gone without a word is found
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # a client may ask as often, also while a long call has no data
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(options.ping_interval * 1000)),
        # on a busy machine pings are looked at late and together: that alone is no abuse
        ("grpc.http2.max_ping_strikes", 100),
    ]
