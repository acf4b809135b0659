"""The dialling end of one link: opens it, judges the peer by it, and opens it again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from agent import clock
from agent.core.model import Identity, LinkState
from agent.core.neighbours import SILENT_HEARTBEATS
from agent.links.clocks import ClockComparison
from agent.links.frames import (
    Credential,
    FrameKind,
    Handshake,
    LinkBroken,
    LinkConnection,
    OtherCertificate,
    introduce,
    ping,
    read_pong,
)
from agent.links.snapshot_parts import PartOutbox, SnapshotPart

_REOPEN_S = 0.3
_AFTER_CLOSE_S = 0.01  # a dying process closes its sockets one by one
_BETWEEN_TRIES_S = 0.05
_LAST_TRY_S = 0.1
_LATE_S = 0.1
_REFUSALS = 2


@dataclass(frozen=True)
class Peer:
    """An agent to be linked with."""

    who: Identity
    address: str
    """An IP address: nobody may wait for DNS here."""
    port: int
    cert: str = ""
    """Fingerprint of the certificate that it shows there; empty: nothing is encrypted."""


@dataclass(frozen=True)
class LinkCallbacks:
    """Whom to tell, and what time it is. All are called on the links' thread."""

    on_change: Callable[[Identity, LinkState, str], None]
    """Told of each change of a peer's state, and now and then of one that is as it was."""
    on_clock: Callable[[Identity, float, float], None]
    """Told by how much a peer's wall clock is ahead of ours, and by how much that may be wrong, in seconds."""
    wall_clock: Callable[[], float]
    """Seconds since 1970."""


class _Refused(LinkBroken):
    """Nothing listens at the peer's port."""


class _AnotherAgent(LinkBroken):
    """Not the agent that is sought listens at the peer's port, but another, or somebody else."""


class Link:
    """A link to one peer.

    Args:
        peer: whom to dial.
        mine: how to prove who dials.
        met: peers that have once been linked; this one is added to it.
        hooks: told of each change of state, and of the peer's clock.
        heartbeat_s: between heartbeats, and between attempts once the peer is lost or was never reached.
        context: of TLS, for a peer that has a certificate; None: one that shows none.
    """

    def __init__(
        self,
        peer: Peer,
        mine: Credential,
        met: set[Identity],
        hooks: LinkCallbacks,
        heartbeat_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._peer = peer
        self._context = context
        self._mine = mine
        self._met = met
        self._hooks = hooks
        self._heartbeat_s = heartbeat_s
        self._state: LinkState | None = None
        self._why = ""
        self._missed = 0
        self._open: LinkConnection | None = None
        self._renewed: tuple[LinkConnection, Handshake] | None = None
        """In place of one that was silent."""
        self._trouble = ""
        self._comparison = ClockComparison()
        self._outbox = PartOutbox()

    def hand_over(self, part: SnapshotPart) -> None:
        """Let the peer keep this, now or when the link is open again."""
        self._outbox.put(part)

    def when_delivered(self, then: Callable[[], None]) -> None:
        """Call this once the peer has all that it was to be handed over so far."""
        self._outbox.when_empty(then)

    def tell_again(self) -> None:
        """Say how the peer is, to who may have dropped it for a moment and heard nothing of it since."""
        if self._state is not None:
            self._hooks.on_change(self._peer.who, self._state, self._why)

    async def run(self) -> None:
        """Hold the link until the peer says goodbye, or for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beat = tasks.create_task(self._beat())
                await self._hold()
                self._state = None
                beat.cancel()
        finally:
            if self._renewed is not None:
                self._renewed[0].drop()

    async def _hold(self) -> None:
        opened = None
        while True:
            connection, session = opened or await self._open_some_time()
            why = await self._follow(connection, session)
            if why is None:
                return
            opened, self._renewed = self._renewed, None
            opened = opened or await self._open_again(why)

    async def _beat(self) -> None:
        """Count heartbeats, not time: a pause of this process is a single one."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._missed += 1
            if self._missed >= SILENT_HEARTBEATS and self._state is not LinkState.LOST:
                trouble = f": {self._trouble}" if self._trouble else ""
                self._report(LinkState.SILENT, f"no answer to {SILENT_HEARTBEATS} heartbeats{trouble}")
            if self._open is not None:
                self._open.send(FrameKind.PING, ping(clock.now()))

    async def _follow(self, connection: LinkConnection, session: Handshake) -> str | None:
        """Judge by this connection until it breaks; return why, or None after a goodbye."""
        self._met.add(self._peer.who)
        self._trouble = ""
        self._open = connection
        connection.send(FrameKind.PING, ping(clock.now()))
        delivery = asyncio.create_task(self._outbox.deliver(connection, session))
        renewal = asyncio.create_task(self._renew(connection))
        try:
            while True:
                kind, payload = await connection.receive(FrameKind.PONG, FrameKind.GOODBYE, FrameKind.KEPT)
                if kind is FrameKind.GOODBYE:
                    session.check(b"goodbye", payload)
                    return None
                if kind is FrameKind.KEPT:
                    self._outbox.note_arrival()
                    continue
                self._compare(payload)
                self._missed = 0
                self._report(LinkState.UP, "it answers")
        except LinkBroken as broken:
            return str(broken)
        finally:
            delivery.cancel()
            renewal.cancel()
            self._open = None
            connection.drop()

    async def _renew(self, connection: LinkConnection) -> None:
        """Replace a connection that is silent, once nothing has got through for as long.

        If the way was cut, TCP waits for up to minutes before it tries again what it sent.
        """
        stuck, unsent = 0, 0
        while self._renewed is None:
            await asyncio.sleep(self._heartbeat_s)
            before, unsent = unsent, connection.unsent_bytes
            stuck = stuck + 1 if unsent >= before else 0
            if min(stuck, self._missed) < SILENT_HEARTBEATS:
                continue
            with suppress(TimeoutError, LinkBroken):
                async with asyncio.timeout(SILENT_HEARTBEATS * self._heartbeat_s):
                    self._renewed = await self._dial()
        connection.drop()

    def _compare(self, pong: bytes) -> None:
        now = clock.now()
        asked, theirs = read_pong(pong, now)
        ahead = self._comparison.take(asked, now, mine=self._hooks.wall_clock(), theirs=theirs)
        if ahead is not None:
            self._hooks.on_clock(self._peer.who, ahead.ahead_s, ahead.error_s)

    async def _open_again(self, why: str) -> tuple[LinkConnection, Handshake] | None:
        """Dial a peer whose connection broke; None: it is lost."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _REOPEN_S
        pause_s, refusals, then, is_last = _AFTER_CLOSE_S, 0, "no answer", False
        while refusals < _REFUSALS:
            try:
                async with asyncio.timeout_at(give_up_at):
                    await asyncio.sleep(pause_s)
                    return await self._dial()
            except TimeoutError:
                if is_last and loop.time() - give_up_at < _LATE_S:
                    break
                # It may be this process that did not run: what counts is a try that had all of its time.
                give_up_at, is_last = loop.time() + _LAST_TRY_S, True
            except LinkBroken as broken:
                then = str(broken)
                if isinstance(broken, _AnotherAgent):
                    break
                refusals += isinstance(broken, _Refused)
            pause_s = _BETWEEN_TRIES_S
        self._trouble = then
        self._report(LinkState.LOST, f"{why}, then {then}")
        return None

    async def _open_some_time(self) -> tuple[LinkConnection, Handshake]:
        """Dial at each heartbeat until the peer is there."""
        refusals = 0
        while True:
            try:
                async with asyncio.timeout(max(self._heartbeat_s, _REOPEN_S)):
                    return await self._dial()
            except TimeoutError:
                self._trouble = "no answer"
            except LinkBroken as broken:
                self._trouble = str(broken)
                refusals += isinstance(broken, _Refused)
                if self._peer.who in self._met and (refusals >= _REFUSALS or isinstance(broken, _AnotherAgent)):
                    self._report(LinkState.LOST, self._trouble)
            await asyncio.sleep(self._heartbeat_s)

    async def _dial(self) -> tuple[LinkConnection, Handshake]:
        try:
            connection = await LinkConnection.dial(self._peer.address, self._peer.port, self._peer.cert, self._context)
        except ConnectionRefusedError:
            raise _Refused("refused") from None
        except OtherCertificate as broken:
            raise _AnotherAgent(str(broken)) from None
        except OSError as error:
            raise LinkBroken(f"unreachable ({error.strerror or error})") from None
        try:
            session, who = await introduce(connection, self._mine, self._peer.who)
        except BaseException:
            connection.drop()
            raise
        if who != self._peer.who:
            connection.drop()
            raise _AnotherAgent("another agent answers there")
        return connection, session

    def _report(self, state: LinkState, why: str) -> None:
        if state is LinkState.LOST:
            # Should it come back, it was wrongly lost: being refused then proves nothing until it was linked again.
            self._met.discard(self._peer.who)
        if state is not self._state:
            self._state, self._why = state, why
            self._hooks.on_change(self._peer.who, state, why)
