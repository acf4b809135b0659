"""Frees memory on a thread of its own, because freeing a gigabyte takes tenths of a second and callers may not block.

Memory is freed in the order of the requests, and counts as used until then. The thread does not block the interpreter:
`os.close` releases its lock, and a range is freed by the C library's `fallocate`, because `mmap.madvise` keeps the
lock. If the kernel refuses to free a range, it stays in use until the whole memory is closed.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from agent.observe.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class MemoryRelease:
    """A queue of memory to free. `close_soon` and `punch_hole_soon` may be called from any thread."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="memory-release", daemon=True)
        self._thread.start()

    def close_soon(self, fd: int) -> None:
        """Close a descriptor that nothing else in this process uses. Other processes may still have the memory."""
        self._waiting.put(partial(os.close, fd))

    def punch_hole_soon(self, fd: int, begin: int, end: int) -> None:
        """Free this range of a memory."""
        self._waiting.put(partial(_punch_hole, fd, begin, end))

    def close(self) -> None:
        """Return once everything is freed."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        has_warned = False
        for free in iter(self._waiting.get, None):
            try:
                free()
            except OSError as error:
                if not has_warned:
                    log.warning("cannot free memory of older snapshots", error=repr(error))
                has_warned = True


def fallocate(fd: int, mode: int, begin: int, length: int) -> None:
    """Reserve or free bytes of a file, as the system call of this name; never slowly, as the C library may otherwise.

    Raises:
        OSError: the disk is full, or its file system cannot do it.
    """
    if _libc.fallocate(fd, mode, begin, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _punch_hole(fd: int, begin: int, end: int) -> None:
    try:
        fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, begin, end - begin)
    except OSError as error:
        raise OSError(error.errno, "cannot free a part of a snapshot's memory") from error
