"""Where the output of each rank goes.

    {log_dir}/{job_id}/{run}/group-000003/rank-00001.node-b.log
                                          rank-00001.node-b.error.json    (if the script records one, as under torchrun)

A reader comes with "what did rank 1 say in group 3", so the directories follow the job's history and names sort by
rank; zeros keep the order of `ls`. With the run and the group in it a path is used once, ever: nothing is erased or
overwritten by a restart, and nodes that share the directory do not meet. The guardian makes the directories, since
a file server that is gone must not hold up the agent.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from agent.files import open_regular
from agent.links.log_server import FindLogs, LogEntry, LogsFound, ReadLog

_RANK = re.compile(r"rank-([0-9]{1,18})\.")


def log_path(group_dir: Path, node_id: str, rank: int) -> Path:
    """The log of one rank: its stdout and stderr, in the order in which they came."""
    return group_dir / f"rank-{rank:05d}.{node_id}.log"


def group_dir(log_dir: Path, job_id: str, run: str, group: int) -> Path:
    """The directory of one group's logs."""
    return log_dir / job_id / run / f"group-{group:06d}"


def error_path(log: Path) -> Path:
    """Where a script under torch's `@record` leaves its traceback: beside the log."""
    return log.with_suffix(".error.json")


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
