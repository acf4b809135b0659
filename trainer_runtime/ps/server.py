"""A server process: its socket, and a thread for each connection.

A connection is that of a worker, or of the primary of a shard whose replica is here. Each carries one request at a
time. A shard changes under its lock. A request that must wait for other workers waits on this lock, and is woken by
their requests.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from trainer_runtime.ps.frames import BrokenError, FrameConnection, server_handshake
from trainer_runtime.ps.replica_receiver import receive_replica
from trainer_runtime.ps.shard import Author
from trainer_runtime.ps.shard_host import ShardHost
from trainer_runtime.ps.worker_session import WorkerSession
from trainer_runtime.tls import TlsChannel

log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_MAX_UNAUTHENTICATED = 64
_RETRY_ACCEPT_S = 1.0
"""Maximum time until accepting connections is tried again after an error."""


class ParameterServer:
    """Serves its shards at a listening socket until `close`.

    Args:
        shard_hosts: all shards of the job, by their numbers.
        listener: listening socket.
        secret: secret of the job's processes.
        workers: `wait` returns after so many workers have left. None: it does not.
        allowed_addresses: IP addresses from which connections are accepted. None: any address.
        tls: TLS context for callers. None: connections are not encrypted.
    """

    def __init__(
        self,
        shard_hosts: Sequence[ShardHost],
        listener: socket.socket,
        secret: bytes,
        workers: int | None,
        allowed_addresses: Collection[str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._shard_hosts = shard_hosts
        self._listener = listener
        self._secret = secret
        self._allowed_addresses = allowed_addresses
        self._refused: set[str] = set()
        self._workers = workers
        self._changed = threading.Condition()
        self._unauthenticated: dict[FrameConnection, None] = {}
        """Connections without a completed handshake, in the order of arrival."""
        self._left: set[int] = set()
        self._is_stopping = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="ps-accept", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all workers have left, or at `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_stopping or len(self._left) == self._workers)

    def stop(self) -> None:
        """Let `wait` return. A signal handler may call it, also within `wait`.

        The condition is notified on another thread: the waiting thread may have checked it without sleeping yet.
        """
        threading.Thread(target=self._stop, name="ps-stop", daemon=True).start()

    def _stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the listener, all connections and shards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            unauthenticated = [*self._unauthenticated]
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in unauthenticated:
            connection.close()
        for shard_host in self._shard_hosts:
            shard_host.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                self._start_session(*self._listener.accept())
            except (
                OSError,
                RuntimeError,
            ) as error:  # the listener is closed, or descriptors, memory or threads ran out
                with self._changed:
                    if not self._is_closed:
                        log.warning("cannot accept connections, trying again: %s", error)
                        self._changed.wait(_RETRY_ACCEPT_S)  # a closed connection frees its resources

    def _start_session(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        if not self._is_allowed(address[0]):
            sock.close()
            return
        connection = FrameConnection(sock)
        with self._changed:
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                next(iter(self._unauthenticated)).close()
            self._unauthenticated[connection] = None
        try:
            threading.Thread(target=self._serve, args=(connection,), name="ps-caller", daemon=True).start()
        except BaseException:
            self._close(connection)
            raise

    def _close(self, connection: FrameConnection) -> None:
        connection.close()
        with self._changed:
            self._unauthenticated.pop(connection, None)
            self._changed.notify_all()

    def _is_allowed(self, address: str) -> bool:
        if self._allowed_addresses is None or address in self._allowed_addresses:
            return True
        if address not in self._refused and len(self._refused) < _MAX_UNAUTHENTICATED:
            self._refused.add(address)
            log.warning(
                "%s is refused: only the job's listed machines are let in, %s, unless a secret is set",
                address,
                ", ".join(sorted(self._allowed_addresses)),
            )
        return False

    def _serve(self, connection: FrameConnection) -> None:
        try:
            connection.sock.settimeout(_HANDSHAKE_S)
            if self._tls is not None:
                connection.encrypt(TlsChannel(self._tls, is_called=True))
            hello = server_handshake(connection, self._secret)
            connection.sock.settimeout(None)
            with self._changed:
                self._unauthenticated.pop(connection, None)
            match hello:
                case {"shard": int(number), "worker": int(worker), "incarnation": int(incarnation)} if (
                    0 <= number < len(self._shard_hosts)
                ):
                    rests = hello.get("rests") is True
                    author = Author(worker, incarnation)
                    WorkerSession(self._shard_hosts[number], connection, author, self._record_left, rests=rests).serve()
                case {"shard": int(number), "primary": [int(), int()], "map": int(of_map), "era": int(era)} if (
                    0 <= number < len(self._shard_hosts)
                ):
                    receive_replica(self._shard_hosts[number], connection, of_map, era)
                case {"probe": True}:
                    pass  # the handshake is the answer
                case _:
                    raise BrokenError("unknown hello")  # noqa: TRY301 - handled as any other protocol error
        except (BrokenError, OSError) as broken:
            log.debug("connection closed: %s", broken)
        finally:
            self._close(connection)

    def _record_left(self, worker: int) -> None:
        """Count a worker that has left and has received the answer."""
        with self._changed:
            self._left.add(worker)
            self._changed.notify_all()
