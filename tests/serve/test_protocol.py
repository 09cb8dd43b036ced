"""The protocol: generated code is that of the file, and standard tools find their way."""

import importlib.resources
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import EnumDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_tools import protoc

from qwen4jax.serve.v1 import generation_pb2 as pb
from tests.serve.running import ROOT, SERVICE, RunningServer

PROTO = "qwen4jax/serve/v1/generation.proto"


def test_generated_code_is_that_of_the_file(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(ROOT)
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    standard = importlib.resources.files("grpc_tools") / "_proto"
    assert protoc.main([sys.executable, "-I.", f"-I{standard}", *outputs, PROTO]) == 0
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(made) == 3
    for path in made:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), path


def test_enums_begin_with_unspecified():
    enums = list(pb.DESCRIPTOR.enum_types_by_name.values())
    assert len(enums) == 2
    for enum in enums:
        assert isinstance(enum, EnumDescriptor)
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_optional_scalars_know_zero_from_unset():
    zero = pb.Sampling.FromString(pb.Sampling(temperature=0.0).SerializeToString())
    assert zero.HasField("temperature")
    assert not pb.Sampling().HasField("temperature")
    scalars = [f for f in pb.Sampling.DESCRIPTOR.fields if not f.is_repeated]
    assert all(field.has_presence for field in scalars)


def asked(server: RunningServer, **request: Any) -> Any:
    with grpc.insecure_channel(server.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=60
        )
        return next(iter(call))


def test_reflection_tells_the_protocol(server: RunningServer):
    """What grpcurl asks first: the services, then the file of one, with all it imports."""
    services = asked(server, list_services="").list_services_response.service
    assert {one.name for one in services} == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    answer = asked(server, file_containing_symbol=SERVICE)
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(raw)
        for raw in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert PROTO in {file.name for file in files}
    assert {name for file in files for name in file.dependency} <= {file.name for file in files}


def test_request_ids_are_echoed(server: RunningServer):
    """The client's where it is usable, else one of the server's; with answers and with errors."""
    with grpc.insecure_channel(server.target) as channel:
        status = channel.unary_unary(f"/{SERVICE}/GetStatus")
        for given, kept in (("my-id/7", True), ("a b", False), ("x" * 200, False), (None, False)):
            metadata = () if given is None else (("x-request-id", given),)
            _, call = status.with_call(b"", timeout=60, metadata=metadata)
            (first,) = (v for k, v in call.initial_metadata() if k == "x-request-id")
            (last,) = (v for k, v in call.trailing_metadata() if k == "x-request-id")
            assert first == last
            assert (first == given) == kept
            assert len(first) == 32 or kept
