"""Gives memory back to the system on a thread of its own: a gigabyte takes tenths of a second, and nobody waits for it.

What is let go of counts as taken until it is free, in the order in which it came. The thread keeps nobody from running:
`os.close` lets go of the interpreter's lock, and for a part of a memory there is the C library's `fallocate`, for
`mmap.madvise` does not. Where the system refuses to empty a part of a memory, that stays taken until all of it goes.
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
    """What is to be given back. `close_soon` and `empty_soon` may be called from any thread."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="freeing", daemon=True)
        self._thread.start()

    def close_soon(self, fd: int) -> None:
        """Close this, which is nobody else's any more. A process that has the memory too may go on with it."""
        self._waiting.put(partial(os.close, fd))

    def empty_soon(self, fd: int, begin: int, end: int) -> None:
        """Leave nothing in this part of a memory."""
        self._waiting.put(partial(_empty, fd, begin, end))

    def close(self) -> None:
        """Return once all is given back."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        has_warned = False
        for free in iter(self._waiting.get, None):
            try:
                free()
            except OSError as error:
                if not has_warned:
                    log.warning("memory of older snapshots cannot be given back", error=repr(error))
                has_warned = True


def _empty(fd: int, begin: int, end: int) -> None:
    if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, begin, end - begin) != 0:
        raise OSError(ctypes.get_errno(), "cannot give back a part of a snapshot's memory")
