"""What becomes of a worker's output: the rank's log file, the tail of its errors, lines on the console.

Part of the guardian (`guardian.py`), so standard library only, and quick to import.

The log gets all bytes in the order in which they came, and holds the worker back if it cannot keep up. The console
gets whole lines, and lines that it cannot take are counted, not kept; one that is a terminal also shows a line that
has no end yet, such as a progress bar (`terminal.py`). Both are written on threads of their own: a console that nobody
reads, or a file server that is gone, blocks a write for ever, and must not block the guard.
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

TYPE_CHECKING = False  # `typing` would take longer to import than the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent.workers.terminal import Terminal, harmless_bytes, write_all
elif __package__:
    from agent.workers.terminal import harmless_bytes, write_all
else:  # in the guardian, which is a script and not part of the package
    from terminal import harmless_bytes, write_all

_BACKLOG_BYTES = 4 << 20
_FLUSH_S = 1.0
_HOLD_S = 1.5
"""So long the console waits with a traceback: as long as the agent waits for the failure that it may be due to."""
_TRACEBACK = b"Traceback (most recent call last):"
_ERRORS_BYTES = 64 << 10
"""Kept of standard error, more than is shown: a progress bar may fill it with states of one line, and an exception's
message may name every parameter of a model."""
_SAID_BYTES = 16 << 10
"""Kept of both streams."""
_TAIL_BYTES = 4096
_TAIL_LINES = 20
_TAIL_LINE_BYTES = 600
"""Kept of a line where there are too many bytes: `faulthandler` ends with all extension modules on one."""


class Output:
    """All output of one worker."""

    def __init__(
        self,
        log_path: bytes,
        console_prefix: bytes | None,
        warn: Callable[[str], None],
        on_room: Callable[[], None],
        console_streams: Sequence[int] = (1, 2),
        terminals: Mapping[int, Terminal] | None = None,
        *,
        holds_tracebacks: bool = False,
    ) -> None:
        """Start to write. `on_room` is called, on another thread, when `is_full` has ended.

        Args:
            log_path: of the rank's file.
            console_prefix: before each line on the console. None: nothing goes there.
            warn: given what is to be told of the log.
            on_room: see above.
            console_streams: what goes to the console.
            terminals: of these streams, by number, those that are one.
            holds_tracebacks: another rank's failure may be the cause of one: the console shows it after `release`, or
                a moment later.
        """
        self._may_show = threading.Event()
        if not holds_tracebacks:
            self._may_show.set()
        self.is_holding = False
        """The console waits with a traceback, and all that follows."""
        self._log = _Log(log_path, warn)
        self._log_sink = Sink(on_room)
        self._log_sink.put(self._log.write, b"")  # a silent rank has an empty log, rather than none
        self._consoles: dict[int, _Console] = {}
        self._sinks = [self._log_sink]
        if console_prefix is not None:
            sink = Sink(lambda: None)
            self._sinks.append(sink)
            self._consoles = {
                fd: _Console(fd, console_prefix, sink, (terminals or {}).get(fd)) for fd in console_streams
            }
        self._errors = b""
        self._said = b""
        """The end of both streams, as it came."""

    @property
    def is_full(self) -> bool:
        """The log cannot keep up: read no more from the worker."""
        return self._log_sink.is_full

    @property
    def errors(self) -> str:
        """The end of standard error."""
        return b"\n".join(map(_visible, self._errors.split(b"\n"))).decode(errors="replace")

    @property
    def tail(self) -> str:
        """The last lines of standard error."""
        return _tail(self._errors)

    @property
    def tail_of_both(self) -> str:
        """The last lines of both streams: who ends without an exception may give the reason on either."""
        return _tail(self._said)

    def feed(self, stream: int, data: bytes) -> None:
        """Take output as it comes: stream 1 or 2."""
        self._log_sink.put(self._log.write, data)
        if stream == 2:
            self._errors = (self._errors + data)[-_ERRORS_BYTES:]
        self._said = (self._said + data)[-_SAID_BYTES:]
        if stream in self._consoles:
            if stream == 2 and _TRACEBACK in data and not self._may_show.is_set():
                self.is_holding = True
                self._sinks[-1].put(self._hold, b"")
            self._consoles[stream].feed(data)

    def _hold(self, _: bytes) -> None:
        if not self._may_show.wait(_HOLD_S):
            self._may_show.set()  # it was no end: a script that goes on after many of them is not held up by each
        self.is_holding = False

    def release(self) -> None:
        """Show what is held on the console."""
        self._may_show.set()

    def end_log(self) -> None:
        """Nothing more comes: wait until the log has all of it, but not for ever."""
        self._log_sink.flush()

    def end(self) -> None:
        """Nothing more comes: wait until all is written, but not for ever."""
        for console in self._consoles.values():
            console.end()
        for sink in self._sinks:
            sink.flush()


class Sink:
    """Writes in order on a thread of its own. `write` may block for ever; it may not raise."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._items: deque[tuple[Callable[[bytes], None], bytes]] = deque()
        self._changed = threading.Condition()
        self._backlog_bytes = 0
        self._is_idle = True
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_full(self) -> bool:
        """More waits to be written than should be kept in memory."""
        return self._backlog_bytes > _BACKLOG_BYTES

    def put(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Have it written, in its turn. Who must stay within bounds asks `is_full` before."""
        with self._changed:
            self._items.append((write, data))
            self._backlog_bytes += len(data)
            self._is_idle = False
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, but not for ever."""
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
                self._on_room()


class _Log:
    """The rank's file. What cannot be written costs lines of the log, never the training."""

    def __init__(self, path: bytes, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._fd = -1
        self._lost_bytes = 0
        self._has_warned = False

    def write(self, data: bytes) -> None:
        """Append; after a failure, try again with what comes next, and mark the gap."""
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
                self._warn(f"training goes on without all of the log {path}: {error.strerror}")

    def _open(self) -> None:
        if self._fd < 0:
            _make_private(os.path.dirname(self._path) or b".")  # noqa: PTH120 - quick to import
            # What others put in its place leads nowhere else, and is not waited for.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o600)
            if stat.S_ISFIFO(os.fstat(fd).st_mode):  # one that somebody reads; a standby's is /dev/null
                os.close(fd)
                raise OSError(errno.EINVAL, "it is a FIFO")
            self._fd = fd


def _make_private(directory: bytes) -> None:
    """Make a directory, and those above it that are missing, which nobody else can look into: logs may quote data."""
    above = os.path.dirname(directory)  # noqa: PTH120 - quick to import
    if above and not os.path.isdir(above):  # noqa: PTH112 - as above
        _make_private(above)
    with suppress(FileExistsError):  # also of a link that leads nowhere: then the next one below fails
        os.mkdir(directory, 0o700)  # noqa: PTH102 - as above


class _Console:
    """One stream, line by line, each with the rank's prefix.

    A write is never larger than PIPE_BUF, so that lines of several ranks do not mix; a longer line comes in pieces.
    """

    def __init__(self, fd: int, prefix: bytes, sink: Sink, terminal: Terminal | None = None) -> None:
        self._fd = fd
        self._prefix = prefix[: select.PIPE_BUF // 2]
        self._piece_bytes = select.PIPE_BUF - len(self._prefix) - 1
        self._sink = sink
        self._terminal = terminal
        """None: only whole lines are shown."""
        self._rest = b""
        self._dropped_lines = 0

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        # Without an end of line in sight, a progress bar is cut to its last state, and other text is shown in pieces.
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
            rest = self._unmarked(self._rest)
            unfinished = self._prefix + rest if rest.strip() else b""
            self._sink.put(partial(self._write, unfinished=unfinished), batch)
        elif batch:
            self._sink.put(self._write, batch)

    def _pieces(self, lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            shown = self._unmarked(line)
            for start in range(0, max(1, len(shown)), self._piece_bytes):
                yield self._prefix + shown[start : start + self._piece_bytes] + b"\n"

    def _unmarked(self, line: bytes) -> bytes:
        """What is visible of it, without the prefix that torch has put before a traceback's lines already."""
        return _visible(line).removeprefix(self._prefix)

    def _write(self, data: bytes, unfinished: bytes = b"") -> None:
        with suppress(OSError):  # a closed console is nobody's failure: the log has everything
            if self._terminal:
                self._terminal.write(self._fd, data, unfinished)
            else:
                write_all(self._fd, data)


def _visible(line: bytes) -> bytes:
    """What a terminal shows of a line whose writer returns to its start: the last state."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


def _tail(said: bytes) -> str:
    lines = [_visible(line) for line in said.split(b"\n")]
    # All that shows it, here and on other nodes, may be a terminal.
    lines = [harmless_bytes(line) for line in lines[-_TAIL_LINES - (lines[-1] == b"") :]]
    if sum(map(len, lines)) + len(lines) > _TAIL_BYTES:
        lines = list(map(_shortened, lines))  # else one of them could take the others' place
    return b"\n".join(lines)[-_TAIL_BYTES:].decode(errors="replace")


def _shortened(line: bytes) -> bytes:
    half = _TAIL_LINE_BYTES // 2
    return line if len(line) <= _TAIL_LINE_BYTES else line[:half] + b" [...] " + line[-half:]
