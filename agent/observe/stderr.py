"""The agent's lines on standard error, which can neither end it nor hold it up.

The reader of a pipe may be gone, the disk full; worst, nobody may read a pipe that is kept open. So lines are written
on a thread of its own, the way the console of a worker is. What cannot be shown is counted, and told with the next
line that can.
"""

from __future__ import annotations

import atexit
import threading
from functools import cache, partial

from agent.workers.output import Sink
from agent.workers.terminal import Terminal, is_terminal, shared_terminal, write_all


class LineWriter:
    """Writes lines to a descriptor. May be used from any thread, though not from a signal handler."""

    def __init__(self, fd: int, terminal: Terminal | None = None) -> None:
        """`terminal`: if it is one, the one that the ranks write to as well."""
        self._fd = fd
        self._terminal = terminal
        self._sink = Sink(lambda: None)
        self._lock = threading.Lock()
        self._missing_lines = 0

    def write(self, text: str) -> None:
        """Show one line or several, soon; drop them if too much waits already."""
        data = f"{text}\n".encode(errors="backslashreplace")
        lines = data.count(b"\n")
        with self._lock:
            self._missing_lines += lines
            if self._sink.is_full:
                return
            lines_due, self._missing_lines = self._missing_lines, 0
            if lines_due > lines:
                data = b"elastic-agent: %d lines not shown\n" % (lines_due - lines) + data
            self._sink.put(partial(self._write, lines_due), data)

    def flush(self) -> None:
        """Wait until all is shown, but not for ever."""
        self._sink.flush()

    def _write(self, lines: int, data: bytes) -> None:
        try:
            if self._terminal:
                self._terminal.write(self._fd, data)
            else:
                write_all(self._fd, data)
        except OSError:
            with self._lock:
                self._missing_lines += lines


@cache
def standard_error() -> LineWriter:
    """The one writer to standard error; flushed when the process exits."""
    writer = LineWriter(2, shared_terminal() if is_terminal(2) else None)
    atexit.register(writer.flush)
    return writer
