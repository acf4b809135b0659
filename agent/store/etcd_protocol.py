"""etcd's gRPC messages and methods: how they are made, how requests are built and how replies are read.

The classes of the messages are made at run time from the descriptions that the package etcd3 carries; no code of etcd3
runs. Each of its generated files holds the serialized description of one `.proto` file as one literal, from which
protobuf makes classes. Importing these files instead would load etcd3's whole client, and would force protobuf's pure
Python implementation on this process, because code of that age loads under no other one: a slower start, and many
times more time for each message.

The messages have no static types, so `Any` begins and ends in this file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from agent.store.api import Compare, Delete, KeyChange, KeyRange, KeyValue, Put

_FILES = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")
"""Each file follows those that it refers to."""
_DESCRIPTION = re.compile(r"^  serialized_pb=_b\(('.*')\)", re.MULTILINE)
_SERVICES = "etcdserverpb"


def parse_description(generated: str) -> bytes:
    """Return the serialized description in the text of a generated file. Raises `ImportError`."""
    found = _DESCRIPTION.search(generated)
    if found is None:
        raise ImportError("want the descriptions of etcd's messages as in etcd3 0.12.0; install that release of etcd3")
    text: str = ast.literal_eval(found[1])
    return text.encode("latin-1")


def _load_descriptions() -> DescriptorPool:
    spec = find_spec("etcd3")  # locates the package without importing it
    if spec is None or spec.origin is None:
        raise ImportError("etcd3, which describes etcd's messages, is not installed; install etcd3 0.12.0")
    pool = DescriptorPool()
    for name in _FILES:
        generated = (Path(spec.origin).parent / "etcdrpc" / name).read_text(encoding="utf-8")
        pool.AddSerializedFile(parse_description(generated))
    return pool


_pool: Any = _load_descriptions()


def message(name: str, package: str = _SERVICES) -> Any:  # noqa: ANN401 - made at run time, so without a type
    """Return the class of a message."""
    return GetMessageClass(_pool.FindMessageTypeByName(f"{package}.{name}"))


class Stub:
    """The methods of one service over a channel, as attributes; each is made at its first use."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        self._service = _pool.FindServiceByName(f"{_SERVICES}.{service}")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - same
        descriptor = self._service.methods_by_name[name]
        request_kind = "stream" if descriptor.client_streaming else "unary"
        reply_kind = "stream" if descriptor.server_streaming else "unary"
        method = self._make(name, getattr(self._channel, f"{request_kind}_{reply_kind}"))
        setattr(self, name, method)
        return method

    def unary(self, name: str) -> Any:  # noqa: ANN401 - same
        """Return a streaming method as one with a single request and a single reply (None if no reply comes)."""
        return self._make(name, self._channel.unary_unary)

    def _make(self, name: str, kind: Callable[..., Any]) -> Any:  # noqa: ANN401 - same
        descriptor = self._service.methods_by_name[name]
        return kind(
            f"/{self._service.full_name}/{name}",
            request_serializer=GetMessageClass(descriptor.input_type).SerializeToString,
            response_deserializer=GetMessageClass(descriptor.output_type).FromString,
        )


_RangeRequest = message("RangeRequest")
_PutRequest = message("PutRequest")
_DeleteRangeRequest = message("DeleteRangeRequest")
_Compare = message("Compare")
_RequestOp = message("RequestOp")
_TxnRequest = message("TxnRequest")
_WatchRequest = message("WatchRequest")
_WatchCreateRequest = message("WatchCreateRequest")
_LeaseGrantRequest = message("LeaseGrantRequest")
_LeaseRevokeRequest = message("LeaseRevokeRequest")
_LeaseKeepAliveRequest = message("LeaseKeepAliveRequest")
_AuthenticateRequest = message("AuthenticateRequest")
_Event = message("Event", "mvccpb")


def read_request(ranges: Iterable[KeyRange], home: str) -> Any:  # noqa: ANN401 - a message without a type
    """Build one transaction that reads all ranges; without a range, one that counts the key `home`."""
    wanted = [_RangeRequest(key=start, range_end=end) for start, end in map(_bounds, disjoint(ranges))]
    # A member would answer a transaction without a range from its own, possibly outdated, state.
    wanted = wanted or [_RangeRequest(key=home.encode(), count_only=True)]
    return _TxnRequest(success=[_RequestOp(request_range=each) for each in wanted])


def write_request(compares: Iterable[Compare], writes: Iterable[Put | Delete]) -> Any:  # noqa: ANN401 - same
    """Build one transaction that writes if all compares hold."""
    return _TxnRequest(
        compare=[each for compare in compares for each in _compare_messages(compare)],
        success=[_operation(write) for write in writes],
    )


def authenticate_request(user: str, password: str) -> Any:  # noqa: ANN401 - same
    """Build the request that exchanges a password for a token."""
    return _AuthenticateRequest(name=user, password=password)


def grant_request(ttl_s: int) -> Any:  # noqa: ANN401 - same
    """Build the request that grants a lease."""
    return _LeaseGrantRequest(TTL=ttl_s)


def refresh_request(lease_id: int) -> Any:  # noqa: ANN401 - same
    """Build the request that renews a lease."""
    return _LeaseKeepAliveRequest(ID=lease_id)


def revoke_request(lease_id: int) -> Any:  # noqa: ANN401 - same
    """Build the request that revokes a lease."""
    return _LeaseRevokeRequest(ID=lease_id)


def watch_requests(ranges: Iterable[KeyRange], after_revision: int) -> list[Any]:
    """Build one subscription per range.

    Each subscription names its first revision, so that no change is missed while the others are created.
    """
    return [
        _WatchRequest(
            create_request=_WatchCreateRequest(
                key=start, range_end=end, start_revision=after_revision + 1, progress_notify=True
            )
        )
        for start, end in map(_bounds, disjoint(ranges))
    ]


def items_of(reply: Any) -> tuple[KeyValue, ...]:  # noqa: ANN401 - same
    """Return the items in the reply to a `read_request`, sorted by key."""
    found = (_key_value(kv) for part in reply.responses for kv in part.response_range.kvs)
    return tuple(sorted(found, key=lambda item: item.key))


def changes_of(reply: Any, after_revision: int) -> Iterator[KeyChange]:  # noqa: ANN401 - same
    """Yield the events of a watch reply that are newer than a revision."""
    for event in reply.events:
        if event.kv.mod_revision > after_revision:
            item = _key_value(event.kv) if event.type == _Event.PUT else None
            yield KeyChange(_decode(event.kv.key), item, event.kv.mod_revision)


def disjoint(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """Drop ranges that lie within another one, so that nothing is returned twice."""
    unique = tuple(dict.fromkeys(ranges))
    return tuple(
        each
        for each in unique
        if not any(other is not each and other.is_prefix and other.contains(each.key) for other in unique)
    )


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with the prefix (a zero byte: there is no such key)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def _bounds(wanted: KeyRange | Delete) -> tuple[bytes, bytes]:
    key = wanted.key.encode()
    if not wanted.is_prefix:
        return key, b""
    # etcd rejects an empty key, so the range of the empty prefix begins at the smallest key.
    return key or b"\0", prefix_end(key)


def _compare_messages(compare: Compare) -> Iterator[Any]:
    key = compare.key.encode()
    if compare.create_revision is not None:
        yield _Compare(
            result=_Compare.EQUAL,
            target=_Compare.CREATE,
            key=key,
            create_revision=compare.create_revision,
        )
    if compare.mod_revision is not None:
        yield _Compare(result=_Compare.EQUAL, target=_Compare.MOD, key=key, mod_revision=compare.mod_revision)


def _operation(write: Put | Delete) -> Any:  # noqa: ANN401 - same
    match write:
        case Put(key, value, lease_id):
            put = _PutRequest(key=key.encode(), value=value, lease=lease_id)
            return _RequestOp(request_put=put)
        case Delete():
            start, end = _bounds(write)
            return _RequestOp(request_delete_range=_DeleteRangeRequest(key=start, range_end=end))


def _key_value(kv: Any) -> KeyValue:  # noqa: ANN401 - same
    return KeyValue(_decode(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _decode(key: bytes) -> str:
    # A foreign key that is not UTF-8 must not stop the agent; no key of ours looks like that.
    return key.decode("utf-8", "backslashreplace")
