"""Connections to etcd's endpoints, and the token by which a user is authenticated on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc

from agent.errors import StoreRefused
from agent.store import etcd_errors
from agent.store.access import User
from agent.store.certificates import Tls
from agent.store.etcd_protocol import Stub, authenticate_request

Metadata = tuple[tuple[str, str], ...]
"""gRPC metadata of a call."""

_AUTH_RETRY_S = 5.0

_CHANNEL_OPTIONS = (
    # The default back-off grows to two minutes: far too long to notice that etcd is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Pings detect a frozen etcd under an idle watch. etcd's server rejects more than one ping in 5 s.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    # A proxy for package downloads does not lead to a store on the local network.
    ("grpc.enable_http_proxy", 0),
)


class EtcdConnection:
    """A connection to one endpoint. gRPC opens it at the first call."""

    def __init__(self, endpoint: str, tls: Tls | None = None) -> None:
        self.endpoint = endpoint
        self.channel = _make_channel(endpoint, tls)
        self.auth = Stub(self.channel, "Auth")
        self.kv = Stub(self.channel, "KV")
        self.lease = Stub(self.channel, "Lease")
        self.watch = Stub(self.channel, "Watch")
        # A stream with one request and one reply. To etcd a unary call is the same, and it needs no thread here.
        self.keep_alive = self.lease.unary("LeaseKeepAlive")
        # gRPC's standard health service, which any gRPC server may offer. Requests and replies are plain bytes.
        self.health: Any = self.channel.unary_unary("/grpc.health.v1.Health/Check")


def _make_channel(endpoint: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
    # One channel per endpoint, so that gRPC itself compares each server's certificate with the endpoint's own host.
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return grpc.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS)


class EtcdConnections:
    """One connection per endpoint, one of which is in use."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None) -> None:
        self._lock = threading.Lock()
        self._connections = [EtcdConnection(endpoint, tls) for endpoint in endpoints]
        self._current = 0

    def current(self) -> EtcdConnection:
        """Return the connection in use."""
        with self._lock:
            return self._connections[self._current]

    def leave(self, failed: EtcdConnection) -> None:
        """Switch to the next endpoint, unless another thread has already left the failed one."""
        with self._lock:
            if self._connections[self._current] is failed:
                self._current = (self._current + 1) % len(self._connections)

    def close(self) -> None:
        """Close all connections; calls in progress end with CANCELLED."""
        for connection in self._connections:
            connection.channel.close()


class AuthToken:
    """The token of one user: fetched at the first call, and again when etcd no longer knows it.

    etcd keeps tokens in memory, so a restart forgets them, and each expires when a member has not seen it for five
    minutes. A call with a forgotten token is rejected before anything is done. Checking a password costs etcd 0.1 s of
    CPU time, so a rejected password is not sent again for a while, however many threads need a token.

    May be used from any thread.
    """

    def __init__(self, user: User | None) -> None:
        self._user = user
        self._lock = threading.Lock()
        self._metadata: Metadata | None = None
        self._refusal = ""
        self._retry_at = 0.0

    @property
    def has_user(self) -> bool:
        """Whether there is a user to authenticate as."""
        return self._user is not None

    def metadata(self, connection: EtcdConnection, ends_at: float, *, refused: Metadata | None = None) -> Metadata:
        """Return the metadata that authenticates a call.

        Args:
            connection: the endpoint to fetch a token from if there is none yet.
            ends_at: when to give up, on the monotonic clock.
            refused: metadata that etcd rejected; the result is then different.

        Raises:
            grpc.RpcError: this endpoint did not answer.
            StoreRefused: etcd rejects the user or the password.
        """
        if self._user is None:
            return ()
        if not self._lock.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise etcd_errors.EndpointFailed(f"etcd at {connection.endpoint} did not authenticate this client in time")
        try:
            if self._metadata is None or self._metadata is refused:
                self._metadata = self._authenticate(self._user, connection, ends_at)
            return self._metadata
        finally:
            self._lock.release()

    def forget(self, refused: Metadata) -> None:
        """Authenticate again at the next call, unless another thread already has a new token."""
        with self._lock:
            if self._metadata is refused:
                self._metadata = None

    def _authenticate(self, user: User, connection: EtcdConnection, ends_at: float) -> Metadata:
        if time.monotonic() < self._retry_at:
            raise StoreRefused(self._refusal)
        request = authenticate_request(user.name, user.password)
        try:
            reply = connection.auth.Authenticate(request, timeout=max(0.001, ends_at - time.monotonic()))
        except grpc.RpcError as error:
            details = etcd_errors.details_of(error)
            if "authentication is not enabled" in details:
                return ()  # everybody may do everything; etcd's own client continues as well
            if "authentication failed" not in details:
                raise
            self._refusal = f"etcd at {connection.endpoint} does not accept user {user.name!r} with this password"
            self._retry_at = time.monotonic() + _AUTH_RETRY_S
            raise StoreRefused(self._refusal) from None
        return (("token", reply.token),)
