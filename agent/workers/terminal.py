"""The terminal to which the agent and its ranks write concurrently.

Part of the guardian (`guardian.py`), so standard library only, and quick to import.

A progress bar or a prompt is an unfinished line, and is shown at once. A process that writes a whole line meanwhile
erases the unfinished one, writes its own, and draws the unfinished one again below. For that, each process must know
what another one has on the screen, so the unfinished line is kept in shared memory. A lock serializes the writes; the
kernel releases it if its owner is killed.

Output of workers is escaped before it is printed elsewhere. An escape sequence can set the window's title, move the
cursor over other lines, fill the clipboard, or make the terminal type text. Colours and tabs do no harm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import select
import struct
from contextlib import contextmanager, suppress
from functools import cache

TYPE_CHECKING = False  # importing `typing` would take longer than all other imports
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = struct.Struct("<QI")
"""Writer of the unfinished line, and its length in bytes."""
_FD_BITS = 20
_PAGE_BYTES = 1 << 14
_ERASE_LINE = b"\r\x1b[K"
_RESET_COLOURS = b"\x1b[0m"
_WIDE_FROM = 0x1100
"""Characters from here on may take two columns."""
_BLOCKS = range(0x2000, 0x2E80)
"""Exception: lines, blocks and signs, of which progress bars are drawn, take one column."""
_CONTROLS = re.compile(r"\x1b\[[0-9;:]*m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udcff]")
"""Colours, which are kept; control characters of both sets; and bytes that are not UTF-8."""


class Terminal:
    """The unfinished line on the screen, shared by all writers."""

    def __init__(self, memory_fd: int) -> None:
        """Use this shared memory. The descriptor stays open."""
        self.memory_fd = memory_fd
        self._page = mmap.mmap(memory_fd, _PAGE_BYTES)

    @classmethod
    def create(cls) -> Terminal:
        """Create the shared memory."""
        memory_fd = os.memfd_create("elastic-agent:terminal", os.MFD_CLOEXEC)
        os.ftruncate(memory_fd, _PAGE_BYTES)
        return cls(memory_fd)

    def write(self, fd: int, lines: bytes, unfinished: bytes = b"") -> None:
        """Write whole lines, and keep this writer's unfinished line, if there is one, on the screen below them.

        Args:
            fd: descriptor of the terminal. A process may use two descriptors; each has its own unfinished line.
            lines: whole lines, each with its end; may be empty.
            unfinished: the complete unfinished line, not only its new text.

        Raises:
            OSError: the terminal cannot be written to.
        """
        own_id = os.getpid() << _FD_BITS | fd
        with self._locked():
            writer, shown = self._read()
            if shown and writer != own_id and not _is_alive(writer >> _FD_BITS):
                lines, writer, shown = b"\n" + lines, own_id, b""  # its writer was killed: keep the line on the screen
            is_mine = bool(unfinished) or writer == own_id
            below = _cut(unfinished, _columns(fd)) if is_mine else shown
            text = lines + below
            if writer == own_id and text.startswith(shown):
                text = text[len(shown) :]  # the line continues, like a prompt and the text that follows
            elif shown:
                text = _ERASE_LINE + text
            write_all(fd, text)
            self._store(own_id if is_mine else writer, below)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self.memory_fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.memory_fd, fcntl.LOCK_UN)

    def _read(self) -> tuple[int, bytes]:
        writer, length = _HEAD.unpack_from(self._page)
        return writer, self._page[_HEAD.size : _HEAD.size + length]

    def _store(self, writer: int, shown: bytes) -> None:
        shown = shown[: _PAGE_BYTES - _HEAD.size]
        self._page[_HEAD.size : _HEAD.size + len(shown)] = shown
        _HEAD.pack_into(self._page, 0, writer, len(shown))


@cache
def shared_terminal() -> Terminal | None:
    """Return the terminal of this agent's console. None: it has none."""
    return Terminal.create() if is_terminal(1) or is_terminal(2) else None


def is_terminal(fd: int) -> bool:
    """Whether the descriptor is a terminal that can erase a line."""
    return os.isatty(fd) and os.environ.get("TERM", "dumb") not in {"", "dumb"}


def _is_alive(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _columns(fd: int) -> int:
    """Return the width; 0: unknown."""
    try:
        return os.get_terminal_size(fd).columns
    except OSError:
        return 0


def _cut(line: bytes, columns: int) -> bytes:
    """Cut a line to one row. Of a line on two rows, only the second could be erased."""
    if len(line) < columns or not columns:
        return line
    text = line.decode(errors="replace")
    taken = 0
    for at, character in enumerate(text):
        taken += 2 if ord(character) >= _WIDE_FROM and ord(character) not in _BLOCKS else 1
        if taken >= columns:
            return text[:at].encode() + (_RESET_COLOURS if "\x1b" in text else b"")
    return line


def write_all(fd: int, data: bytes) -> None:
    """Write all of the data. Raises `OSError`."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process has made the console non-blocking
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()


def escape_controls(text: str) -> str:
    r"""Escape control characters, for instance as `\x1b`. Line ends, tabs and colours stay."""
    return _CONTROLS.sub(_escape, text)


def escape_control_bytes(text: bytes) -> bytes:
    """Escape control characters and bytes that are not UTF-8."""
    return escape_controls(text.decode(errors="surrogateescape")).encode()


def _escape(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) > 1 else f"\\x{ord(found[0]) & 0xFF:02x}"
