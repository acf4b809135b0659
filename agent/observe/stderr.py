"""The agent's writer to standard error, which can neither end the agent nor block it.

The reader of a pipe may be gone, or the disk full. Worse, a pipe may stay open with nobody reading it. So lines are
written on a separate thread, like the console output of workers. Lines that cannot be written are counted, and the
count is printed before the next line that can.
"""

from __future__ import annotations

import atexit
import threading
from functools import cache, partial

from agent.workers.output import Sink
from agent.workers.terminal import Terminal, is_terminal, shared_terminal, write_all


class LineWriter:
    """Write lines to a descriptor. May be used from any thread, but not from a signal handler."""

    def __init__(self, fd: int, terminal: Terminal | None = None) -> None:
        """`terminal`: the terminal that the ranks write to as well, if `fd` is one."""
        self._fd = fd
        self._terminal = terminal
        self._sink = Sink(lambda: None)
        self._lock = threading.Lock()
        self._missing_lines = 0

    def write(self, text: str) -> None:
        """Queue one or more lines; drop them if the queue is full."""
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
        """Wait until all lines are written, for a bounded time."""
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
    """Return the process's only writer to standard error. It is flushed when the process exits."""
    writer = LineWriter(2, shared_terminal() if is_terminal(2) else None)
    atexit.register(writer.flush)
    return writer
