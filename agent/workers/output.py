"""Handles a worker's output: writes the rank's log file, keeps the tail of its errors, prints lines on the console.

Part of the guardian (`guardian.py`), so standard library only, and quick to import.

The log gets all bytes in the order of arrival, and the worker is blocked if the log cannot keep up. The console gets
whole lines. Lines that it cannot take in time are counted and dropped. A console that is a terminal also shows an
unfinished line, such as a progress bar (`terminal.py`). Both are written on threads of their own: a console that nobody
reads, or an unreachable file server, blocks a write forever, and must not block the guardian.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
from collections import deque
from contextlib import suppress
from functools import partial

TYPE_CHECKING = False  # importing `typing` would take longer than all other imports
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent.workers.terminal import Terminal, escape_control_bytes, write_all
elif __package__:
    from agent.workers.terminal import escape_control_bytes, write_all
else:  # in the guardian, which is a script and not part of the package
    from terminal import escape_control_bytes, write_all

_BACKLOG_BYTES = 4 << 20
_FLUSH_S = 1.0
_HOLD_S = 1.5
"""How long a traceback is held: as long as the agent waits for another rank's failure that may have caused it."""
_TRACEBACK = b"Traceback (most recent call last):"
_STDERR_BYTES = 64 << 10
"""Bytes of standard error to keep. More than is shown: a progress bar may fill it with states of one line, and an
exception's message may name every parameter of a model."""
_BOTH_STREAMS_BYTES = 16 << 10
"""Bytes of both streams to keep."""
_TAIL_BYTES = 4096
_TAIL_LINES = 20
_TAIL_LINE_BYTES = 600
"""Limit of a line in a long tail: `faulthandler` prints all extension modules on one line."""


class Output:
    """All output of one worker."""

    def __init__(
        self,
        log_path: bytes,
        console_prefix: bytes | None,
        warn: Callable[[str], None],
        on_drained: Callable[[], None],
        console_streams: Sequence[int] = (1, 2),
        terminals: Mapping[int, Terminal] | None = None,
        *,
        holds_tracebacks: bool = False,
    ) -> None:
        """Start the writers.

        Args:
            log_path: path of the rank's log.
            console_prefix: prefix of each line on the console. None: no output goes there.
            warn: receives warnings about the log.
            on_drained: called on another thread when `is_full` is no longer true.
            console_streams: the streams that go to the console.
            terminals: the terminal of each stream that is one.
            holds_tracebacks: hold back tracebacks, which another rank's failure may have caused. The console shows them
                after `release`, or a moment later.
        """
        self._may_show = threading.Event()
        self.is_holding = False
        """Whether a traceback, and all output after it, is being held back."""
        self._log = _Log(log_path, warn)
        self._log_sink = Sink(on_drained)
        self._log_sink.put(self._log.write, b"")  # a rank without output has an empty log
        self._terminals = terminals or {}
        self._consoles: dict[int, _Console] = {}
        self._sinks = [self._log_sink]
        self._stderr = b""
        self._both_streams = b""
        """The end of both streams, in the order of arrival."""
        self._begin(console_prefix, console_streams, holds_tracebacks=holds_tracebacks)

    def begin_group(
        self, log_path: bytes, console_prefix: bytes | None, console_streams: Sequence[int], *, holds_tracebacks: bool
    ) -> None:
        """Write what follows to another log, and under another prefix: the worker is a rank of another group now."""
        self._log_sink.put(partial(self._log.change_to, log_path), b"")
        for console in self._consoles.values():
            console.end()
        self._stderr = self._both_streams = b""
        self._begin(console_prefix, console_streams, holds_tracebacks=holds_tracebacks)

    def _begin(self, console_prefix: bytes | None, console_streams: Sequence[int], *, holds_tracebacks: bool) -> None:
        self._consoles = {}
        self._may_show = threading.Event()
        if not holds_tracebacks:
            self._may_show.set()
        if console_prefix is not None:
            if len(self._sinks) == 1:
                self._sinks.append(Sink(lambda: None))
            self._consoles = {
                fd: _Console(fd, console_prefix, self._sinks[-1], self._terminals.get(fd)) for fd in console_streams
            }

    @property
    def is_full(self) -> bool:
        """Whether the log cannot keep up, so that the worker's output should not be read."""
        return self._log_sink.is_full

    @property
    def stderr_text(self) -> str:
        """The end of standard error."""
        return b"\n".join(map(_visible, self._stderr.split(b"\n"))).decode(errors="replace")

    @property
    def tail(self) -> str:
        """The last lines of standard error."""
        return _tail(self._stderr)

    @property
    def tail_of_both_streams(self) -> str:
        """The last lines of both streams. Without an exception, either may contain the reason of an exit."""
        return _tail(self._both_streams)

    def feed(self, stream: int, data: bytes) -> None:
        """Take output of stream 1 or 2."""
        self._log_sink.put(self._log.write, data)
        if stream == 2:
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]
        self._both_streams = (self._both_streams + data)[-_BOTH_STREAMS_BYTES:]
        if stream in self._consoles:
            if stream == 2 and _TRACEBACK in data and not self._may_show.is_set():
                self.is_holding = True
                self._sinks[-1].put(self._hold, b"")
            self._consoles[stream].feed(data)

    def _hold(self, _: bytes) -> None:
        if not self._may_show.wait(_HOLD_S):
            self._may_show.set()  # the worker did not end: show later tracebacks of this script at once
        self.is_holding = False

    def release(self) -> None:
        """Show the output that is held back."""
        self._may_show.set()

    def end_log(self) -> None:
        """Wait until the log is written completely, within a time limit. No more output may follow."""
        self._log_sink.flush()

    def end(self) -> None:
        """Wait until everything is written, within a time limit. No more output may follow."""
        for console in self._consoles.values():
            console.end()
        for sink in self._sinks:
            sink.flush()


class Sink:
    """Writes in order on a thread of its own. `write` may block forever; it may not raise."""

    def __init__(self, on_drained: Callable[[], None]) -> None:
        self._on_drained = on_drained
        self._items: deque[tuple[Callable[[bytes], None], bytes]] = deque()
        self._changed = threading.Condition()
        self._backlog_bytes = 0
        self._is_idle = True
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_full(self) -> bool:
        """Whether too much data is queued."""
        return self._backlog_bytes > _BACKLOG_BYTES

    def put(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Queue data to be written. The queue is not bounded: check `is_full` first."""
        with self._changed:
            self._items.append((write, data))
            self._backlog_bytes += len(data)
            self._is_idle = False
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, within a time limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle, _FLUSH_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                write, data = self._items.popleft()
            write(data)
            with self._changed:
                was_full = self.is_full
                self._backlog_bytes -= len(data)
                self._is_idle = not self._items
                self._changed.notify_all()
            if was_full and not self.is_full:
                self._on_drained()


class _Log:
    """The rank's log file. A failed write loses log lines, but never stops the training."""

    def __init__(self, path: bytes, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._fd = -1
        self._lost_bytes = 0
        self._has_warned = False

    def write(self, data: bytes) -> None:
        """Append data. After a failure, try again with the next data, and mark the gap."""
        try:
            self._open()
            if self._lost_bytes:
                write_all(self._fd, b"\n[elastic-agent: %d bytes could not be written here]\n" % self._lost_bytes)
                self._lost_bytes = 0
            write_all(self._fd, data)
        except OSError as error:
            self._lost_bytes += len(data)
            if not self._has_warned:
                self._has_warned = True
                path = self._path.decode(errors="backslashreplace")
                self._warn(f"cannot write all of the log {path}: {error.strerror}; training continues")

    def change_to(self, path: bytes, data: bytes) -> None:
        """Write to another file from now on. `data` is empty."""
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd, self._lost_bytes, self._has_warned = path, -1, 0, False
        self.write(data)

    def _open(self) -> None:
        if self._fd < 0:
            _make_private(os.path.dirname(self._path) or b".")  # noqa: PTH120 - quick to import
            # Another process may have replaced the file: do not follow links, and do not block on a FIFO.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o600)
            if stat.S_ISFIFO(os.fstat(fd).st_mode):  # a FIFO that has a reader; a standby's log is /dev/null
                os.close(fd)
                raise OSError(errno.EINVAL, "it is a FIFO")
            self._fd = fd


def _make_private(directory: bytes) -> None:
    """Create a directory, and missing ones above it, with access for the owner only: logs may quote data."""
    above = os.path.dirname(directory)  # noqa: PTH120 - quick to import
    if above and not os.path.isdir(above):  # noqa: PTH112 - as above
        _make_private(above)
    with suppress(FileExistsError):  # also if it is a dangling link: then the next directory below fails
        os.mkdir(directory, 0o700)  # noqa: PTH102 - as above


class _Console:
    """One output stream. It is printed line by line with the rank's prefix.

    A write is never larger than PIPE_BUF, so that lines of several ranks do not mix. A longer line is written in
    pieces.

    Several ranks share a terminal, so control characters are escaped there, as `elastic-agent logs` does: a rank that
    moves the cursor would overwrite the lines of others. A file or a pipe gets the output as it is.
    """

    def __init__(self, fd: int, prefix: bytes, sink: Sink, terminal: Terminal | None = None) -> None:
        self._fd = fd
        self._prefix = prefix[: select.PIPE_BUF // 2]
        self._piece_bytes = select.PIPE_BUF - len(self._prefix) - 1
        self._sink = sink
        self._terminal = terminal
        """None: only whole lines are shown."""
        self._escape = escape_control_bytes if os.isatty(fd) else bytes
        self._rest = b""
        self._dropped_lines = 0

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        # Without an end of line, keep only the last state of a progress bar, and show other text in pieces.
        rest = _visible(rest) + b"\r" if rest.endswith(b"\r") else _visible(rest)
        if len(rest) >= self._piece_bytes:
            lines.append(rest)
            rest = b""
        self._rest = rest
        self._show(lines)

    def end(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._show([rest])

    def _show(self, lines: list[bytes]) -> None:
        if self._sink.is_full:
            self._dropped_lines += len(lines)
            return
        if self._dropped_lines and lines:
            lines.insert(0, b"(%d lines are only in the log: the console was blocked)" % self._dropped_lines)
            self._dropped_lines = 0
        batch = b""
        for piece in self._pieces(lines):
            if len(batch) + len(piece) > select.PIPE_BUF:
                self._sink.put(self._write, batch)
                batch = b""
            batch += piece
        if self._terminal:
            rest = self._without_prefix(_whole_characters(self._rest))
            unfinished = self._prefix + rest if rest.strip() else b""
            self._sink.put(partial(self._write, unfinished=unfinished), batch)
        elif batch:
            self._sink.put(self._write, batch)

    def _pieces(self, lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            shown = self._without_prefix(line)
            for start in range(0, max(1, len(shown)), self._piece_bytes):
                yield self._prefix + shown[start : start + self._piece_bytes] + b"\n"

    def _without_prefix(self, line: bytes) -> bytes:
        """Return the visible text, without the prefix if torch has already put it before a traceback's line."""
        return self._escape(_visible(line).removeprefix(self._prefix))

    def _write(self, data: bytes, unfinished: bytes = b"") -> None:
        with suppress(OSError):  # a closed console is no error: the log has everything
            if self._terminal:
                self._terminal.write(self._fd, data, unfinished)
            else:
                write_all(self._fd, data)


def _visible(line: bytes) -> bytes:
    """Return the last state of a line whose writer returns to its start, as a terminal shows it."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


def _whole_characters(text: bytes) -> bytes:
    """Return UTF-8 text without a last character of which some bytes are still to come."""
    for count in range(1, min(len(text), 3) + 1):
        byte = text[-count]
        if byte >= 0xC0:  # the first byte of a character
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return text if count >= length else text[:-count]
        if byte < 0x80:
            return text
    return text


def _tail(output: bytes) -> str:
    lines = [_visible(line) for line in output.split(b"\n")]
    # It may be printed on a terminal, here or on other nodes.
    lines = [escape_control_bytes(line) for line in lines[-_TAIL_LINES - (lines[-1] == b"") :]]
    if sum(map(len, lines)) + len(lines) > _TAIL_BYTES:
        lines = list(map(_shortened, lines))  # otherwise one line could displace all others
    return b"\n".join(lines)[-_TAIL_BYTES:].decode(errors="replace")


def _shortened(line: bytes) -> bytes:
    half = _TAIL_LINE_BYTES // 2
    return line if len(line) <= _TAIL_LINE_BYTES else line[:half] + b" [...] " + line[-half:]
