"""The README's lines about the server do what they say, against a server."""

import json
import re
import shlex
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.serve.running import ROOT, RunningServer

README = (ROOT / "README.md").read_text()
HERE = "127.0.0.1:50051"


def test_client_lines_run(server: RunningServer, capsys: pytest.CaptureFixture[str]):
    section = README.partition("\n## Serve\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(code.replace(HERE, server.target), {})
    first = capsys.readouterr().out.splitlines()[0]
    assert re.match(r"\[\d+(, \d+)*\] (stop|length) ", first)


class Grpcurl:
    """Does what grpcurl does: asks the server for the protocol, and knows nothing else of it."""

    def __init__(self, channel: grpc.Channel):
        self._channel, self._pool = channel, descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def learn(self, symbol: str) -> None:
        """Adds the files that declare a symbol, in the order in which they need each other."""
        stub = reflection_pb2_grpc.ServerReflectionStub(self._channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=60)
        files = {
            file.name: file
            for raw in answer.file_descriptor_response.file_descriptor_proto
            for file in [descriptor_pb2.FileDescriptorProto.FromString(raw)]
        }

        def add(name: str) -> None:
            if name not in self._known:
                self._known.add(name)
                for needed in files[name].dependency:
                    add(needed)
                self._pool.Add(files[name])  # pyright: ignore[reportAttributeAccessIssue]

        for name in files:
            add(name)

    def call(self, path: str, data: str) -> list[dict[str, Any]]:
        service, method = path.split("/")
        self.learn(service)
        found = self._pool.FindServiceByName(service).methods_by_name[method]
        request = message_factory.GetMessageClass(found.input_type)()
        json_format.Parse(data, request)
        answer = message_factory.GetMessageClass(found.output_type)
        send = self._channel.unary_stream(
            f"/{path}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return [json_format.MessageToDict(one) for one in send(request, timeout=60)]

    def describe(self, symbol: str) -> list[str]:
        self.learn(symbol)
        return [field.name for field in self._pool.FindMessageTypeByName(symbol).fields]


def lines() -> list[list[str]]:
    text = README.replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("grpcurl ")]


def test_grpcurl_lines_work_by_reflection(server: RunningServer):
    assert len(lines()) == 5
    done: dict[str, Any] = {}
    with grpc.insecure_channel(server.target) as channel:
        for line in lines():
            tool = Grpcurl(channel)
            data = line[line.index("-d") + 1] if "-d" in line else "{}"
            assert json.loads(data) is not None
            assert HERE in line
            if "describe" in line:
                assert "sampling" in tool.describe(line[-1])
            else:
                done[line[-1]] = tool.call(line[-1], data)
    chunks = done["qwen4jax.v1.Generation/Generate"]
    assert chunks[-1]["finish"]["usage"]["completionTokens"] <= 16
    (score,) = done["qwen4jax.v1.Generation/Score"]
    assert len(score["logprobs"]) == 2
    assert all(len(row["tokens"]) == 2 for row in score["topLogprobs"])
    (status,) = done["qwen4jax.v1.Generation/GetStatus"]
    assert status["state"] == "STATE_SERVING"
    # red for a moment where a turn of the calls above took over two seconds
    (health,) = done["grpc.health.v1.Health/Check"]
    assert health in ({"status": "SERVING"}, {"status": "NOT_SERVING"})
    server.serves()
