"""The logs of one node in one group, as far as they are wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.core.model import Group
from agent.links.queries import LogEntry
from agent.operate.log_file import LinePrinter, LogFile, tail_offset
from agent.operate.log_library import UNREADABLE, LogFinding, LogLibrary
from agent.workers.terminal_escapes import harmless_bytes


@dataclass(frozen=True)
class LogSelection:
    """Which logs, and how much of them."""

    rank: int | None
    """None: all."""
    group: int | None
    """None: the newest."""
    lines: int | None
    """The last so many. None: all; the last 20 of what is there already, if they are followed."""
    is_followed: bool
    """Go on as more is written, over changes of group, until the job ends."""
    log_dir: Path | None
    """A directory that is seen here: the logs of nodes that are gone may lie there. None: where they usually are."""

    as_json: bool
    """Each line as an object."""


@dataclass(frozen=True)
class GroupNode:
    """A node in a group."""

    group: int
    node_id: str
    ranks: tuple[int, ...] | None
    """Its ranks there. None: not known."""

    def has(self, rank: int | None) -> bool:
        """Whether it has this rank, for all that is known. None: any."""
        return rank is None or self.ranks is None or rank in self.ranks


def places(group: int, nodes: Iterable[tuple[str, int]]) -> tuple[GroupNode, ...]:
    """The places in a group, from its nodes' ids and numbers of rank processes, in rank order."""
    found, first = [], 0
    for node_id, nproc in nodes:
        found.append(GroupNode(group, node_id, tuple(range(first, first + nproc))))
        first += nproc
    return tuple(found)


def places_of(group: Group) -> tuple[GroupNode, ...]:
    """The places in a group whose record is there."""
    return places(group.number, ((member.node_id, member.nproc) for member in group.members))


class NodeLogs:
    """The logs of one node in one group.

    Args:
        library: where they are looked for.
        place: the node, and the group.
        wanted: which of them, and how they are shown.
        lines: from where on, as in `LogSelection`; None: from the start.
    """

    def __init__(self, library: LogLibrary, place: GroupNode, wanted: LogSelection, lines: int | None) -> None:
        self._library = library
        self._place = place
        self._wanted = wanted
        self._lines = lines
        self._finding = LogFinding(None)
        self._files: dict[int, LogFile] = {}
        self._sizes: dict[int, int] = {}

    @property
    def has_any(self) -> bool:
        """Whether there is any."""
        return bool(self._files)

    @property
    def is_complete(self) -> bool:
        """Whether all of them are there, and can be read."""
        return self.has_any and not self._missing() and not any(file.trouble for file in self._files.values())

    @property
    def is_node_gone(self) -> bool:
        """Whether the node's agent is not there any more."""
        return self._place.node_id not in self._library.living

    async def look(self) -> None:
        """Look for those that were not there, or could not be read any more."""
        self._finding = await self._library.search(self._place.group, self._place.node_id)
        for log in self._finding.logs:
            if self._wanted.rank in {None, log.rank}:
                await self._open(log)

    async def _open(self, log: LogEntry) -> None:
        source = self._finding.source
        assert source is not None  # noqa: S101 - somebody has found it
        if log.rank in self._files:
            self._files[log.rank].source = source
            return
        start = self._library.start_of(self._place.group, self._place.node_id, log.rank)
        offset = 0
        if self._lines is not None:
            try:
                offset = await tail_offset(source, start, log.size_bytes, self._lines)
            except UNREADABLE:
                return  # it was there a moment ago: the next look will tell
        start = msgspec.structs.replace(start, offset=offset)
        self._files[log.rank] = LogFile(source, start, LinePrinter(sys.stdout.buffer, self._render(log.rank)))
        self._sizes[log.rank] = log.size_bytes

    def _render(self, rank: int) -> Callable[[bytes], bytes] | None:
        """Whose line it is, said with each if more than one log may be shown."""
        node_id, group = self._place.node_id, self._place.group
        prefix = f"[rank {rank} {node_id} group {group}] ".encode()

        def as_object(line: bytes) -> bytes:
            text = line.decode(errors="replace")
            return msgspec.json.encode({"group": group, "rank": rank, "node_id": node_id, "line": text})

        def as_text(line: bytes) -> bytes:
            return (prefix if has_prefix else b"") + (harmless_bytes(line) if is_terminal else line)

        has_prefix = self._wanted.is_followed or self._wanted.rank is None
        is_terminal = sys.stdout.isatty()
        if self._wanted.as_json:
            return as_object
        return as_text if has_prefix or is_terminal else None

    async def show_once(self) -> None:
        """Print what was there when it was looked for."""
        for rank, file in sorted(self._files.items()):
            await file.show(until=self._sizes[rank])
            file.end()

    async def show_more(self) -> None:
        """Print what has been written since."""
        for _, file in sorted(self._files.items()):
            await file.show()

    def end(self) -> None:
        """No more will be shown."""
        for file in self._files.values():
            file.end()

    def complaints(self) -> Iterator[str]:
        """What cannot be shown, and why."""
        node_id, group = self._place.node_id, self._place.group
        missing = self._missing()
        if missing:
            ranks = ", ".join(map(str, missing))
            yield f"no log of rank {ranks} in group {group}: {self._why_missing()}"
        for rank, file in sorted(self._files.items()):
            if file.is_cut:
                rest = f"{node_id} does not show the rest ({file.trouble})"
                yield f"the log of rank {rank} in group {group} ends here: {rest}"

    def _missing(self) -> list[int]:
        ranks = self._place.ranks or ()
        return [rank for rank in ranks if self._wanted.rank in {None, rank} and rank not in self._files]

    def _why_missing(self) -> str:
        node_id, directory = self._place.node_id, self._finding.directory
        if self._finding.trouble:
            return f"{node_id} does not show it ({self._finding.trouble})"
        if not self.is_node_gone:
            return f"there is none on {node_id} in {directory}"
        there = f"in {directory} if its --log_dir is that of the other nodes" if directory else "under its --log_dir"
        return f"{node_id} is gone; it lay there, {there}"
