"""Printing the logs of one node in one group: the selected ranks, from a start offset, line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from agent.core.model import Group
from agent.links.frames import LOG_CHUNK_BYTES
from agent.links.queries import LogEntry, ReadLog
from agent.operate.log_sources import UNREADABLE, LogFinding, LogLibrary, LogSource
from agent.workers.terminal import escape_control_bytes

_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class LogSelection:
    """Which logs to print, and how much of them."""

    rank: int | None
    """None: all ranks."""
    group: int | None
    """None: the newest group."""
    lines: int | None
    """Number of last lines. None: all; when following, the last 20 of what exists already."""
    is_followed: bool
    """Continue as more is written, across changes of group, until the job ends."""
    log_dir: Path | None
    """A directory that may have the logs of nodes that are gone. None: the default directory."""

    as_json: bool
    """Print each line as a JSON object."""


@dataclass(frozen=True)
class GroupNode:
    """A node in a group."""

    group: int
    node_id: str
    ranks: tuple[int, ...] | None
    """The node's ranks in the group. None: not known."""

    def may_have_rank(self, rank: int | None) -> bool:
        """Whether the node has this rank, as far as is known. `rank` None: any."""
        return rank is None or self.ranks is None or rank in self.ranks


def group_nodes(group: int, nodes: Iterable[tuple[str, int]]) -> tuple[GroupNode, ...]:
    """Return the nodes of a group, from their ids and numbers of rank processes in rank order."""
    found, first = [], 0
    for node_id, nproc in nodes:
        found.append(GroupNode(group, node_id, tuple(range(first, first + nproc))))
        first += nproc
    return tuple(found)


def nodes_of_group(group: Group) -> tuple[GroupNode, ...]:
    """Return the nodes of a group from its record."""
    return group_nodes(group.number, ((member.node_id, member.nproc) for member in group.members))


# One log


class LinePrinter:
    """Prints a log line by line, or byte by byte if its lines are not changed.

    A line without an end is printed when no more data comes, or when it has become very long.

    Args:
        out: where it is printed.
        render: returns what is printed for a line. None: print the bytes as they come.
    """

    def __init__(self, out: BinaryIO, render: Callable[[bytes], bytes] | None) -> None:
        self._out = out
        self._render = render
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Print new data."""
        if self._render is None:
            self._out.write(data)
        else:
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LINE_BYTES:
                lines.append(self._rest)
                self._rest = b""
            self._out.write(b"".join(self._render(line) + b"\n" for line in lines))
        self._out.flush()

    def end(self) -> None:
        """Print the rest of an unfinished line."""
        if self._rest:
            self.feed(b"\n")


class LogFile:
    """One log, printed from an offset to its present end, as often as asked.

    Args:
        source: where it is read.
        start: the offset to begin with.
        lines: where it is printed.
    """

    def __init__(self, source: LogSource, start: ReadLog, lines: LinePrinter) -> None:
        self.source = source
        self._next = start
        self._lines = lines
        self.error = ""
        """Why the last attempt to read it failed. Empty: it succeeded."""
        self._is_complete = False

    @property
    def is_truncated(self) -> bool:
        """Whether there may be more that could not be read."""
        return bool(self.error) and not self._is_complete

    async def show(self, until: int | None = None) -> None:
        """Print what there is, up to the offset `until` if it is given."""
        is_final = self.source.is_leaving
        try:
            while until is None or self._next.offset < until:
                data = await self.source.read(self._next)
                if not data:
                    break
                self._lines.feed(data if until is None else data[: until - self._next.offset])
                self._next = msgspec.structs.replace(self._next, offset=self._next.offset + len(data))
        except UNREADABLE as error:
            self.error = str(error)
        else:
            self.error = ""
            self._is_complete |= is_final

    def end(self) -> None:
        """Print the rest of an unfinished line: nothing more will be read."""
        self._lines.end()


async def tail_offset(source: LogSource, log: ReadLog, size_bytes: int, lines: int) -> int:
    """Return the offset at which the last lines of a log begin. Raises `LinkBroken` or `ReadDeclined`.

    Args:
        source: where it is read.
        log: the log.
        size_bytes: its length.
        lines: the number of lines.
    """
    if not lines:
        return size_bytes
    end = size_bytes
    while end > 0:
        start = max(0, end - LOG_CHUNK_BYTES)
        part = (await source.read(msgspec.structs.replace(log, offset=start)))[: end - start]
        at = len(part) - (end == size_bytes and part.endswith(b"\n"))  # the final newline begins no further line
        while (at := part.rfind(b"\n", 0, at)) >= 0:
            lines -= 1
            if not lines:
                return start + at + 1
        end = start
    return 0


# The logs of one node


class NodeLogs:
    """The logs of one node in one group.

    Args:
        library: where they are looked for.
        node: the node and the group.
        selection: which of them, and how they are printed.
        lines: number of last lines to begin with; None: from the start.
    """

    def __init__(self, library: LogLibrary, node: GroupNode, selection: LogSelection, lines: int | None) -> None:
        self._library = library
        self._node = node
        self._selection = selection
        self._lines = lines
        self._finding = LogFinding(None)
        self._files: dict[int, LogFile] = {}
        self._sizes: dict[int, int] = {}

    @property
    def has_any(self) -> bool:
        """Whether any log was found."""
        return bool(self._files)

    @property
    def is_complete(self) -> bool:
        """Whether all of them were found and can be read."""
        return self.has_any and not self._missing() and not any(file.error for file in self._files.values())

    @property
    def is_node_gone(self) -> bool:
        """Whether the node's agent no longer runs."""
        return self._node.node_id not in self._library.running

    async def search(self) -> None:
        """Look for logs that were not found before, or can no longer be read."""
        self._finding = await self._library.search(self._node.group, self._node.node_id)
        for log in self._finding.logs:
            if self._selection.rank in {None, log.rank}:
                await self._open(log)

    async def _open(self, log: LogEntry) -> None:
        source = self._finding.source
        assert source is not None  # noqa: S101 - a finding with logs has a source
        if log.rank in self._files:
            self._files[log.rank].source = source
            return
        start = self._library.start_of(self._node.group, self._node.node_id, log.rank)
        offset = 0
        if self._lines is not None:
            try:
                offset = await tail_offset(source, start, log.size_bytes, self._lines)
            except UNREADABLE:
                return  # it could be read a moment ago: the next search reports the error
        start = msgspec.structs.replace(start, offset=offset)
        self._files[log.rank] = LogFile(source, start, LinePrinter(sys.stdout.buffer, self._render(log.rank)))
        self._sizes[log.rank] = log.size_bytes

    def _render(self, rank: int) -> Callable[[bytes], bytes] | None:
        """Return how lines are printed: with a prefix that names the rank if more than one log may be shown."""
        node_id, group = self._node.node_id, self._node.group
        prefix = f"[rank {rank} {node_id} group {group}] ".encode()

        def as_object(line: bytes) -> bytes:
            text = line.decode(errors="replace")
            return msgspec.json.encode({"group": group, "rank": rank, "node_id": node_id, "line": text})

        def as_text(line: bytes) -> bytes:
            return (prefix if has_prefix else b"") + (escape_control_bytes(line) if is_terminal else line)

        has_prefix = self._selection.is_followed or self._selection.rank is None
        is_terminal = sys.stdout.isatty()
        if self._selection.as_json:
            return as_object
        return as_text if has_prefix or is_terminal else None

    async def show_once(self) -> None:
        """Print what existed at the time of the search."""
        for rank, file in sorted(self._files.items()):
            await file.show(until=self._sizes[rank])
            file.end()

    async def show_more(self) -> None:
        """Print what has been written since."""
        for _, file in sorted(self._files.items()):
            await file.show()

    def end(self) -> None:
        """Print the rest of unfinished lines: nothing more will be read."""
        for file in self._files.values():
            file.end()

    def problems(self) -> Iterator[str]:
        """Yield what cannot be shown, and why."""
        node_id, group = self._node.node_id, self._node.group
        missing = self._missing()
        if missing:
            ranks = ", ".join(map(str, missing))
            yield f"no log of rank {ranks} in group {group}: {self._why_missing()}"
        for rank, file in sorted(self._files.items()):
            if file.is_truncated:
                rest = f"the rest on {node_id} cannot be read ({file.error})"
                yield f"the log of rank {rank} in group {group} ends here: {rest}"

    def _missing(self) -> list[int]:
        ranks = self._node.ranks or ()
        return [rank for rank in ranks if self._selection.rank in {None, rank} and rank not in self._files]

    def _why_missing(self) -> str:
        node_id, directory = self._node.node_id, self._finding.directory
        if self._finding.error:
            return f"{node_id} cannot provide it ({self._finding.error})"
        if not self.is_node_gone:
            return f"there is none on {node_id} in {directory}"
        where = f"in {directory} if its --log_dir is that of the other nodes" if directory else "under its --log_dir"
        return f"{node_id} is gone; the log was there, {where}"
