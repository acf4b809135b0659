"""Temporary directories that are removed in any case: at the end, or by the next one's maker if nobody was left to.

Each holds a locked file for as long as its maker lives; the kernel drops the lock with the process, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.files import open_regular

_PREFIX = "elastic-agent-etcd-"
_LOCK = "in-use"
_LONGEST = 70
"""Bytes. A Unix socket in a directory of ours has at most 107 in its name."""


class ScratchDir:
    """A new directory; what others left behind is removed first."""

    def __init__(self) -> None:
        _remove_forsaken()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
        fresh = self.path / "new"
        self._lock = fresh.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)  # only now may others try the lock

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _base() -> Path:
    """Where temporary directories are made; where that is no name for sockets, `/tmp`: gRPC takes a comma for two."""
    usual = tempfile.gettempdir()
    is_fit = len(os.fsencode(usual)) <= _LONGEST and "," not in usual
    return Path(usual if is_fit else "/tmp")  # noqa: S108 - mkdtemp makes what nobody foresees


def _remove_forsaken() -> None:
    for place in _base().glob(f"{_PREFIX}*"):
        with suppress(OSError), _lock_of(place) as lock:  # another user's, or gone by now, or in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place)


@contextmanager
def _lock_of(place: Path) -> Iterator[int]:
    """Open the lock of a directory that is this user's own: in a shared one anybody can make something of that name.

    Raises:
        OSError: there is none, or it is not this user's.
    """
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_own(folder)
        lock = open_regular(_LOCK, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            _require_own(lock)
            yield lock
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _require_own(fd: int) -> None:
    if os.fstat(fd).st_uid != os.geteuid():
        raise OSError(errno.EPERM, "another user's")
