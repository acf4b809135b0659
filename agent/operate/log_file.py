"""One log as it is shown: from where on, and line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import msgspec

from agent.links.frames import LOG_CHUNK_BYTES
from agent.links.queries import ReadLog
from agent.operate.log_library import UNREADABLE, LogSource

_LINE_BYTES = 1 << 16


class LinePrinter:
    """Prints a log line by line; or just as it comes, if nothing is to be done to its lines.

    A line without an end is shown when no more comes, or when it has become very long.

    Args:
        out: where it is printed.
        render: makes of a line what is printed of it.
    """

    def __init__(self, out: BinaryIO, render: Callable[[bytes], bytes] | None) -> None:
        self._out = out
        self._render = render
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Print what came."""
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
        """Print what is left of a line."""
        if self._rest:
            self.feed(b"\n")


class LogFile:
    """One log, printed from one place to its end, as often as asked.

    Args:
        source: who reads it.
        start: from where on.
        lines: where it is shown.
    """

    def __init__(self, source: LogSource, start: ReadLog, lines: LinePrinter) -> None:
        self.source = source
        self._next = start
        self._lines = lines
        self.trouble = ""
        """Why it could not be read on, when that was last tried; empty: it was."""
        self._is_whole = False

    @property
    def is_cut(self) -> bool:
        """Whether there may be more that was not shown, and cannot be read."""
        return bool(self.trouble) and not self._is_whole

    async def show(self, until: int | None = None) -> None:
        """Print what is there, up to an offset if one is given."""
        is_final = self.source.is_leaving
        try:
            while until is None or self._next.offset < until:
                data = await self.source.read(self._next)
                if not data:
                    break
                self._lines.feed(data if until is None else data[: until - self._next.offset])
                self._next = msgspec.structs.replace(self._next, offset=self._next.offset + len(data))
        except UNREADABLE as error:
            self.trouble = str(error)
        else:
            self.trouble = ""
            self._is_whole |= is_final

    def end(self) -> None:
        """No more will be shown."""
        self._lines.end()


async def tail_offset(source: LogSource, log: ReadLog, size_bytes: int, lines: int) -> int:
    """Where the last so many lines of a log begin. Raises `Broken` or `Declined`.

    Args:
        source: who reads it.
        log: which.
        size_bytes: how long it is.
        lines: how many.
    """
    if not lines:
        return size_bytes
    end = size_bytes
    while end > 0:
        start = max(0, end - LOG_CHUNK_BYTES)
        part = (await source.read(msgspec.structs.replace(log, offset=start)))[: end - start]
        at = len(part) - (end == size_bytes and part.endswith(b"\n"))  # that one ends the last line, it begins none
        while (at := part.rfind(b"\n", 0, at)) >= 0:
            lines -= 1
            if not lines:
                return start + at + 1
        end = start
    return 0
