"""Messages from bytes, so that what is wrong with them is an answer and not a broken call."""

from collections import Counter
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from qwen4jax.serve.errors import invalid


def parse[M: Message](kind: type[M], raw: bytes) -> M:
    """The message of type `kind` that `raw` is.

    Raises:
        CallError: it is none; a string that is not UTF-8 is named by its path.
    """
    try:
        return kind.FromString(raw)
    except DecodeError:
        descriptor: Any = kind.DESCRIPTOR
        path = _not_utf8(raw, descriptor)
    if path is not None:
        raise invalid(f"{path}: is not UTF-8")
    raise invalid(f"the request's bytes are no {kind.DESCRIPTOR.full_name}")


def _not_utf8(raw: bytes, kind: Descriptor) -> str | None:
    """The path of the first string in `raw` that is not UTF-8, None if there is none."""
    try:
        # whatever the fields are, an empty message keeps them as they came
        found = UnknownFieldSet(Empty.FromString(raw))
    except DecodeError:
        return None
    seen: Counter[int] = Counter()
    for item in found:
        field = kind.fields_by_number.get(item.field_number)
        if field is None or not isinstance(item.data, bytes):
            continue
        index = seen[field.number]
        seen[field.number] += 1
        name = f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.type == Field.TYPE_STRING:
            try:
                item.data.decode()
            except UnicodeDecodeError as error:
                return f"{name}: byte {error.start}"
        elif field.message_type is not None:
            below = _not_utf8(item.data, field.message_type)
            if below is not None:
                return f"{name}.{below}"
    return None
