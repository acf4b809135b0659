"""A server process: sockets and threads around the shards that decide.

One thread a connection, one request at a time on each. A connection is a worker's, or that of the primary of a shard
whose copy is here. A shard changes under its lock; who must wait for other workers waits there, and is woken by what
they send.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from trainer_runtime.ps.frames import BrokenError, FrameConnection, admit
from trainer_runtime.ps.replica_receiver import keep_copy
from trainer_runtime.ps.shard import Author
from trainer_runtime.ps.shard_host import ShardHost
from trainer_runtime.ps.worker_session import WorkerSession
from trainer_runtime.tls import TlsChannel

log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_STRANGERS = 64
_FULL_S = 1.0
"""At most, until it is tried again whether there is room for another connection."""


class ParameterServer:
    """Serves its shards at a socket that listens, until `close`.

    Args:
        hosted: all shards of the job, by their numbers.
        listener: where it listens.
        secret: what the job's processes know.
        workers: after so many have left in order, `wait` returns. None: it does not.
        only_from: IP addresses from which alone anybody is let in. None: from all.
        tls: how callers must speak. None: in the clear.
    """

    def __init__(
        self,
        hosted: Sequence[ShardHost],
        listener: socket.socket,
        secret: bytes,
        workers: int | None,
        only_from: Collection[str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._hosted = hosted
        self._listener = listener
        self._secret = secret
        self._only_from = only_from
        self._refused: set[str] = set()
        self._workers = workers
        self._changed = threading.Condition()
        self._strangers: dict[FrameConnection, None] = {}
        """Who has not proved anything yet, in the order in which they came."""
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

        It does it on a thread: the one that waits may have looked already, and not be asleep yet.
        """
        threading.Thread(target=self._stop, name="ps-stop", daemon=True).start()

    def _stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            strangers = [*self._strangers]
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in strangers:
            connection.close()
        for hosted in self._hosted:
            hosted.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                self._let_in(*self._listener.accept())
            except (OSError, RuntimeError) as error:  # it was closed; or there is no descriptor, no memory, no thread
                with self._changed:
                    if not self._is_closed:
                        log.warning("nobody can be let in for a while: %s", error)
                        self._changed.wait(_FULL_S)  # who goes makes room

    def _let_in(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        if not self._lets_in(address[0]):
            sock.close()
            return
        connection = FrameConnection(sock)
        with self._changed:
            if len(self._strangers) >= _STRANGERS:
                next(iter(self._strangers)).close()
            self._strangers[connection] = None
        try:
            threading.Thread(target=self._serve, args=(connection,), name="ps-caller", daemon=True).start()
        except BaseException:
            self._end(connection)
            raise

    def _end(self, connection: FrameConnection) -> None:
        connection.close()
        with self._changed:
            self._strangers.pop(connection, None)
            self._changed.notify_all()

    def _lets_in(self, address: str) -> bool:
        if self._only_from is None or address in self._only_from:
            return True
        if address not in self._refused and len(self._refused) < _STRANGERS:
            self._refused.add(address)
            log.warning(
                "%s is refused: only the job's listed machines are let in, %s, as long as no secret is set",
                address,
                ", ".join(sorted(self._only_from)),
            )
        return False

    def _serve(self, connection: FrameConnection) -> None:
        try:
            connection.sock.settimeout(_HANDSHAKE_S)
            if self._tls is not None:
                connection.encrypt(TlsChannel(self._tls, is_called=True))
            hello = admit(connection, self._secret)
            connection.sock.settimeout(None)
            with self._changed:
                self._strangers.pop(connection, None)
            match hello:
                case {"shard": int(number), "worker": int(worker), "incarnation": int(incarnation)} if (
                    0 <= number < len(self._hosted)
                ):
                    rests = hello.get("rests") is True
                    author = Author(worker, incarnation)
                    WorkerSession(self._hosted[number], connection, author, self._note_left, rests=rests).serve()
                case {"shard": int(number), "primary": [int(), int()], "map": int(of_map), "era": int(era)} if (
                    0 <= number < len(self._hosted)
                ):
                    keep_copy(self._hosted[number], connection, of_map, era)
                case {"probe": True}:
                    pass  # the handshake was the answer
                case _:
                    raise BrokenError("a hello for somebody else")  # noqa: TRY301 - as any other that breaks a rule
        except (BrokenError, OSError) as broken:
            log.debug("a connection has ended: %s", broken)
        finally:
            self._end(connection)

    def _note_left(self, worker: int) -> None:
        """A worker has done its part, and was told that this is known."""
        with self._changed:
            self._left.add(worker)
            self._changed.notify_all()
