"""The dialling end of a link: opens it, judges the peer by it, and opens it again when it breaks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from agent import clock
from agent.core.model import LinkState
from agent.core.neighbours import SILENT_HEARTBEATS
from agent.core.records import Identity
from agent.links.clocks import ClockComparison
from agent.links.frames import FrameKind, LinkBroken, LinkConnection, OtherCertificate, ping, read_pong
from agent.links.handshake import Credential, LinkSession, handshake_as_dialler
from agent.links.snapshot_parts import PartId, PartOutbox, SnapshotPart

_REOPEN_S = 0.3
_AFTER_CLOSE_S = 0.01  # a process that is killed closes its sockets one by one
_BETWEEN_ATTEMPTS_S = 0.05
_LAST_ATTEMPT_S = 0.1
_LATE_S = 0.1
_REFUSALS = 2


@dataclass(frozen=True)
class Peer:
    """An agent to hold a link to."""

    identity: Identity
    address: str
    """An IP address, because the links' thread must not wait for DNS."""
    port: int
    cert: str = ""
    """Fingerprint of the certificate that the peer shows; empty: nothing is encrypted."""


@dataclass(frozen=True)
class LinkCallbacks:
    """What links call. All are called on the links' thread, so they may not block."""

    on_change: Callable[[Identity, LinkState, str], None]
    """Receives each change of a peer's state, with the reason, and sometimes an unchanged state again."""
    on_clock: Callable[[Identity, float, float], None]
    """Receives by how much a peer's wall clock is ahead of ours, and the bound of that error, in seconds."""
    wall_clock: Callable[[], float]
    """Returns the wall time in seconds since 1970."""


class _Refused(LinkBroken):
    """No process listens at the peer's port."""


class _AnotherAgent(LinkBroken):
    """Another agent, or another program, listens at the peer's port."""


class Link:
    """A link to one peer.

    Args:
        peer: the agent to dial.
        credential: proves the identity of this agent.
        linked_before: peers that have been linked at least once; the link adds this peer.
        callbacks: receive each change of state, and the offset of the peer's clock.
        heartbeat_s: time between heartbeats, and between attempts while the peer is lost or was never reached.
        context: of TLS, for a peer that has a certificate; None: one that shows no certificate.
    """

    def __init__(
        self,
        peer: Peer,
        credential: Credential,
        linked_before: set[Identity],
        callbacks: LinkCallbacks,
        heartbeat_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._peer = peer
        self._context = context
        self._credential = credential
        self._linked_before = linked_before
        self._callbacks = callbacks
        self._heartbeat_s = heartbeat_s
        self._state: LinkState | None = None
        self._reason = ""
        self._is_over = False
        """The peer has said goodbye."""
        self._unanswered = 0
        self._current: LinkConnection | None = None
        self._replacement: tuple[LinkConnection, LinkSession] | None = None
        """Opened to replace a silent connection."""
        self._last_failure = ""
        self._comparison = ClockComparison()
        self._outbox = PartOutbox()
        self.part_port = 0
        """Port at which the peer takes large snapshot parts; 0: not known, or it takes none. Read by other threads."""

    def send_part(self, part: SnapshotPart) -> None:
        """Send a snapshot part to the peer, now or when the link is open again."""
        self._outbox.put(part)

    def when_stored(self, then: Callable[[], None], part: PartId | None = None) -> None:
        """Call `then` once the peer has stored this part; None: all that were passed to `send_part` so far."""
        self._outbox.when_stored(self._outbox.pending() if part is None else {part}, then)

    def will_store(self, part: PartId) -> bool:
        """Return whether the peer may store this part soon: it is still to be stored, and the peer is not away."""
        is_away = self._is_over or self._state in {LinkState.SILENT, LinkState.LOST}
        return not is_away and part in self._outbox.pending()

    def report_again(self) -> None:
        """Report the peer's state again: the receiver may have dropped the peer for a moment and missed a report."""
        if self._state is not None:
            self._callbacks.on_change(self._peer.identity, self._state, self._reason)

    async def run(self) -> None:
        """Hold the link until the peer says goodbye, or until the task is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                heartbeats = tasks.create_task(self._send_heartbeats())
                await self._hold()
                self._state, self._is_over = None, True
                heartbeats.cancel()
        finally:
            if self._replacement is not None:
                self._replacement[0].drop()

    async def _hold(self) -> None:
        opened = None
        while True:
            connection, session = opened or await self._open_eventually()
            reason = await self._follow(connection, session)
            if reason is None:
                return
            opened, self._replacement = self._replacement, None
            opened = opened or await self._open_again(reason)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and report a silent peer.

        Counts heartbeats instead of time, because a pause of this process, however long, is only one heartbeat.
        """
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._unanswered += 1
            if self._unanswered >= SILENT_HEARTBEATS and self._state is not LinkState.LOST:
                failure = f": {self._last_failure}" if self._last_failure else ""
                self._report(LinkState.SILENT, f"no answer to {SILENT_HEARTBEATS} heartbeats{failure}")
            if self._current is not None:
                self._current.send(FrameKind.PING, ping(clock.now()))

    async def _follow(self, connection: LinkConnection, session: LinkSession) -> str | None:
        """Judge the peer by this connection until it breaks; return the reason, or None after a goodbye."""
        self._linked_before.add(self._peer.identity)
        self._last_failure = ""
        self._current = connection
        connection.send(FrameKind.PING, ping(clock.now()))
        delivery = asyncio.create_task(self._outbox.deliver(connection, session))
        renewal = asyncio.create_task(self._renew(connection))
        try:
            while True:
                kind, payload = await connection.receive(FrameKind.PONG, FrameKind.GOODBYE, FrameKind.PART_STORED)
                if kind is FrameKind.GOODBYE:
                    session.check(b"goodbye", payload)
                    return None
                if kind is FrameKind.PART_STORED:
                    self._outbox.on_stored()
                    continue
                self._measure_clock(payload)
                self._unanswered = 0
                self._report(LinkState.UP, "it answers")
        except LinkBroken as broken:
            return str(broken)
        finally:
            delivery.cancel()
            renewal.cancel()
            self._current = None
            connection.drop()

    async def _renew(self, connection: LinkConnection) -> None:
        """Replace a silent connection once three heartbeats were unanswered and no unsent data was taken meanwhile.

        If the network was cut, TCP may wait for minutes before it retransmits.
        """
        stuck, unsent_bytes = 0, 0
        while self._replacement is None:
            await asyncio.sleep(self._heartbeat_s)
            before_bytes, unsent_bytes = unsent_bytes, connection.unsent_bytes
            stuck = stuck + 1 if unsent_bytes >= before_bytes else 0
            if min(stuck, self._unanswered) < SILENT_HEARTBEATS:
                continue
            with suppress(TimeoutError, LinkBroken):
                async with asyncio.timeout(SILENT_HEARTBEATS * self._heartbeat_s):
                    self._replacement = await self._dial()
        connection.drop()

    def _measure_clock(self, pong: bytes) -> None:
        now = clock.now()
        asked, theirs = read_pong(pong, now)
        offset = self._comparison.take(asked, now, mine=self._callbacks.wall_clock(), theirs=theirs)
        if offset is not None:
            self._callbacks.on_clock(self._peer.identity, offset.ahead_s, offset.error_s)

    async def _open_again(self, reason: str) -> tuple[LinkConnection, LinkSession] | None:
        """Dial a peer whose connection broke; return None if it is lost."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _REOPEN_S
        pause_s, refusals, failure, is_last = _AFTER_CLOSE_S, 0, "no answer", False
        while refusals < _REFUSALS:
            try:
                async with asyncio.timeout_at(give_up_at):
                    await asyncio.sleep(pause_s)
                    return await self._dial()
            except TimeoutError:
                if is_last and loop.time() - give_up_at < _LATE_S:
                    break
                # Perhaps this process did not run. Only an attempt that had all of its time counts.
                give_up_at, is_last = loop.time() + _LAST_ATTEMPT_S, True
            except LinkBroken as broken:
                failure = str(broken)
                if isinstance(broken, _AnotherAgent):
                    break
                refusals += isinstance(broken, _Refused)
            pause_s = _BETWEEN_ATTEMPTS_S
        self._last_failure = failure
        self._report(LinkState.LOST, f"{reason}, then {failure}")
        return None

    async def _open_eventually(self) -> tuple[LinkConnection, LinkSession]:
        """Dial at each heartbeat until the link is open."""
        refusals = 0
        while True:
            try:
                async with asyncio.timeout(max(self._heartbeat_s, _REOPEN_S)):
                    return await self._dial()
            except TimeoutError:
                self._last_failure = "no answer"
            except LinkBroken as broken:
                self._last_failure = str(broken)
                refusals += isinstance(broken, _Refused)
                if self._peer.identity in self._linked_before and (
                    refusals >= _REFUSALS or isinstance(broken, _AnotherAgent)
                ):
                    self._report(LinkState.LOST, self._last_failure)
            await asyncio.sleep(self._heartbeat_s)

    async def _dial(self) -> tuple[LinkConnection, LinkSession]:
        try:
            connection = await LinkConnection.dial(self._peer.address, self._peer.port, self._peer.cert, self._context)
        except ConnectionRefusedError:
            raise _Refused("refused") from None
        except OtherCertificate as broken:
            raise _AnotherAgent(str(broken)) from None
        except OSError as error:
            raise LinkBroken(f"unreachable ({error.strerror or error})") from None
        try:
            session, answering, part_port = await handshake_as_dialler(
                connection, self._credential, self._peer.identity
            )
        except BaseException:
            connection.drop()
            raise
        if answering != self._peer.identity:
            connection.drop()
            raise _AnotherAgent("another agent answers there")
        self.part_port = part_port
        return connection, session

    def _report(self, state: LinkState, reason: str) -> None:
        if state is LinkState.LOST:
            # If it comes back, it was not really lost: a refusal then proves nothing until it has been linked again.
            self._linked_before.discard(self._peer.identity)
        if state is not self._state:
            self._state, self._reason = state, reason
            self._callbacks.on_change(self._peer.identity, state, reason)
