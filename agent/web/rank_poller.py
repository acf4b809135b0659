"""The live state of ranks: asked from the agents over the links on which logs are read, and the rate of steps."""

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

_ANSWER_VALID_S = 5.0
"""An older answer is not used."""
_STANDSTILL_FACTOR = 3.0
"""After this many usual intervals without a new step the rate is 0."""
_POLL_S = 1.0


@dataclass(frozen=True)
class _LastAnswer:
    live: LiveRanks
    at: float


class RankPoller:
    """Asks agents for the state of their ranks. An agent that does not answer delays no other."""

    def __init__(self) -> None:
        self._readers: dict[LogHost, LogReader] = {}
        self._secret = ""
        self._asking: dict[LogHost, asyncio.Task[None]] = {}
        self._answers: dict[LogHost, _LastAnswer] = {}

    async def ask(self, nodes: Iterable[Node], secret: str, within_s: float) -> dict[str, LiveRanks]:
        """Ask these nodes, wait at most `within_s`, and return the newest valid answers by node id."""
        if secret != self._secret:
            self.keep_only(())
            self._secret = secret
        hosts = [LogHost.of(node) for node in nodes]
        for host in hosts:
            if host not in self._asking:
                self._readers.setdefault(host, LogReader(host, secret))
                self._asking[host] = task = asyncio.create_task(self._ask(host))
                task.add_done_callback(partial(self._forget, host))
        if hosts:
            await asyncio.wait([self._asking[host] for host in hosts], timeout=within_s)
        since = time.monotonic() - _ANSWER_VALID_S
        answers = ((host.node_id, self._answers.get(host)) for host in hosts)
        return {node_id: each.live for node_id, each in answers if each is not None and each.at >= since}

    def keep_only(self, nodes: Iterable[Node]) -> None:
        """Close the connections to all other nodes."""
        for host in self._readers.keys() - {LogHost.of(node) for node in nodes}:
            if host in self._asking:
                self._asking.pop(host).cancel()
            self._readers.pop(host).close()
            self._answers.pop(host, None)

    async def _ask(self, host: LogHost) -> None:
        reader = self._readers[host]
        with suppress(LinkBroken, ReadDeclined):
            live = await reader.live_ranks()
            if self._readers.get(host) is reader:
                self._answers[host] = _LastAnswer(live, time.monotonic())

    def _forget(self, host: LogHost, task: asyncio.Task[None]) -> None:
        if self._asking.get(host) is task:
            del self._asking[host]


class StepRate:
    """Steps per second, from polls of the newest step. A step may take much longer than the time between two polls.

    No clock here: `now` is in seconds, on any one clock.
    """

    def __init__(self) -> None:
        self.new_steps = 0
        """Steps made for the first time; replayed steps are not counted."""
        self._highest: int | None = None
        self._step = 0
        self._at = 0.0
        self._interval_s = _POLL_S
        self._rate = 0.0

    def update(self, now: float, step: int) -> float:
        """Take the newest step of all ranks, and return steps per second. `step` 0: none in this group yet."""
        if self._highest is None or step < self._step:
            self._restart(now, step)
        elif step > self._step:
            self._interval_s = now - self._at
            self._rate = (step - self._step) / self._interval_s if self._interval_s > 0.0 else 0.0
            self._step, self._at = step, now
        elif now - self._at > _STANDSTILL_FACTOR * max(self._interval_s, _POLL_S):
            self._rate = 0.0
        if self._highest is not None and step > self._highest:
            self.new_steps += step - self._highest
        self._highest = max(step, self._highest or 0)
        return self._rate

    def _restart(self, now: float, step: int) -> None:
        self._step, self._at, self._rate = step, now, 0.0
