"""Temporary directories that are removed in any case: at the end, or by the next one's maker if nobody was left to.

Each holds a locked file for as long as its maker lives; the kernel drops the lock with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "elastic-agent-etcd-"
_LOCK = "in-use"


class ScratchDir:
    """A new directory; what others left behind is removed first."""

    def __init__(self) -> None:
        _remove_forsaken()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        fresh = self.path / "new"
        self._lock = fresh.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)  # only now may others try the lock

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_forsaken() -> None:
    for lock_path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock_path.open("rb") as lock:  # another user's, or gone by now, or in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent)
