"""Following a job's logs: as they grow, from group to group, until the job ends."""

from __future__ import annotations

import asyncio
import time

import click

from agent.core.model import ClusterView
from agent.operate.follow import Follower
from agent.operate.log_library import LogLibrary, shelves
from agent.operate.node_logs import GroupNode, LogSelection, NodeLogs, places_of

_POLL_S = 0.2
_LOOK_AGAIN_S = 2.0
"""Others are asked for the log of a node that is gone."""
_LINGER_S = 30.0
"""So long workers may still speak once their group has been followed by another."""
_END_WITHIN_S = 3.0
"""So soon agents leave an ended job."""


class LogTail:
    """Follows a job's logs.

    Args:
        library: where they are.
        wanted: which of them.
        run: the job's; another one is another story.
    """

    def __init__(self, library: LogLibrary, wanted: LogSelection, run: str) -> None:
        self._library = library
        self._wanted = wanted
        self._run = run
        self._over_at: dict[int, float] = {}
        """When a group's workers have had their last word at the latest, once that is known."""
        self._ended_at: float | None = None
        self._newest = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._seen: set[str] = set()
        """Nodes."""
        self._told: set[str] = set()

    async def run(self, follower: Follower[ClusterView], lines: int | None) -> None:
        """Print what is written from now on, until the job ends.

        Args:
            follower: of the job.
            lines: so many lines of what is there already. None: all.

        Raises:
            RecordError: a record of the job cannot be read.
        """
        try:
            while self._ended_at is None or not all(task.done() for task in self._tasks):
                view = follower.next(0.0)
                if view is not None:
                    lines = self._take(view, lines)
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._tasks:
                task.cancel()

    def _take(self, view: ClusterView, lines: int | None) -> int | None:
        """Take in a view; return how much is to be shown of the next group's logs."""
        self._library.update(shelves(view))
        is_same_run = view.spec is not None and view.spec.value.run == self._run
        if (view.result is not None or not is_same_run) and self._ended_at is None:
            self._ended_at = time.monotonic()
            why = view.result.value.reason if view.result is not None else "another run has begun"
            click.echo(f"elastic-agent: the job has ended: {why}", err=True)
        group = view.group.value if view.group is not None else None
        if group is None or group.run != self._run or group.number <= self._newest:
            return lines
        missed = range(self._newest + 1 if self._newest else group.number, group.number)
        for number in (self._newest, *missed):
            self._over_at[number] = time.monotonic() + _LINGER_S
        self._newest = group.number
        self._seen |= {*self._library.living, *(member.node_id for member in group.members)}
        # Of a group that came and went unseen nobody says here who was in it: whoever was seen may have been.
        unseen = (GroupNode(number, node_id, None) for number in missed for node_id in sorted(self._seen))
        for place in (*unseen, *places_of(group)):
            if place.has(self._wanted.rank):
                self._tasks.append(asyncio.create_task(self._tend(place, lines)))
        return None

    async def _tend(self, place: GroupNode, lines: int | None) -> None:
        """Print one node's logs of one group as they grow."""
        logs = NodeLogs(self._library, place, self._wanted, lines)
        look_at = 0.0
        while True:
            is_last = self._is_over(place.group)
            now = time.monotonic()
            if not logs.is_complete and (now >= look_at or not logs.is_node_gone):
                await logs.look()
                look_at = now + _LOOK_AGAIN_S
            await logs.show_more()
            if is_last or logs.is_node_gone:
                self._tell(logs)
            if is_last:
                logs.end()
                return
            await asyncio.sleep(_POLL_S)

    def _is_over(self, group: int) -> bool:
        """Whether what is read from now on is all that there will be of a group."""
        now = time.monotonic()
        if self._ended_at is not None:
            return self._library.is_closing or now >= self._ended_at + _END_WITHIN_S
        return now >= self._over_at.get(group, now + 1.0)

    def _tell(self, logs: NodeLogs) -> None:
        for complaint in logs.complaints():
            if complaint not in self._told:
                self._told.add(complaint)
                click.echo(f"elastic-agent: {complaint}", err=True)
