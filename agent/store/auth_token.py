"""The token that stands for a user: fetched at the first call, and again when etcd no longer knows it.

etcd keeps its tokens in memory, so a restart forgets them, and each runs out when a member has not seen it for five
minutes. A call with a forgotten token is refused before anything is done. Checking a password costs etcd a tenth of a
second of work, so one that was refused is not sent again for a while, however many threads ask.
"""

from __future__ import annotations

import threading
import time

import grpc

from agent.errors import StoreRefused
from agent.store import connections, etcd_errors
from agent.store.access import User

Metadata = tuple[tuple[str, str], ...]

_ASK_AGAIN_AFTER_S = 5.0


class AuthToken:
    """One user's. May be used from any thread."""

    def __init__(self, user: User | None) -> None:
        self._user = user
        self._lock = threading.Lock()
        self._metadata: Metadata | None = None
        self._refusal = ""
        self._ask_again_at = 0.0

    @property
    def has_user(self) -> bool:
        """Whether there is anybody to authenticate as."""
        return self._user is not None

    def metadata(
        self, link: connections.EtcdConnection, ends_at: float, *, refused: Metadata | None = None
    ) -> Metadata:
        """Return what a call carries to be known; something new if this is what etcd refused.

        Raises:
            grpc.RpcError: this endpoint did not answer.
            StoreRefused: etcd does not accept user and password.
        """
        if self._user is None:
            return ()
        if not self._lock.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise etcd_errors.EndpointFailed(f"etcd at {link.endpoint} did not authenticate this client in time")
        try:
            if self._metadata is None or self._metadata is refused:
                self._metadata = self._authenticate(self._user, link, ends_at)
            return self._metadata
        finally:
            self._lock.release()

    def forget(self, refused: Metadata) -> None:
        """Have the next call authenticate, unless another one has already."""
        with self._lock:
            if self._metadata is refused:
                self._metadata = None

    def _authenticate(self, user: User, link: connections.EtcdConnection, ends_at: float) -> Metadata:
        if time.monotonic() < self._ask_again_at:
            raise StoreRefused(self._refusal)
        request = connections.authenticate_request(user.name, user.password)
        try:
            reply = link.auth.Authenticate(request, timeout=max(0.001, ends_at - time.monotonic()))
        except grpc.RpcError as error:
            details = etcd_errors.details_of(error)
            if "authentication is not enabled" in details:
                return ()  # everybody may do everything: etcd's own client goes on as well
            if "authentication failed" not in details:
                raise
            self._refusal = f"etcd at {link.endpoint} does not accept user {user.name!r} with this password"
            self._ask_again_at = time.monotonic() + _ASK_AGAIN_AFTER_S
            raise StoreRefused(self._refusal) from None
        return (("token", reply.token),)
