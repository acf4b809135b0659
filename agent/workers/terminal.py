"""The terminal to which the agent and its ranks write at the same time.

Part of the guardian (`guardian.py`), so standard library only, and quick to import.

A progress bar or a prompt is a line without an end, and is shown as it comes. A process that writes a whole line
meanwhile erases the unfinished one, writes its own, and draws the unfinished one again below. Each process must know
for that what another one has on the screen, so the unfinished line is kept in memory that all of them share. A lock
keeps their writes apart; the kernel gives it back if its owner is killed.
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

TYPE_CHECKING = False  # `typing` would take longer to import than the rest
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = struct.Struct("<QI")
"""Whose line it is, and its length in bytes."""
_FD_BITS = 20
_PAGE_BYTES = 1 << 14
_ERASE_LINE = b"\r\x1b[K"
_RESET_COLOURS = b"\x1b[0m"
_WIDE_FROM = 0x1100
"""Characters from here on may take two columns."""
_BLOCKS = range(0x2000, 0x2E80)
"""Lines, blocks and signs, of which bars are drawn, take one."""
_COMMANDING = re.compile(r"\x1b\[[0-9;:]*m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udcff]")
"""Colours, which pass, and else control characters of both sets, and bytes that are no UTF-8."""


class Terminal:
    """What stands unfinished on the last line of the screen, and the way to write beside it."""

    def __init__(self, memory_fd: int) -> None:
        """`memory_fd`: of the shared memory, which stays open."""
        self.memory_fd = memory_fd
        self._page = mmap.mmap(memory_fd, _PAGE_BYTES)

    @classmethod
    def create(cls) -> Terminal:
        """With new memory."""
        memory_fd = os.memfd_create("elastic-agent:terminal", os.MFD_CLOEXEC)
        os.ftruncate(memory_fd, _PAGE_BYTES)
        return cls(memory_fd)

    def write(self, fd: int, lines: bytes, unfinished: bytes = b"") -> None:
        """Write whole lines, and keep this writer's unfinished one, if there is one, on the screen below them.

        Args:
            fd: the terminal. A process may write to it by two numbers; each has an unfinished line of its own.
            lines: each with its end; or nothing.
            unfinished: the whole of it, not only what is new.

        Raises:
            OSError: it cannot be written to.
        """
        me = os.getpid() << _FD_BITS | fd
        with self._locked():
            writer, shown = self._read()
            if shown and writer != me and not _lives(writer >> _FD_BITS):
                lines, writer, shown = b"\n" + lines, me, b""  # it was killed: its last line stays where it is
            is_mine = bool(unfinished) or writer == me
            below = _cut(unfinished, _columns(fd)) if is_mine else shown
            text = lines + below
            if writer == me and text.startswith(shown):
                text = text[len(shown) :]  # what stands there goes on: a prompt, and what follows it
            elif shown:
                text = _ERASE_LINE + text
            write_all(fd, text)
            self._note(me if is_mine else writer, below)

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

    def _note(self, writer: int, shown: bytes) -> None:
        shown = shown[: _PAGE_BYTES - _HEAD.size]
        self._page[_HEAD.size : _HEAD.size + len(shown)] = shown
        _HEAD.pack_into(self._page, 0, writer, len(shown))


@cache
def shared_terminal() -> Terminal | None:
    """The terminal of this agent's console; None: it has none."""
    return Terminal.create() if is_terminal(1) or is_terminal(2) else None


def is_terminal(fd: int) -> bool:
    """Whether a line written there can be erased again."""
    return os.isatty(fd) and os.environ.get("TERM", "dumb") not in {"", "dumb"}


def _lives(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _columns(fd: int) -> int:
    """0: nobody knows."""
    try:
        return os.get_terminal_size(fd).columns
    except OSError:
        return 0


def _cut(line: bytes, columns: int) -> bytes:
    """What fits into one row: of a line that takes two, only the second could be erased."""
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
    """Write to the last byte. Raises `OSError`."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # the console was made non-blocking by another of its owners
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()


def harmless(text: str) -> str:
    r"""Return the text with its control characters written out: `\x1b` for an escape. Lines and colours stay."""
    return _COMMANDING.sub(_written_out, text)


def harmless_bytes(text: bytes) -> bytes:
    """The same of bytes, whatever they are."""
    return harmless(text.decode(errors="surrogateescape")).encode()


def _written_out(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) > 1 else f"\\x{ord(found[0]) & 0xFF:02x}"
