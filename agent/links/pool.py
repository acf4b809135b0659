"""All links of this agent, on one thread of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent.core.model import Identity, LinkState
from agent.links.dialler import Link, LinkCallbacks, Peer
from agent.links.frames import Credential, LinkTls, in_the_clear
from agent.links.listener import BACKLOG, Listener
from agent.links.live_ranks import LiveRanks
from agent.links.log_server import LogFiles, LogServer
from agent.links.snapshot_parts import SnapshotPart
from agent.observe.log import InternalErrors

_REMEMBERED = 1024


@dataclass(frozen=True)
class _HoldLinks:
    mine: Credential
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class _CloseLinks:
    goodbye: bool


class LinkPool:
    """Listens at once; dials and answers nobody before the first `hold`. Methods may be called from any thread.

    Args:
        on_change: told who is now up, silent or lost, and why. Called on the links' thread, so it may not block, and
            shortly after a `hold` it can still be called for a peer that was just dropped.
        on_clock: told by how much a peer's wall clock is ahead of ours, and by how much that may be wrong, in seconds:
            when that is first known, and whenever it has changed by something. Called as `on_change` is.
        on_part: given what a peer hands over to be kept. Called as `on_change` is.
        archive: the logs that readers may see.
        pulse: how this node's ranks are, for readers. Called as `on_change` is.
        is_loop_alive: whether the agent's loop completed a turn recently; without that no heartbeat is answered.
        heartbeat_s: between two heartbeats on a link. A peer is silent after three without an answer.
        wall_clock: seconds since 1970.
        tls: how they are encrypted. None: only those that peers with a certificate answer.
    """

    def __init__(  # noqa: PLR0913 - one a thing that it asks or tells
        self,
        *,
        on_change: Callable[[Identity, LinkState, str], None],
        on_clock: Callable[[Identity, float, float], None],
        on_part: Callable[[SnapshotPart], None],
        archive: LogFiles,
        pulse: Callable[[], LiveRanks],
        is_loop_alive: Callable[[], bool],
        heartbeat_s: float,
        wall_clock: Callable[[], float] = time.time,
        tls: LinkTls | None = None,
    ) -> None:
        self._tls = tls or in_the_clear()
        self._hooks = LinkCallbacks(on_change, on_clock, wall_clock)
        self._on_part = on_part
        self._archive = archive
        self._pulse = pulse
        self._is_loop_alive = is_loop_alive
        self._heartbeat_s = heartbeat_s
        self._listener = _listen()
        self.port: int = self._listener.getsockname()[1]
        """Where other agents reach this one, on every interface."""
        self._order: _HoldLinks | _CloseLinks | None = None
        self._ordered = asyncio.Event()
        self._lock = threading.Lock()
        self._mine: Credential | None = None
        self._links: dict[Peer, tuple[Link, asyncio.Task[None]]] = {}
        self._met: set[Identity] = set()
        self._mishaps = InternalErrors("the links to other agents")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_mishap)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def hold(self, secret: str, me: Identity, peers: tuple[Peer, ...]) -> None:
        """Have these links and no others from now on; those that stay are left alone, and told of again.

        Returns at once. Of orders that follow each other quickly only the last is carried out.
        """
        self._tell(_HoldLinks(Credential(secret.encode(), me), peers))

    def close(self, *, goodbye: bool = True) -> None:
        """End all links and the thread; without a goodbye the peers see what they would see of a killed agent."""
        self._tell(_CloseLinks(goodbye))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def hand_over(self, part: SnapshotPart) -> None:
        """Let every peer keep this. Returns at once."""
        with suppress(RuntimeError):  # as below
            self._loop.call_soon_threadsafe(self._hand_over, part)

    def when_delivered(self, then: Callable[[], None]) -> None:
        """Call this on the links' thread once every peer has all that was handed over; not if one is dropped before."""
        with suppress(RuntimeError):  # as below
            self._loop.call_soon_threadsafe(self._when_delivered, then)

    def _tell(self, order: _HoldLinks | _CloseLinks) -> None:
        with self._lock:
            if not isinstance(self._order, _CloseLinks):
                self._order = order
        with suppress(RuntimeError):  # the thread has ended: closed before, or by an error that its hook told of
            self._loop.call_soon_threadsafe(self._ordered.set)

    def _on_mishap(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._mishaps.report(context.get("exception") or RuntimeError(context["message"]))

    # On the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            door = Listener(
                self._listener,
                tasks,
                LogServer(self._archive, self._pulse, self._mishaps),
                is_loop_alive=self._is_loop_alive,
                wall_clock=self._hooks.wall_clock,
                on_part=self._on_part,
                tls=self._tls,
            )
            goodbye = False
            try:
                while isinstance(order := await self._next_order(), _HoldLinks):
                    await self._apply(order, door, tasks)
                goodbye = order.goodbye
            finally:
                self._drop_all_but(())
                await door.close(goodbye=goodbye)

    def _hand_over(self, part: SnapshotPart) -> None:
        for link, _ in self._links.values():
            link.hand_over(part)

    def _when_delivered(self, then: Callable[[], None]) -> None:
        awaited = set(self._links)

        def arrived(peer: Peer) -> None:
            awaited.remove(peer)
            if not awaited:
                then()

        if not awaited:
            then()
        for peer in tuple(awaited):
            self._links[peer][0].when_delivered(partial(arrived, peer))

    async def _next_order(self) -> _HoldLinks | _CloseLinks:
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            if self._order is not None:
                return self._order

    async def _apply(self, hold: _HoldLinks, door: Listener, tasks: asyncio.TaskGroup) -> None:
        if hold.mine != self._mine:
            self._mine = hold.mine
            self._drop_all_but(())
            await door.answer_as(hold.mine)
        self._drop_all_but(hold.peers)
        for peer in hold.peers:
            if peer in self._links:
                self._links[peer][0].tell_again()  # orders in between, which dropped it, may never have come to be
            else:
                link = Link(peer, hold.mine, self._met, self._hooks, self._heartbeat_s, self._tls.dialling)
                self._links[peer] = link, tasks.create_task(link.run())
        if len(self._met) > _REMEMBERED:
            self._met &= {peer.who for peer in hold.peers}

    def _drop_all_but(self, peers: tuple[Peer, ...]) -> None:
        for peer in tuple(self._links):
            if peer not in peers:
                self._links.pop(peer)[1].cancel()


def _listen() -> socket.socket:
    """Listen on all interfaces, at a port that the kernel chooses. No child process inherits the socket."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # compiled in, but switched off on this machine
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=BACKLOG)
