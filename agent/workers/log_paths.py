"""Where the output of each rank goes.

    {log_dir}/{job_id}/{run}/group-000003/rank-00001.node-b.log
                                          rank-00001.node-b.error.json    (if the script records one, as under torchrun)

A reader comes with "what did rank 1 say in group 3", so the directories follow the job's history and names sort by
rank; zeros keep the order of `ls`. With the run and the group in it a path is used once, ever: nothing is erased or
overwritten by a restart, and nodes that share the directory do not meet. The guardian makes the directories, since
a file server that is gone must not hold up the agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def log_path(group_dir: Path, node_id: str, rank: int) -> Path:
    """The log of one rank: its stdout and stderr, in the order in which they came."""
    return group_dir / f"rank-{rank:05d}.{node_id}.log"


def group_dir(log_dir: Path, job_id: str, run: str, group: int) -> Path:
    """The directory of one group's logs."""
    return log_dir / job_id / run / f"group-{group:06d}"


def error_path(log: Path) -> Path:
    """Where a script under torch's `@record` leaves its traceback: beside the log."""
    return log.with_suffix(".error.json")
