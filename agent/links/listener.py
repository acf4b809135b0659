"""The accepting end of all links: authenticates callers, and answers heartbeats while the agent's loop completes turns.

It also receives the snapshot parts that neighbours send (snapshot_parts.py).

Callers that have not authenticated yet are limited in number and time. When there are too many, the one that has waited
longest is dropped: a caller that knows the secret needs only milliseconds.

Readers connect to the same port and are passed to the log server (log_server.py).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

from agent.core.records import Identity
from agent.links.frames import BUFFER_BYTES, FrameKind, LinkBroken, LinkConnection, LinkTls, pong
from agent.links.handshake import Credential, LinkSession, ProofRefused, handshake_as_listener
from agent.links.log_server import LogServer
from agent.links.snapshot_parts import SnapshotPart, decode_part
from agent.links.sockets import BACKLOG
from agent.observe.log import log

_MAX_UNAUTHENTICATED = 64
_HANDSHAKE_S = 2.0
_IDLE_S = 300.0  # for a dialler that vanished without closing; a live one opens the link again
_GOODBYE_WITHIN_S = 0.2
_WARN_EVERY_S = 60.0


class _Caller:
    """One incoming connection."""

    task: asyncio.Task[None]

    def __init__(self, connection: LinkConnection) -> None:
        self.connection = connection
        self.session: LinkSession | None = None
        """None: not authenticated yet."""
        self.dialler: Identity | None = None
        """The agent that dialled; None until it has sent its first frame after the handshake."""


class Listener:
    """Answers at the listening socket, from the first `answer_as` on.

    Args:
        listener: the listening socket.
        tasks: runs one task per connection.
        log_server: serves readers.
        is_loop_alive: whether the agent's loop completed a turn recently; heartbeats are answered only while it is.
        wall_clock: returns seconds since 1970.
        on_part: receives each snapshot part that a neighbour sends.
        tls: encryption of the links.
        part_port: port at which this agent takes large snapshot parts; 0: it takes none.
    """

    def __init__(
        self,
        listener: socket.socket,
        tasks: asyncio.TaskGroup,
        log_server: LogServer,
        *,
        is_loop_alive: Callable[[], bool],
        wall_clock: Callable[[], float],
        on_part: Callable[[SnapshotPart], None],
        tls: LinkTls,
        part_port: int = 0,
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._tasks = tasks
        self._log_server = log_server
        self._is_loop_alive = is_loop_alive
        self._wall_clock = wall_clock
        self._on_part = on_part
        self._part_port = part_port
        self._server: asyncio.Server | None = None
        self._credential: Credential | None = None
        self._callers: dict[_Caller, None] = {}
        """In the order of their connections."""
        self._warn_at = 0.0

    async def answer_as(self, credential: Credential) -> None:
        """Use this identity from now on. Callers that were accepted under another identity receive a goodbye."""
        self._tasks.create_task(self._say_goodbye(self._clear()))
        self._log_server.disconnect_all()
        self._credential = credential
        if self._server is None:
            self._server = await asyncio.start_server(
                self._on_connection, sock=self._listener, backlog=BACKLOG, limit=BUFFER_BYTES
            )

    async def close(self, *, goodbye: bool) -> None:
        """Stop listening, and close all connections: with a goodbye, or as if this process had been killed."""
        self._credential = None
        if self._server is None:
            self._listener.close()
        else:
            await self._stop_listening(self._server)
        accepted = self._clear()
        if goodbye:
            await self._say_goodbye(accepted)
        for caller in accepted:
            caller.task.cancel()
        await self._log_server.close()  # last, so that readers delay neither goodbyes nor closed connections

    async def _stop_listening(self, server: asyncio.Server) -> None:
        # If a server is closed between accepting a connection and creating its transport, the socket leaks until
        # garbage collection (CPython gh-109564).
        asyncio.get_running_loop().remove_reader(self._listener)
        await asyncio.sleep(0)  # lets accepted connections get their transports
        server.close()

    def _clear(self) -> Sequence[_Caller]:
        """Drop callers that are not authenticated, and return the others."""
        accepted = [caller for caller in self._callers if caller.session is not None]
        for caller in self._callers:
            if caller.session is None:
                caller.task.cancel()
        self._callers.clear()
        return accepted

    async def _say_goodbye(self, callers: Sequence[_Caller]) -> None:
        """Send a goodbye. Each dialler closes its connection when it has read it; one that does not is dropped."""
        for caller in callers:
            if caller.session is not None:
                caller.connection.send(FrameKind.GOODBYE, caller.session.prove(b"goodbye", b""))
        if callers:
            _, slow = await asyncio.wait([caller.task for caller in callers], timeout=_GOODBYE_WITHIN_S)
            for task in slow:
                task.cancel()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = _Caller(LinkConnection(reader, writer))
        if self._credential is None:  # accepted while closing
            caller.connection.drop()
            return
        unauthenticated = [caller for caller in self._callers if caller.session is None]
        if len(unauthenticated) >= _MAX_UNAUTHENTICATED:
            del self._callers[unauthenticated[0]]
            unauthenticated[0].task.cancel()
        caller.task = self._tasks.create_task(self._receive(caller, self._credential))
        caller.task.add_done_callback(lambda _: self._forget(caller))  # even if it is cancelled before it begins
        self._callers[caller] = None

    def _forget(self, caller: _Caller) -> None:
        self._callers.pop(caller, None)
        caller.connection.drop()

    async def _receive(self, caller: _Caller, credential: Credential) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                if self._tls.accepting is not None:
                    await caller.connection.accept(self._tls.accepting)
                authenticated = await handshake_as_listener(caller.connection, credential, self._part_port)
            if self._tls.demands_cert and not authenticated.is_reader and not caller.connection.shown_cert:
                self._warn("an agent without a certificate called; give it --tls_cert too", caller.connection)
            elif authenticated.is_reader:
                self._callers.pop(caller, None)  # authenticated, and not to receive a goodbye
                await self._log_server.serve(caller.connection)
            else:
                caller.session = authenticated.session
                await self._serve(caller, authenticated.session, authenticated.identity)
        except ProofRefused:
            self._warn("a caller at the agents' port does not know this job's secret", caller.connection)
        except (LinkBroken, TimeoutError):
            pass

    async def _serve(self, caller: _Caller, session: LinkSession, identity: Identity) -> None:
        """Answer heartbeats, and receive snapshot parts."""
        connection = caller.connection
        while True:
            async with asyncio.timeout(_IDLE_S):
                kind, payload = await connection.receive(FrameKind.PING, FrameKind.STORE_PART)
            if caller.dialler is None:
                self._drop_other_of(identity)
                caller.dialler = identity
            if kind is FrameKind.STORE_PART:
                self._on_part(decode_part(payload, session))
                connection.send(FrameKind.PART_STORED)
            elif self._is_loop_alive():
                connection.send(FrameKind.PONG, pong(payload, self._wall_clock()))

    def _drop_other_of(self, identity: Identity) -> None:
        """Drop the dialler's former connection: a dialler uses one at a time.

        The first frame decides, not the handshake, because the dialler may not know yet that its new handshake is done.
        """
        for other in self._callers:
            if other.dialler == identity:
                other.task.cancel()

    def _warn(self, message: str, connection: LinkConnection) -> None:
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + _WARN_EVERY_S
            log.warning(message, caller=connection.caller)
