"""Where the large parts that a neighbour sends are kept: in memory, or if that is short, in files on local disk.

Memory is short if this node's own snapshots and the copies together would exceed their limit, or if a copy is larger
than what is free. From then on all further copies of the group are kept on disk. If the disk is short too, the part is
refused, and the other agent reports that no copies are kept.

A file has no name, so nothing is left of it however the agent ends. Its blocks are reserved before the part arrives.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.links.part_receiver import NoRoomError
from agent.observe.log import log
from agent.workers.memory_release import fallocate
from trainer_runtime.free_memory import free_memory
from trainer_runtime.snapshot_page import MEMORY_NAME

if TYPE_CHECKING:
    from agent.workers.memory_release import MemoryRelease

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_LEFT_FREE = 1.0
"""Least space that a new copy leaves free on the disk, as a multiple of its size: logs and checkpoints need some."""


@dataclass(frozen=True)
class SnapshotUse:
    """What snapshots take of this node's memory, in bytes."""

    now: int
    """What they have now."""
    expected: int
    """What this node's own and the copies from its neighbour will take if all are in memory."""


class ReplicaSpace:
    """Provides space for copies. Methods may be called from any thread.

    Args:
        limit_bytes: limit of the memory for snapshots on this node. None: half of what would be free without any.
        directories: where files may be, in order of preference; one that is itself in memory is passed over. None: the
            directory for temporary files (`TMPDIR`), then `/var/tmp`.
    """

    def __init__(self, limit_bytes: int | None = None, directories: Sequence[str] | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._directories = directories
        self._lock = threading.Lock()
        self._short: tuple[int, str] | None = None
        """The group for which memory is short, and why."""
        self._is_on_disk = False
        """As was logged last."""

    def open(self, group: int, size_bytes: int, old: int | None, use: SnapshotUse, release: MemoryRelease) -> int:
        """Return the descriptor of a space of this size, which belongs to the caller.

        Args:
            group: number of the group that the part is of.
            size_bytes: size of the part.
            old: descriptor of the space of an older part, which is used again or released. None: there is none.
            use: what snapshots take.
            release: closes descriptors.

        Raises:
            NoRoomError: there is too little memory, and too little space on disk.
        """
        space, shortage = old, ""
        try:
            growth = size_bytes - (os.fstat(old).st_size if old is not None else 0)
            is_kept = old is not None and (growth <= 0 or not is_in_memory(old))
            shortage = "" if is_kept else self._shortage(group, growth, use)
            if space is not None and shortage:
                release.close_soon(space)
                space = None
            if space is None:
                space = self._open_file(size_bytes, shortage) if shortage else _open_memory()
            if not is_in_memory(space):
                fallocate(space, 0, 0, size_bytes)
            os.ftruncate(space, size_bytes)
            if shortage:
                self._note_on_disk(shortage)
        except OSError as error:  # ulimit -f, a full disk
            if space is not None:
                release.close_soon(space)
            reasons = filter(None, (shortage, f"its space for a copy cannot grow: {error}"))
            raise NoRoomError("; ".join(reasons)) from error
        return space

    def _shortage(self, group: int, growth_bytes: int, use: SnapshotUse) -> str:
        """Return why a copy cannot be held in memory; empty: it can."""
        free = free_memory()
        limit = self._limit_bytes if self._limit_bytes is not None else (free + use.now) // 2
        with self._lock:
            if self._short is not None and self._short[0] >= group:
                return self._short[1]
            if free < growth_bytes:
                why = f"it has {free >> 20} MiB of free memory, and a copy takes {growth_bytes >> 20}"
            elif use.expected > limit:
                needed = f"its snapshots and copies would take {use.expected >> 20} MiB of memory"
                why = f"{needed}, and may take {limit >> 20}"
            else:
                was_on_disk, self._is_on_disk = self._is_on_disk, False
                if was_on_disk:
                    log.info("copies of another node's snapshots are kept in memory again")
                return ""
            self._short = group, why
            return why

    def _open_file(self, size_bytes: int, shortage: str) -> int:
        """Return a new file without a name. Raises `NoRoomError` and `OSError`."""
        directory = self._directory(shortage)
        found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        if free < size_bytes * (1 + _LEFT_FREE):
            raise NoRoomError(f"{shortage}; on disk, {directory} has {free >> 20} MiB free, of which half may be used")
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return os.dup(file.fileno())

    def _note_on_disk(self, shortage: str) -> None:
        with self._lock:
            was_on_disk, self._is_on_disk = self._is_on_disk, True
        if not was_on_disk:
            directory = self._directory(shortage)
            log.warning(f"copies of another node's snapshots are kept on disk, in {directory}: {shortage}")

    def _directory(self, shortage: str) -> str:
        """Return the first directory that is on a disk. Raises `NoRoomError`."""
        directories = [tempfile.gettempdir(), "/var/tmp"] if self._directories is None else self._directories  # noqa: S108 - files there get no name
        for directory in directories:
            with suppress(OSError):  # it does not exist
                if _kind_of(directory) not in _MEMORY_FILE_SYSTEMS:
                    return directory
        raise NoRoomError(f"{shortage}; none of {', '.join(directories)} is on a disk: set TMPDIR to one that is")


def is_in_memory(descriptor: int) -> bool:
    """Return whether a space is in memory, and not in a file on disk."""
    return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("/memfd:")


def _open_memory() -> int:
    return os.memfd_create(f"{MEMORY_NAME}:kept", os.MFD_CLOEXEC)


def _kind_of(directory: str) -> str:
    """Return the kind of the file system that has a directory; empty: unknown. Raises `OSError`."""
    device = Path(directory).stat().st_dev
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())
    name = f"{os.major(device)}:{os.minor(device)}"
    return next((fields[-3] for fields in mounts if fields[2] == name), "")
