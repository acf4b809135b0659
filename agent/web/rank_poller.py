"""Asks the agents how their ranks are, over the way on which logs are read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from agent.core.model import Node
from agent.links.frames import LinkBroken
from agent.links.log_reader import LogHost, LogReader, ReadDeclined
from agent.links.queries import LiveRanks

_OLD_S = 5.0
"""What was heard before that says nothing of now."""


@dataclass(frozen=True)
class _LastAnswer:
    pulse: LiveRanks
    at: float


class RankPoller:
    """What the agents said last. One that does not answer holds up nobody."""

    def __init__(self) -> None:
        self._readers: dict[LogHost, LogReader] = {}
        self._secret = ""
        self._asking: dict[LogHost, asyncio.Task[None]] = {}
        self._heard: dict[LogHost, _LastAnswer] = {}

    async def ask(self, nodes: Iterable[Node], secret: str, within_s: float) -> dict[str, LiveRanks]:
        """Ask these, wait for so long at most, and tell what is known of them by node id."""
        if secret != self._secret:
            self.keep_only(())
            self._secret = secret
        shelves = [_shelf(node) for node in nodes]
        for shelf in shelves:
            if shelf not in self._asking:
                self._readers.setdefault(shelf, LogReader(shelf, secret))
                self._asking[shelf] = task = asyncio.create_task(self._ask(shelf))
                task.add_done_callback(partial(self._forget, shelf))
        if shelves:
            await asyncio.wait([self._asking[shelf] for shelf in shelves], timeout=within_s)
        since = time.monotonic() - _OLD_S
        heard = ((shelf.node_id, self._heard.get(shelf)) for shelf in shelves)
        return {node_id: each.pulse for node_id, each in heard if each is not None and each.at >= since}

    def keep_only(self, nodes: Iterable[Node]) -> None:
        """Hang up at all others."""
        for shelf in self._readers.keys() - {_shelf(node) for node in nodes}:
            if shelf in self._asking:
                self._asking.pop(shelf).cancel()
            self._readers.pop(shelf).close()
            self._heard.pop(shelf, None)

    async def _ask(self, shelf: LogHost) -> None:
        reader = self._readers[shelf]
        with suppress(LinkBroken, ReadDeclined):
            pulse = await reader.live_ranks()
            if self._readers.get(shelf) is reader:
                self._heard[shelf] = _LastAnswer(pulse, time.monotonic())

    def _forget(self, shelf: LogHost, task: asyncio.Task[None]) -> None:
        if self._asking.get(shelf) is task:
            del self._asking[shelf]


def _shelf(node: Node) -> LogHost:
    return LogHost(node.node_id, node.address, node.link, node.link_cert)
