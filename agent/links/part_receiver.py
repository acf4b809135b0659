"""Takes the large snapshot parts that another agent sends. See part_stream.py.

One thread accepts connections, and one for each connection receives. A caller has two seconds to prove itself. If too
many have not done so yet, the one that has waited longest is dropped.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol

from agent.links.frames import LinkBroken
from agent.links.part_stream import (
    OUTDATED,
    STALL_S,
    WHOLE,
    PartHeader,
    decode_header,
    handshake_as_called,
    receive_into,
    receive_message,
    send_message,
)
from agent.links.sockets import listen

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.links.frames import LinkTls
    from agent.links.handshake import Credential

_MAX_UNPROVEN = 8
_HANDSHAKE_S = 2.0
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SHORT_S = 1.0
_IDLE_S = 300.0  # for a caller that vanished without closing; a live one connects again


class NoRoomError(Exception):
    """There is no room for a part. The message is a short phrase for people."""


class OutdatedPartError(Exception):
    """A part is of an older group."""


class PartHolder(Protocol):
    """Holds the parts that are received."""

    def make_room(self, header: PartHeader) -> int:
        """Return the descriptor of a memory or file of the part's size, which belongs to the caller.

        Raises:
            NoRoomError, OutdatedPartError: the part is not taken.
        """

    def store_large(self, header: PartHeader, descriptor: int) -> None:
        """Take over a memory or file that has been filled."""

    def give_back(self, descriptor: int) -> None:
        """Take back a memory or file that was not filled."""


class PartReceiver:
    """Listens at once; takes parts from the first `answer_as` on. Methods may be called from any thread.

    Args:
        holder: returns what holds the parts.
        tls: encryption of the links; without a certificate, nothing is taken.
    """

    def __init__(self, holder: Callable[[], PartHolder], tls: LinkTls) -> None:
        self._holder = holder
        self._tls = tls
        self._credential: Credential | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: dict[socket.socket, bool] = {}
        """Whether the caller has yet to prove itself; in the order of the connections."""
        self._socket = listen()
        self.port: int = self._socket.getsockname()[1]
        """Port at which other agents reach this one, on every interface."""
        threading.Thread(target=self._accept, name="parts-accept", daemon=True).start()

    def answer_as(self, credential: Credential) -> None:
        """Use this identity for connections from now on; those under another one are closed."""
        with self._lock:
            if credential != self._credential:
                self._credential = credential
                self._drop_all()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with self._lock:
            self._credential, self._is_closed = None, True
            self._drop_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _drop_all(self) -> None:
        for connection in self._connections:
            _wake_and_end(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                if error.errno in _SHORT_OF:  # else this would be tried without a pause
                    time.sleep(_SHORT_S)
                continue
            with self._lock:
                credential = self._credential
                waiting = [each for each, is_waiting in self._connections.items() if is_waiting]
                if len(waiting) >= _MAX_UNPROVEN:
                    self._connections[waiting[0]] = False
                    _wake_and_end(waiting[0])
                self._connections[connection] = True
            if credential is None:
                self._forget(connection)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, credential), name="parts-receive", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # a limit of processes; the caller tries again
                self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)
            connection.close()

    def _serve(self, plain: socket.socket, credential: Credential) -> None:
        with ExitStack() as stack:
            stack.callback(self._forget, plain)
            stack.enter_context(suppress(LinkBroken, OSError))
            if self._tls.accepting is None:
                return
            plain.settimeout(_HANDSHAKE_S)  # each step of the handshake; and all of it:
            deadline = threading.Timer(_HANDSHAKE_S, _wake_and_end, [plain])
            stack.callback(deadline.cancel)
            deadline.start()
            # A duplicate, so that `plain` stays open for those that end the connection.
            encrypted = stack.enter_context(self._tls.accepting.wrap_socket(plain.dup(), server_side=True))
            if self._tls.demands_cert and not encrypted.getpeercert(binary_form=True):
                return
            handshake_as_called(encrypted, credential)
            deadline.cancel()
            with self._lock:
                self._connections[plain] = False
            while True:
                self._receive(encrypted)

    def _receive(self, connection: socket.socket) -> None:
        connection.settimeout(_IDLE_S)
        header = decode_header(receive_message(connection))
        holder = self._holder()
        connection.settimeout(STALL_S)
        try:
            descriptor = holder.make_room(header)
        except OutdatedPartError:
            send_message(connection, OUTDATED)
            return
        except NoRoomError as error:
            send_message(connection, str(error).encode())
            return
        try:
            send_message(connection, b"")
            receive_into(connection, descriptor, header.size_bytes)
            is_whole = receive_message(connection) == WHOLE
        except BaseException:
            holder.give_back(descriptor)
            raise
        if is_whole:
            holder.store_large(header, descriptor)
            send_message(connection, b"")
        else:
            holder.give_back(descriptor)


def _wake_and_end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
