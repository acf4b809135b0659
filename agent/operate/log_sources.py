"""Where the logs of a job can be read: from its running agents, and from a directory that this machine can read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.core.view import ClusterView
from agent.links.frames import LOG_CHUNK_BYTES, LinkBroken
from agent.links.log_reader import LogHost, LogReader, ReadDeclined
from agent.links.queries import FindLogs, LogEntry, LogFiles, LogsFound, ReadLog

UNREADABLE = (LinkBroken, ReadDeclined)


def log_hosts(view: ClusterView) -> tuple[LogHost, ...]:
    """Return the running agents."""
    return tuple(LogHost.of(node.value) for node in view.nodes)


class LogSource(Protocol):
    """A place from which logs can be read."""

    is_leaving: bool
    """Whether nothing more will be written."""

    async def find(self, find: FindLogs) -> LogsFound:
        """Look for the logs of one node in one group. Raises `LinkBroken` or `ReadDeclined`."""
        ...

    async def read(self, read: ReadLog) -> bytes:
        """Read a part of a log; empty at its end. Raises `LinkBroken` or `ReadDeclined`."""
        ...


@dataclass(frozen=True)
class LogFinding:
    """The result of a search for the logs of one node in one group."""

    source: LogSource | None
    """Where they can be read. None: nowhere."""
    logs: tuple[LogEntry, ...] = ()
    """By rank."""
    directory: str = ""
    """Directory of these logs, or where they would be. Empty: no source answered."""
    error: str = ""
    """Why the node's own agent could not provide them. Empty: it did, or is gone."""


class LogLibrary:
    """All sources of a run's logs.

    Args:
        run: the run.
        secret: the job's secret.
        local: a directory that this machine can read; a shared one has the logs of nodes that are gone.
    """

    def __init__(self, run: str, secret: str, local: LogFiles) -> None:
        self._run = run
        self._secret = secret
        self._local = _LocalSource(local)
        self._readers: dict[str, LogReader] = {}
        self._running: frozenset[str] = frozenset()

    def update(self, hosts: Iterable[LogHost]) -> None:
        """Take in the agents that run now. Connections to others stay open, since these may still be leaving."""
        hosts = tuple(hosts)
        self._running = frozenset(host.node_id for host in hosts)
        for host in hosts:
            known = self._readers.get(host.node_id)
            if known is None or known.host != host:
                if known is not None:
                    known.close()
                self._readers[host.node_id] = LogReader(host, self._secret)

    @property
    def running(self) -> Sequence[str]:
        """Nodes whose agents run, sorted."""
        return sorted(self._running)

    @property
    def is_closing(self) -> bool:
        """Whether every agent that answered has reported that nothing more will be written."""
        return all(reader.is_leaving or not reader.is_open for reader in self._readers.values())

    async def search(self, group: int, node_id: str) -> LogFinding:
        """Look for a node's logs: with its agent, then locally, then with all others, which may share its directory."""
        find = FindLogs(run=self._run, group=group, node_id=node_id)
        own = self._readers.get(node_id) if node_id in self._running else None
        others = [self._readers[other] for other in self.running if other != node_id]
        found, error = await _ask(own, find) if own is not None else (None, "")
        if found is not None and found.logs:
            return LogFinding(own, found.logs, found.directory)
        sources: list[LogSource] = [self._local, *others]
        answers = [found, *(answer for answer, _ in await asyncio.gather(*(_ask(each, find) for each in sources)))]
        directory = next((answer.directory for answer in (*answers[:1], *answers[2:]) if answer is not None), "")
        for source, answer in zip(sources, answers[1:], strict=True):
            if answer is not None and answer.logs:
                return LogFinding(source, answer.logs, answer.directory, error)
        return LogFinding(None, directory=directory, error=error)

    def start_of(self, group: int, node_id: str, rank: int) -> ReadLog:
        """Return the request that reads a log from its beginning."""
        return ReadLog(run=self._run, group=group, node_id=node_id, rank=rank, offset=0)

    def close(self) -> None:
        """Close all connections."""
        for reader in self._readers.values():
            reader.close()


async def _ask(source: LogSource, find: FindLogs) -> tuple[LogsFound | None, str]:
    """Return what a source has, or why it could not answer."""
    try:
        return await source.find(find), ""
    except UNREADABLE as error:
        return None, str(error)


class _LocalSource:
    """The archive that this machine can read, as a log source."""

    is_leaving = False

    def __init__(self, archive: LogFiles) -> None:
        self._archive = archive

    async def find(self, find: FindLogs) -> LogsFound:
        try:
            return self._archive.find(find)
        except OSError as error:
            raise ReadDeclined(error.strerror or str(error)) from None

    async def read(self, read: ReadLog) -> bytes:
        try:
            return self._archive.read(read, LOG_CHUNK_BYTES)
        except OSError as error:
            raise ReadDeclined(error.strerror or str(error)) from None
