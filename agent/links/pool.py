"""All links of this agent, on one thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent.core.model import LinkState
from agent.core.records import Identity
from agent.links.dialler import Link, LinkCallbacks, Peer
from agent.links.frames import LinkTls, in_the_clear
from agent.links.handshake import Credential
from agent.links.listener import Listener
from agent.links.log_server import LogServer
from agent.links.part_sender import PartAddress
from agent.links.queries import LiveRanks, LogFiles
from agent.links.snapshot_parts import PartId, SnapshotPart, id_of
from agent.links.sockets import listen
from agent.observe.log import InternalErrors

_MAX_REMEMBERED = 1024


@dataclass(frozen=True)
class _HoldLinks:
    credential: Credential
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class _CloseLinks:
    goodbye: bool


class LinkPool:
    """Listens at once; dials and answers no agent before the first `hold`. Methods may be called from any thread.

    All callbacks are called on the links' thread, so they may not block.

    Args:
        on_change: receives each peer that is now up, silent or lost, and the reason. Shortly after a `hold` it can
            still be called for a peer that was just dropped.
        on_clock: receives by how much a peer's wall clock is ahead of ours, and the bound of that error, in seconds:
            at the first measurement, and whenever it has changed noticeably.
        on_part: receives each snapshot part that a peer sends.
        log_files: the logs that readers may read.
        live_ranks: returns the state of this node's ranks, for readers.
        is_loop_alive: whether the agent's loop completed a turn recently; heartbeats are answered only while it is.
        heartbeat_s: time between two heartbeats on a link. A peer is silent after three without an answer.
        wall_clock: returns seconds since 1970.
        tls: encryption of the links. None: only links to peers with a certificate are encrypted.
        part_port: port at which this agent takes large snapshot parts; 0: it takes none.
    """

    def __init__(  # noqa: PLR0913 - one per callback or setting
        self,
        *,
        on_change: Callable[[Identity, LinkState, str], None],
        on_clock: Callable[[Identity, float, float], None],
        on_part: Callable[[SnapshotPart], None],
        log_files: LogFiles,
        live_ranks: Callable[[], LiveRanks],
        is_loop_alive: Callable[[], bool],
        heartbeat_s: float,
        wall_clock: Callable[[], float] = time.time,
        tls: LinkTls | None = None,
        part_port: int = 0,
    ) -> None:
        self._tls = tls or in_the_clear()
        self._part_port = part_port
        self._callbacks = LinkCallbacks(self._on_link_change, on_clock, wall_clock)
        self._on_change = on_change
        self._on_part = on_part
        self._log_files = log_files
        self._live_ranks = live_ranks
        self._is_loop_alive = is_loop_alive
        self._heartbeat_s = heartbeat_s
        self._socket = listen()
        self.port: int = self._socket.getsockname()[1]
        """Port at which other agents reach this one, on every interface."""
        self._request: _HoldLinks | _CloseLinks | None = None
        self._has_request = asyncio.Event()
        self._lock = threading.Lock()
        self._credential: Credential | None = None
        self._links: dict[Peer, tuple[Link, asyncio.Task[None]]] = {}
        self._linked_before: set[Identity] = set()
        self._unstored: dict[int, tuple[PartId, Callable[[], None]]] = {}
        """By rank: its newest part that no peer has stored yet, and what to call then."""
        self._mishaps = InternalErrors("the links to other agents")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_mishap)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def hold(self, secret: str, me: Identity, peers: tuple[Peer, ...]) -> None:
        """Hold links to these peers and no others. Links that exist already are kept, and their states reported again.

        Returns at once. Of several calls in quick succession only the last is carried out.
        """
        self._post(_HoldLinks(Credential(secret.encode(), me), peers))

    def close(self, *, goodbye: bool = True) -> None:
        """End all links and the thread. Without a goodbye, the peers see the same as if the agent had been killed."""
        self._post(_CloseLinks(goodbye))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def send_part(self, part: SnapshotPart, on_end: Callable[[], None] = lambda: None) -> None:
        """Send a snapshot part to every peer. Returns at once.

        Args:
            part: the part.
            on_end: called once on the links' thread: when one peer has stored the part, or when none is expected to
                soon, because all are silent or lost. Not called if a newer part of the same rank is sent before.
        """
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._send_part, part, on_end)

    def part_address(self, who: Identity) -> PartAddress | None:
        """Return where a peer takes large snapshot parts. None: there was no link to it yet, or it takes none."""
        for peer, (link, _) in tuple(self._links.items()):
            if peer.identity == who and link.part_port and self._credential is not None:
                return PartAddress(self._credential, peer.address, link.part_port, peer.cert)
        return None

    def when_delivered(self, then: Callable[[], None]) -> None:
        """Call `then` on the links' thread once every peer has stored all parts; never if a peer is dropped before."""
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._when_delivered, then)

    def _post(self, request: _HoldLinks | _CloseLinks) -> None:
        with self._lock:
            if not isinstance(self._request, _CloseLinks):
                self._request = request
        with suppress(RuntimeError):  # the thread has ended: it was closed, or failed with an error that was logged
            self._loop.call_soon_threadsafe(self._has_request.set)

    def _on_mishap(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._mishaps.report(context.get("exception") or RuntimeError(context["message"]))

    # On the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            listener = Listener(
                self._socket,
                tasks,
                LogServer(self._log_files, self._live_ranks, self._mishaps),
                is_loop_alive=self._is_loop_alive,
                wall_clock=self._callbacks.wall_clock,
                on_part=self._on_part,
                tls=self._tls,
                part_port=self._part_port,
            )
            goodbye = False
            try:
                while isinstance(request := await self._next_request(), _HoldLinks):
                    await self._apply(request, listener, tasks)
                goodbye = request.goodbye
            finally:
                self._drop_all_but(())
                await listener.close(goodbye=goodbye)

    def _send_part(self, part: SnapshotPart, on_end: Callable[[], None]) -> None:
        sent = id_of(part)
        self._unstored[part.rank] = sent, on_end
        for link, _ in self._links.values():
            link.send_part(part)
            link.when_stored(partial(self._end_part, sent), sent)
        self._end_hopeless_parts()

    def _end_part(self, part: PartId) -> None:
        _, rank = part
        newest, on_end = self._unstored.get(rank, (None, None))
        if on_end is not None and newest == part:
            del self._unstored[rank]
            on_end()

    def _end_hopeless_parts(self) -> None:
        for part, _ in tuple(self._unstored.values()):
            if not any(link.will_store(part) for link, _ in self._links.values()):
                self._end_part(part)

    def _on_link_change(self, who: Identity, state: LinkState, reason: str) -> None:
        self._on_change(who, state, reason)
        self._end_hopeless_parts()

    def _when_delivered(self, then: Callable[[], None]) -> None:
        awaited = set(self._links)

        def on_stored(peer: Peer) -> None:
            awaited.remove(peer)
            if not awaited:
                then()

        if not awaited:
            then()
        for peer in tuple(awaited):
            self._links[peer][0].when_stored(partial(on_stored, peer))

    async def _next_request(self) -> _HoldLinks | _CloseLinks:
        while True:
            await self._has_request.wait()
            self._has_request.clear()
            if self._request is not None:
                return self._request

    async def _apply(self, hold: _HoldLinks, listener: Listener, tasks: asyncio.TaskGroup) -> None:
        if hold.credential != self._credential:
            self._credential = hold.credential
            self._drop_all_but(())
            await listener.answer_as(hold.credential)
        self._drop_all_but(hold.peers)
        for peer in hold.peers:
            if peer in self._links:
                link, _ = self._links[peer]
                link.report_again()  # the caller may have dropped it by a request that was never carried out
            else:
                link = Link(
                    peer, hold.credential, self._linked_before, self._callbacks, self._heartbeat_s, self._tls.dialling
                )
                self._links[peer] = link, tasks.create_task(self._run_link(link))
        if len(self._linked_before) > _MAX_REMEMBERED:
            self._linked_before &= {peer.identity for peer in hold.peers}
        self._end_hopeless_parts()

    async def _run_link(self, link: Link) -> None:
        await link.run()
        self._end_hopeless_parts()

    def _drop_all_but(self, peers: tuple[Peer, ...]) -> None:
        for peer in tuple(self._links):
            if peer not in peers:
                self._links.pop(peer)[1].cancel()
