"""The accepting end of all links: lets in who knows the secret, and answers while the agent's loop turns.

What neighbours hand over to be kept (snapshot_parts.py) comes in here.

Strangers are bounded in number and time. When there are too many the one that has waited longest goes: a caller that
knows the secret needs only milliseconds.

Readers of logs come in by the same door and are sent on to the desk (log_server.py).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

from agent.core.model import Identity
from agent.links.frames import (
    BUFFER_BYTES,
    Credential,
    FrameKind,
    Handshake,
    LinkBroken,
    LinkConnection,
    LinkTls,
    ProofRefused,
    admit,
    pong,
)
from agent.links.log_server import LogServer
from agent.links.snapshot_parts import SnapshotPart, unseal
from agent.observe.log import log

BACKLOG = 128
_STRANGERS = 64
_HANDSHAKE_S = 2.0
_IDLE_S = 300.0  # a dialler that vanished without closing; a living one would open the link again
_FAREWELL_S = 0.2
_COMPLAINT_EVERY_S = 60.0


class _Caller:
    """One connection that somebody opened to here."""

    task: asyncio.Task[None]

    def __init__(self, connection: LinkConnection) -> None:
        self.connection = connection
        self.session: Handshake | None = None
        """None: a stranger so far."""
        self.who: Identity | None = None
        """Whose dialling end this is; None until it is used."""


class Listener:
    """Answers at the listening socket, from the first `answer_as` on."""

    def __init__(
        self,
        listener: socket.socket,
        tasks: asyncio.TaskGroup,
        desk: LogServer,
        *,
        is_loop_alive: Callable[[], bool],
        wall_clock: Callable[[], float],
        on_part: Callable[[SnapshotPart], None],
        tls: LinkTls,
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._tasks = tasks
        self._desk = desk
        self._is_loop_alive = is_loop_alive
        self._wall_clock = wall_clock
        self._on_part = on_part
        self._server: asyncio.Server | None = None
        self._mine: Credential | None = None
        self._callers: dict[_Caller, None] = {}
        """In the order in which they came."""
        self._complain_at = 0.0

    async def answer_as(self, mine: Credential) -> None:
        """Be this one from now on. To those who were let in by another, that one says goodbye."""
        self._tasks.create_task(self._dismiss(self._clear()))
        self._desk.dismiss()
        self._mine = mine
        if self._server is None:
            self._server = await asyncio.start_server(
                self._on_knock, sock=self._listener, backlog=BACKLOG, limit=BUFFER_BYTES
            )

    async def close(self, *, goodbye: bool) -> None:
        """Stop listening, and let everybody go: with a goodbye, or as if this process had been killed."""
        self._mine = None
        if self._server is None:
            self._listener.close()
        else:
            await self._stop_listening(self._server)
        guests = self._clear()
        if goodbye:
            await self._dismiss(guests)
        for guest in guests:
            guest.task.cancel()
        await self._desk.close()  # last: nothing is to be noticed later because somebody reads

    async def _stop_listening(self, server: asyncio.Server) -> None:
        # A server that is closed between a call and its transport leaves the socket to the garbage (CPython gh-109564).
        asyncio.get_running_loop().remove_reader(self._listener)
        await asyncio.sleep(0)  # what was accepted gets its transport
        server.close()

    def _clear(self) -> Sequence[_Caller]:
        """Let strangers go without a word, and hand over the others."""
        guests = [caller for caller in self._callers if caller.session is not None]
        for caller in self._callers:
            if caller.session is None:
                caller.task.cancel()
        self._callers.clear()
        return guests

    async def _dismiss(self, guests: Sequence[_Caller]) -> None:
        """Say goodbye. Each dialler closes its connection when it has read that; one that does not is left."""
        for guest in guests:
            if guest.session is not None:
                guest.connection.send(FrameKind.GOODBYE, guest.session.prove(b"goodbye", b""))
        if guests:
            _, slow = await asyncio.wait([guest.task for guest in guests], timeout=_FAREWELL_S)
            for task in slow:
                task.cancel()

    def _on_knock(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = _Caller(LinkConnection(reader, writer))
        if self._mine is None:  # accepted in the instant of closing
            caller.connection.drop()
            return
        strangers = [caller for caller in self._callers if caller.session is None]
        if len(strangers) >= _STRANGERS:
            del self._callers[strangers[0]]
            strangers[0].task.cancel()
        caller.task = self._tasks.create_task(self._receive(caller, self._mine))
        caller.task.add_done_callback(lambda _: self._forget(caller))  # even if it is cancelled before it begins
        self._callers[caller] = None

    def _forget(self, caller: _Caller) -> None:
        self._callers.pop(caller, None)
        caller.connection.drop()

    async def _receive(self, caller: _Caller, mine: Credential) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                if self._tls.accepting is not None:
                    await caller.connection.accept(self._tls.accepting)
                called = await admit(caller.connection, mine)
            if self._tls.demands_cert and not called.is_reader and not caller.connection.shown_cert:
                self._complain("an agent without a certificate called: give it --tls_cert, too", caller.connection)
            elif called.is_reader:
                self._callers.pop(caller, None)  # it is no stranger any more, and none who hears a goodbye
                await self._desk.serve(caller.connection)
            else:
                caller.session = called.session
                await self._attend(caller, called.session, called.who)
        except ProofRefused:
            self._complain("somebody who does not know this job's secret called at the agents' port", caller.connection)
        except (LinkBroken, TimeoutError):
            pass

    async def _attend(self, caller: _Caller, session: Handshake, who: Identity) -> None:
        """Answer heartbeats, and take what is to be kept."""
        dialler = caller.connection
        while True:
            async with asyncio.timeout(_IDLE_S):
                kind, payload = await dialler.receive(FrameKind.PING, FrameKind.KEEP)
            if caller.who is None:
                self._end_other_of(who)
                caller.who = who
            if kind is FrameKind.KEEP:
                self._on_part(unseal(payload, session))
                dialler.send(FrameKind.KEPT)
            elif self._is_loop_alive():
                dialler.send(FrameKind.PONG, pong(payload, self._wall_clock()))

    def _end_other_of(self, who: Identity) -> None:
        """A dialler uses one connection at a time. Only use tells: it may not know yet that it was let in anew."""
        for other in self._callers:
            if other.who == who:
                other.task.cancel()

    def _complain(self, sentence: str, connection: LinkConnection) -> None:
        now = time.monotonic()
        if now >= self._complain_at:
            self._complain_at = now + _COMPLAINT_EVERY_S
            log.warning(sentence, caller=connection.caller)
