"""Where the logs of a job can be read: from its living agents, and from a directory that is seen here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.core.model import ClusterView
from agent.links.frames import LOG_CHUNK_BYTES, LinkBroken
from agent.links.log_reader import LogHost, LogReader, ReadDeclined
from agent.links.queries import FindLogs, LogEntry, LogFiles, LogsFound, ReadLog

UNREADABLE = (LinkBroken, ReadDeclined)


def shelves(view: ClusterView) -> tuple[LogHost, ...]:
    """The agents that live."""
    nodes = (node.value for node in view.nodes)
    return tuple(LogHost(node.node_id, node.address, node.link, node.link_cert) for node in nodes)


class LogSource(Protocol):
    """Somebody who reads logs for us."""

    is_leaving: bool
    """All that will be written has been."""

    async def find(self, find: FindLogs) -> LogsFound:
        """Look for the logs of one node in one group. Raises `LinkBroken` or `ReadDeclined`."""
        ...

    async def read(self, read: ReadLog) -> bytes:
        """Read a part of one; nothing, if it ends there. Raises `LinkBroken` or `ReadDeclined`."""
        ...


@dataclass(frozen=True)
class LogFinding:
    """Logs of one node in one group."""

    source: LogSource | None
    """Who has them. None: nobody."""
    logs: tuple[LogEntry, ...] = ()
    """By rank."""
    directory: str = ""
    """Where they lie, or where those of other nodes do; empty: nobody answered."""
    trouble: str = ""
    """Why the node's own agent, which lives, does not show them; empty: it does, or is gone."""


class LogLibrary:
    """All places where a run's logs can be read.

    Args:
        run: the run.
        secret: the job's.
        here: a directory that is seen from here; a shared one has the logs of nodes that are gone.
    """

    def __init__(self, run: str, secret: str, here: LogFiles) -> None:
        self._run = run
        self._secret = secret
        self._here = _LocalSource(here)
        self._readers: dict[str, LogReader] = {}
        self._living: frozenset[str] = frozenset()

    def update(self, shelves: Iterable[LogHost]) -> None:
        """Take in which agents live now. One that is gone is left open: it may still be leaving."""
        shelves = tuple(shelves)
        self._living = frozenset(shelf.node_id for shelf in shelves)
        for shelf in shelves:
            known = self._readers.get(shelf.node_id)
            if known is None or known.host != shelf:
                if known is not None:
                    known.close()
                self._readers[shelf.node_id] = LogReader(shelf, self._secret)

    @property
    def living(self) -> Sequence[str]:
        """Nodes whose agents live, in order."""
        return sorted(self._living)

    @property
    def is_closing(self) -> bool:
        """Whether every agent that answered at all has said that no more will be written."""
        return all(reader.is_leaving or not reader.is_open for reader in self._readers.values())

    async def search(self, group: int, node_id: str) -> LogFinding:
        """Look for a node's logs: with its agent, then here, then with all others, who may share its directory."""
        find = FindLogs(run=self._run, group=group, node_id=node_id)
        own = self._readers.get(node_id) if node_id in self._living else None
        others = [self._readers[other] for other in self.living if other != node_id]
        found, trouble = await _ask(own, find) if own is not None else (None, "")
        if found is not None and found.logs:
            return LogFinding(own, found.logs, found.directory)
        sources: list[LogSource] = [self._here, *others]
        answers = [found, *(answer for answer, _ in await asyncio.gather(*(_ask(each, find) for each in sources)))]
        directory = next((answer.directory for answer in (*answers[:1], *answers[2:]) if answer is not None), "")
        for source, answer in zip(sources, answers[1:], strict=True):
            if answer is not None and answer.logs:
                return LogFinding(source, answer.logs, answer.directory, trouble)
        return LogFinding(None, directory=directory, trouble=trouble)

    def start_of(self, group: int, node_id: str, rank: int) -> ReadLog:
        """The beginning of a log."""
        return ReadLog(run=self._run, group=group, node_id=node_id, rank=rank, offset=0)

    def close(self) -> None:
        """Hang up everywhere."""
        for reader in self._readers.values():
            reader.close()


async def _ask(source: LogSource, find: FindLogs) -> tuple[LogsFound | None, str]:
    """What it has, or why it does not say."""
    try:
        return await source.find(find), ""
    except UNREADABLE as error:
        return None, str(error)


class _LocalSource:
    """The archive that is seen from here, as one source of others."""

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
