"""What the ranks of a job have said, from whichever node it lies on.

Each node has the logs of its own ranks under its own `--log_dir`. Living agents show theirs, at the port where they
answer each other; those of a node that is gone are found where nodes share a directory, or in the one given here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agent.core.model import ClusterView
from agent.errors import ConfigError
from agent.local_etcd.kept_records import KeptStore
from agent.operate.follow import Follower, following
from agent.operate.jobs import opened, read_incidents, read_view
from agent.operate.log_library import LogLibrary, shelves
from agent.operate.log_tail import LogTail
from agent.operate.node_logs import GroupNode, LogSelection, NodeLogs, places, places_of
from agent.operate.target import Target
from agent.store.api import Store
from agent.store.keys import JobKeys
from agent.workers.rank_logs import LogArchive

_LINES_BEFORE = 20
_AT_ONCE = 32
"""Nodes that are asked."""


def show_logs(target: Target, wanted: LogSelection) -> int:
    """Print logs; return the exit code. Raises `ConfigError` if there is no such job, group or rank, or no log."""
    with opened(target, only_live=False) as (store, keys):
        job = _JobLogs(store, keys, wanted)
        if not wanted.is_followed:
            asyncio.run(job.show())
            return 0
        with following(store, keys) as follower:
            asyncio.run(job.follow(follower))
    return 0


class _JobLogs:
    def __init__(self, store: Store, keys: JobKeys, wanted: LogSelection) -> None:
        self._store = store
        self._keys = keys
        self._wanted = wanted
        self._view: ClusterView = read_view(store, keys)
        assert self._view.spec is not None  # noqa: S101 - a job without one is not found in the first place
        self._spec = self._view.spec.value
        self._group = self._view.group.value if self._view.group is not None else None

    async def show(self) -> None:
        """Print a group's logs one after the other."""
        library = self._library()
        try:
            number = self._wanted.group or self._newest()
            missed = await self._show(library, number, self._wanted.lines)
        finally:
            library.close()
        if missed is not None:
            why = "; ".join(missed) or f"nobody has a log of group {number}"
            raise ConfigError(f"job {self._keys.job_id!r}: {why}; where that directory is seen, name it with --log_dir")

    async def follow(self, follower: Follower[ClusterView]) -> None:
        """Print the group's logs, and go on until the job ends."""
        library = self._library()
        lines = _LINES_BEFORE if self._wanted.lines is None else self._wanted.lines
        try:
            current = self._group.number if self._group is not None else 0
            first = self._wanted.group or current
            if self._wanted.group is not None:
                self._places(library, first)  # a mistake is told before anything is shown
            for number in range(first, current):
                await self._show(library, number, lines if number == first else None)
            await LogTail(library, self._wanted, self._spec.run).run(follower, lines if first == current else None)
        finally:
            library.close()

    def _library(self) -> LogLibrary:
        usual = self._store.log_dir if isinstance(self._store, KeptStore) else Path("log")
        archive = LogArchive((self._wanted.log_dir or usual).absolute(), self._keys.job_id)
        library = LogLibrary(self._spec.run, self._spec.secret, archive)
        library.update(shelves(self._view))
        return library

    async def _show(self, library: LogLibrary, number: int, lines: int | None) -> list[str] | None:
        """Print a group's logs. None: there were some. Else: why not."""
        every = [NodeLogs(library, place, self._wanted, lines) for place in self._places(library, number)]
        for some in (every[at : at + _AT_ONCE] for at in range(0, len(every), _AT_ONCE)):
            await asyncio.gather(*(logs.look() for logs in some))  # some nodes may be slow to answer, or not do so
            for logs in some:
                await logs.show_once()
        complaints = [complaint for logs in every for complaint in logs.complaints()]
        if not any(logs.has_any for logs in every):
            return complaints
        for complaint in complaints:
            click.echo(f"elastic-agent: {complaint}", err=True)
        return None

    def _newest(self) -> int:
        """The newest group that trained, or trains. Raises `ConfigError` if there is none."""
        if self._group is not None and self._group.members:
            return self._group.number
        trained = [each.group for each in read_incidents(self._store, self._keys) if each.members]
        if not trained:
            raise ConfigError(f"job {self._keys.job_id!r} has not trained yet: there are no logs")
        return trained[-1]

    def _places(self, library: LogLibrary, number: int) -> tuple[GroupNode, ...]:
        """The nodes of a group whose logs are wanted. Raises `ConfigError` if there is no such group, or rank."""
        newest = self._group.number if self._group is not None else 0
        if not self._spec.first_group <= number <= newest:
            there = f"{self._spec.first_group} to {newest}" if newest else "none"
            raise ConfigError(f"job {self._keys.job_id!r} has no group {number} in this run; its groups: {there}")
        found = self._recorded(number)
        if not found:  # too long ago: who lives may have some
            found = tuple(GroupNode(number, node_id, None) for node_id in library.living)
        elif not any(place.has(self._wanted.rank) for place in found):
            last = max(max(place.ranks or (0,)) for place in found)
            raise ConfigError(f"group {number} has no rank {self._wanted.rank}: its ranks are 0 to {last}")
        return tuple(place for place in found if place.has(self._wanted.rank))

    def _recorded(self, number: int) -> tuple[GroupNode, ...]:
        if self._group is not None and self._group.number == number:
            return places_of(self._group)
        incidents = (each for each in read_incidents(self._store, self._keys) if each.group == number)
        incident = next(incidents, None)
        members = incident.members if incident is not None else ()
        return places(number, ((place.node_id, place.nproc) for place in members))
