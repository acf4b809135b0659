"""The logs of one job that lie on this node's disk, for whoever may see them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from agent.files import open_regular
from agent.links.queries import FindLogs, LogEntry, LogsFound, ReadLog
from agent.workers.log_paths import group_dir, log_path

_RANK = re.compile(r"rank-([0-9]{1,18})\.")


class LogArchive:
    """The logs under one directory; see `log_paths.py` for the layout. What does not match it is not there."""

    def __init__(self, log_dir: Path, job_id: str) -> None:
        self._log_dir = log_dir
        self._job_id = job_id

    def find(self, find: FindLogs) -> LogsFound:
        """Look for the logs of one node in one group. May block. Raises `OSError`."""
        directory = self._group_dir(find.run, find.group)
        return LogsFound(directory=str(directory), logs=_logs_in(directory, find.node_id))

    def read(self, read: ReadLog, limit_bytes: int) -> bytes:
        """Read a part of one log; nothing, if it ends there. May block. Raises `OSError`."""
        path = log_path(self._group_dir(read.run, read.group), read.node_id, read.rank)
        # What a worker may have put there in a log's place leads nowhere else, and is not waited for.
        fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.pread(fd, limit_bytes, read.offset)
        finally:
            os.close(fd)

    def _group_dir(self, run: str, group: int) -> Path:
        return group_dir(self._log_dir, self._job_id, run, group)


def _logs_in(directory: Path, node_id: str) -> tuple[LogEntry, ...]:
    try:
        names = {entry.name for entry in directory.iterdir()}
    except FileNotFoundError:
        return ()
    ranks = sorted({int(match[1]) for name in names if (match := _RANK.match(name))})
    paths = ((rank, log_path(directory, node_id, rank)) for rank in ranks)
    return tuple(LogEntry(rank=rank, size_bytes=path.stat().st_size) for rank, path in paths if path.name in names)
