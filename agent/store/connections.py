"""What the store says to etcd and hears from it, and the connections. Nothing here decides anything.

etcd's messages are made at run time and carry no types, so `Any` begins and ends in this file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc

from agent.local_etcd.etcd_certificates import Tls
from agent.store.api import Compare, Delete, KeyChange, KeyRange, KeyValue, Put
from agent.store.messages import Stub, message

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

_CHANNEL_OPTIONS = (
    # The default back-off grows to two minutes: far too long to notice that etcd is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A frozen etcd is noticed under an idle watch. etcd's server refuses pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    # A proxy for package downloads is no way to a store on the local network.
    ("grpc.enable_http_proxy", 0),
)


class EtcdConnection:
    """A connection to one endpoint. Made lazily by gRPC: at the first call."""

    def __init__(self, endpoint: str, tls: Tls | None = None) -> None:
        self.endpoint = endpoint
        self.channel = _make_channel(endpoint, tls)
        self.auth = Stub(self.channel, "Auth")
        self.kv = Stub(self.channel, "KV")
        self.lease = Stub(self.channel, "Lease")
        self.watch = Stub(self.channel, "Watch")
        # A stream of one request and one answer. As a unary call, which is the same to etcd, it needs no thread.
        self.keep_alive = self.lease.unary("LeaseKeepAlive")
        # Not etcd's own: every server of gRPC's kind may have it. Bytes go in, and come out.
        self.health: Any = self.channel.unary_unary("/grpc.health.v1.Health/Check")


def _make_channel(endpoint: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
    # One channel per endpoint, so gRPC itself holds each server's certificate against the endpoint's own host.
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return grpc.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS)


class EtcdConnections:
    """One link per endpoint, and which of them is in use."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None) -> None:
        self._lock = threading.Lock()
        self._links = [EtcdConnection(endpoint, tls) for endpoint in endpoints]
        self._current = 0

    def current(self) -> EtcdConnection:
        """Return the link to use now."""
        with self._lock:
            return self._links[self._current]

    def leave(self, failed: EtcdConnection) -> None:
        """Go to the next endpoint, unless another thread has already left the failed one."""
        with self._lock:
            if self._links[self._current] is failed:
                self._current = (self._current + 1) % len(self._links)

    def close(self) -> None:
        """Close all links; calls under way end with CANCELLED."""
        for link in self._links:
            link.channel.close()


def read_request(ranges: Iterable[KeyRange], home: str) -> Any:  # noqa: ANN401 - a message without a type
    """Build one transaction that reads all ranges, or counts a key if there are none."""
    wanted = [_RangeRequest(key=start, range_end=end) for start, end in map(_bounds, disjoint(ranges))]
    # A transaction without a range would be answered from the member's own, maybe old, state.
    wanted = wanted or [_RangeRequest(key=home.encode(), count_only=True)]
    return _TxnRequest(success=[_RequestOp(request_range=each) for each in wanted])


def write_request(compares: Iterable[Compare], writes: Iterable[Put | Delete]) -> Any:  # noqa: ANN401 - same
    """Build one transaction that writes if all compares hold."""
    return _TxnRequest(
        compare=[each for compare in compares for each in _compares(compare)],
        success=[_operation(write) for write in writes],
    )


def authenticate_request(user: str, password: str) -> Any:  # noqa: ANN401 - same
    """Build the exchange of a password for a token."""
    return _AuthenticateRequest(name=user, password=password)


def grant_request(ttl_s: int) -> Any:  # noqa: ANN401 - same
    """Build the grant of a lease."""
    return _LeaseGrantRequest(TTL=ttl_s)


def refresh_request(lease_id: int) -> Any:  # noqa: ANN401 - same
    """Build the renewal of a lease."""
    return _LeaseKeepAliveRequest(ID=lease_id)


def revoke_request(lease_id: int) -> Any:  # noqa: ANN401 - same
    """Build the end of a lease."""
    return _LeaseRevokeRequest(ID=lease_id)


def watch_requests(ranges: Iterable[KeyRange], after_revision: int) -> list[Any]:
    """Build one subscription per range.

    Each names its first revision, so that nothing is missed while the others are being created.
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
    """Return what a `read_request` found, sorted by key."""
    found = (_key_value(kv) for part in reply.responses for kv in part.response_range.kvs)
    return tuple(sorted(found, key=lambda item: item.key))


def changes_of(reply: Any, after_revision: int) -> Iterator[KeyChange]:  # noqa: ANN401 - same
    """Return a watch reply's events above a revision."""
    for event in reply.events:
        if event.kv.mod_revision > after_revision:
            item = _key_value(event.kv) if event.type == _Event.PUT else None
            yield KeyChange(_decode(event.kv.key), item, event.kv.mod_revision)


def disjoint(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """Drop ranges that lie within another one, so that nothing comes twice."""
    unique = tuple(dict.fromkeys(ranges))
    return tuple(
        each
        for each in unique
        if not any(other is not each and other.is_prefix and other.contains(each.key) for other in unique)
    )


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all that begin with the prefix (a zero byte: there is none)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def _bounds(wanted: KeyRange | Delete) -> tuple[bytes, bytes]:
    key = wanted.key.encode()
    if not wanted.is_prefix:
        return key, b""
    # The empty prefix begins at the smallest key: etcd refuses an empty one.
    return key or b"\0", prefix_end(key)


def _compares(compare: Compare) -> Iterator[Any]:
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
    # A foreign key that is no text must not stop the agent; nobody knows such a key anyway.
    return key.decode("utf-8", "backslashreplace")
