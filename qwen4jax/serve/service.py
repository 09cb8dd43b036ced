"""The four methods of `qwen4jax.v1.Generation`."""

import asyncio
import time
from typing import Any

import grpc

from qwen4jax.decode.compiling import clock
from qwen4jax.decode.score import Score
from qwen4jax.serve import messages, validation
from qwen4jax.serve.calls import Calls
from qwen4jax.serve.engine import DeviceLoop, Phase
from qwen4jax.serve.errors import CallError, unavailable
from qwen4jax.serve.faults import RELEASE
from qwen4jax.serve.jobs import Gain, GenerateJob, ScoreJob
from qwen4jax.serve.metrics import Metrics
from qwen4jax.serve.model import Served, seeds_from
from qwen4jax.serve.options import Options
from qwen4jax.serve.parsing import parse
from qwen4jax.serve.v1 import generation_pb2 as pb

NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name
_Context = grpc.aio.ServicerContext[Any, Any]
_STATES = {
    Phase.LOADING: pb.STATE_LOADING,
    Phase.SERVING: pb.STATE_SERVING,
    Phase.DRAINING: pb.STATE_DRAINING,
    Phase.FAILED: pb.STATE_FAILED,
}


class Service:
    """Answers calls; requests come as bytes, so that those that are no message get an answer."""

    def __init__(self, options: Options, device: DeviceLoop, calls: Calls, metrics: Metrics):
        """A service in front of a device that may still load."""
        self._options, self._device, self._calls, self._metrics = options, device, calls, metrics
        self._seeds = seeds_from(options.seed)
        self._began = time.monotonic()

    def handler(self) -> grpc.GenericRpcHandler:
        """The methods as gRPC takes them."""
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate, response_serializer=pb.GenerateChunk.SerializeToString
                ),
                "Score": grpc.unary_unary_rpc_method_handler(
                    self.score, response_serializer=pb.ScoreResponse.SerializeToString
                ),
                "GetModel": grpc.unary_unary_rpc_method_handler(
                    self.get_model, response_serializer=pb.GetModelResponse.SerializeToString
                ),
                "GetStatus": grpc.unary_unary_rpc_method_handler(
                    self.get_status, response_serializer=pb.GetStatusResponse.SerializeToString
                ),
            },
        )

    async def generate(self, raw: bytes, context: _Context) -> None:
        """Continues a prompt, chunk by chunk."""
        async with self._calls.call("Generate", context) as call:
            served, options = self._served(), self._options
            request = parse(pb.GenerateRequest, raw)
            # long texts take a while to be cut into tokens
            asked = await asyncio.to_thread(
                validation.generation,
                request,
                served,
                most_samples=options.max_slots + options.queue,
                seed=self._seeds.getrandbits(64),
            )
            job = GenerateJob(
                call.request_id, asked.requests, deadline=call.deadline, fault=call.fault
            )
            self._device.submit(job)
            try:
                answer = messages.Answer(asked)
                while answer.left:
                    items = await job.mailbox.take()
                    gains = [item for item in items if isinstance(item, Gain)]
                    for chunk in answer.chunks(gains):
                        await context.write(chunk)
                    _raise_first(items)
            finally:
                self._device.cancel(job)

    async def score(self, raw: bytes, context: _Context) -> pb.ScoreResponse:
        """Log-probabilities of a text."""
        async with self._calls.call("Score", context) as call:
            served = self._served()
            asked = await asyncio.to_thread(validation.scored, parse(pb.ScoreRequest, raw), served)
            job = ScoreJob(
                call.request_id, asked.ids, asked.named, deadline=call.deadline, fault=call.fault
            )
            self._device.submit(job)
            try:
                items = await job.mailbox.take()
                _raise_first(items)
                (score,) = (item for item in items if isinstance(item, Score))
                return messages.score_message(score, asked)
            finally:
                self._device.cancel(job)
        raise AssertionError("a call that does not return is aborted")

    async def get_model(self, raw: bytes, context: _Context) -> pb.GetModelResponse:
        """What is served."""
        async with self._calls.call("GetModel", context):
            parse(pb.GetModelRequest, raw)
            return messages.model_message(self._served())
        raise AssertionError("a call that does not return is aborted")

    async def get_status(self, raw: bytes, context: _Context) -> pb.GetStatusResponse:
        """What the server does."""
        async with self._calls.call("GetStatus", context) as call:
            parse(pb.GetStatusRequest, raw)
            if call.fault is not None and call.fault.kind == RELEASE:
                self._device.release()
            return self._status()
        raise AssertionError("a call that does not return is aborted")

    def _served(self) -> Served:
        served, device = self._device.served, self._device
        if served is None or device.phase is not Phase.SERVING:
            raise unavailable(f"the server is {device.phase.value}: {device.detail}")
        return served

    def _status(self) -> pb.GetStatusResponse:
        device, served = self._device, self._device.served
        value = self._metrics.value
        # together, or a sample on its way into a slot would be in neither
        running, waiting = device.counts()
        return pb.GetStatusResponse(
            state=_STATES[device.phase],
            detail=device.detail,
            uptime_seconds=time.monotonic() - self._began,
            slots=self._options.max_slots,
            queue=self._options.queue,
            running=running,
            waiting=waiting,
            rounds=int(value("rounds_total")),
            prefill_steps=int(value("prefill_steps_total")),
            prompt_tokens=int(value("prompt_tokens_total")),
            generated_tokens=int(value("generated_tokens_total")),
            drafting=served is not None and served.sizes.drafts > 0,
            drafting_off_reason="" if served is None else served.drafting_off_reason,
            failed_rounds=int(value("failed_rounds_total")),
            non_finite_samples=int(value("non_finite_samples_total")),
            last_fault=device.last_fault,
            compiled_programs=clock.programs,
            compile_seconds=clock.seconds,
            state_bytes=int(value("state_bytes")),
        )


def _raise_first(items: list[Gain | Score | CallError]) -> None:
    for item in items:
        if isinstance(item, CallError):
            raise item
