"""etcd's messages and methods, made from the description that etcd3 carries; nothing of etcd3 is run.

Each of its generated files holds a serialized description of one `.proto` file, as one literal. protobuf makes classes
of it. To import the files instead would load etcd3's whole client, and would force protobuf's pure Python
implementation on this process, for code of that age loads under no other: more time at the start, and many times more
for each message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_FILES = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")
"""Each after those that it refers to."""
_DESCRIPTION = re.compile(r"^  serialized_pb=_b\(('.*')\)", re.MULTILINE)
_SERVICES = "etcdserverpb"


def description(generated: str) -> bytes:
    """Return the serialized description in the text of a generated file. Raises `ImportError`."""
    found = _DESCRIPTION.search(generated)
    if found is None:
        raise ImportError("etcd3 does not describe etcd's messages as its release 0.12.0 does: install that one")
    text: str = ast.literal_eval(found[1])
    return text.encode("latin-1")


def _describe() -> DescriptorPool:
    spec = find_spec("etcd3")  # finds it, and does not import it
    if spec is None or spec.origin is None:
        raise ImportError("etcd3 is not installed: it describes etcd's messages")
    pool = DescriptorPool()
    for name in _FILES:
        generated = (Path(spec.origin).parent / "etcdrpc" / name).read_text(encoding="utf-8")
        pool.AddSerializedFile(description(generated))
    return pool


_pool: Any = _describe()


def message(name: str, package: str = _SERVICES) -> Any:  # noqa: ANN401 - made at run time, so without a type
    """Return the class of a message."""
    return GetMessageClass(_pool.FindMessageTypeByName(f"{package}.{name}"))


class Stub:
    """The methods of one service over a channel, by name; each is made when it is first asked for."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        self._service = _pool.FindServiceByName(f"{_SERVICES}.{service}")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - same
        described = self._service.methods_by_name[name]
        asks = "stream" if described.client_streaming else "unary"
        answers = "stream" if described.server_streaming else "unary"
        method = self._make(name, getattr(self._channel, f"{asks}_{answers}"))
        setattr(self, name, method)
        return method

    def unary(self, name: str) -> Any:  # noqa: ANN401 - same
        """Return a method of streams as one of a single request, and of a single answer: None if none comes."""
        return self._make(name, self._channel.unary_unary)

    def _make(self, name: str, kind: Callable[..., Any]) -> Any:  # noqa: ANN401 - same
        described = self._service.methods_by_name[name]
        return kind(
            f"/{self._service.full_name}/{name}",
            request_serializer=GetMessageClass(described.input_type).SerializeToString,
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
