"""The log files of ranks: their paths, and access to them for agents and commands.

    {log_dir}/{job_id}/{run}/group-000003/rank-00001.node-b.log
                                          rank-00001.node-b.error.json    (if the script records one, as under torchrun)
                                          standby-00000.node-b.log        (of a standby that sets up beside the ranks)

The usual question is "what did rank 1 print in group 3", so directories follow the job's history and names sort by
rank; leading zeros keep the order of `ls`. A path contains the run and the group, so it is used only once: a restart
never overwrites a log, and nodes that share the directory do not conflict. The guardian creates the directories,
because an unreachable file server must not block the agent.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from agent.files import open_regular
from agent.links.queries import FindLogs, LogEntry, LogsFound, ReadLog

_RANK = re.compile(r"rank-([0-9]{1,18})\.")


def log_path(group_dir: Path, node_id: str, rank: int) -> Path:
    """Return the path of one rank's log: its stdout and stderr, in the order of their arrival."""
    return group_dir / f"rank-{rank:05d}.{node_id}.log"


def standby_log_path(group_dir: Path, node_id: str, local_rank: int) -> Path:
    """Return the path of the log of a standby that sets up the script beside the ranks of a group."""
    return group_dir / f"standby-{local_rank:05d}.{node_id}.log"


def group_dir(log_dir: Path, job_id: str, run: str, group: int) -> Path:
    """Return the directory of one group's logs."""
    return log_dir / job_id / run / f"group-{group:06d}"


def error_path(log: Path) -> Path:
    """Return the path of the traceback that a script under torch's `@record` writes: beside the log."""
    return log.with_suffix(".error.json")


class LogArchive:
    """The logs of one job under one directory. Files that do not match the layout above are ignored."""

    def __init__(self, log_dir: Path, job_id: str) -> None:
        self._log_dir = log_dir
        self._job_id = job_id

    def find(self, find: FindLogs) -> LogsFound:
        """Find the logs of one node in one group. May block. Raises `OSError`."""
        directory = self._group_dir(find.run, find.group)
        return LogsFound(directory=str(directory), logs=_logs_in(directory, find.node_id))

    def read(self, read: ReadLog, limit_bytes: int) -> bytes:
        """Read a part of one log; empty at its end. May block. Raises `OSError`."""
        path = log_path(self._group_dir(read.run, read.group), read.node_id, read.rank)
        # A worker may have replaced the log: do not follow links, and do not block on a FIFO.
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
