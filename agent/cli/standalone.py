"""The id of a job on one machine that has no `--job_id`: the same line in the same directory is the same job.

The job's etcd ends with its agent. Only the checkpoints remain, in `checkpoints/{id}`. The id is derived from the
directory, the script and its arguments, so that the next start finds the checkpoints. If that job is running or has
finished, a new start gets the same id with the next number.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from agent.local_etcd.known_jobs import known_jobs

_FINISHED = "finished"
_DIGITS = 8
_claims: dict[int, Path] = {}
"""Lock files that this process holds, by file descriptor."""


def claim_job_id(command: Sequence[str], log_dir: Path, *, keeps_checkpoints: bool = False) -> str:
    """Return the job id of this command line in this directory, and lock it against other agents.

    A job that runs with another `log_dir` has its lock file there. It is found by its note in the user's runtime
    directory.

    Args:
        command: the script and its arguments.
        log_dir: where the lock file is made, beside the job's logs.
        keeps_checkpoints: the user has chosen the directory of the checkpoints. A finished job then continues from
            them, and its id is not changed.
    """
    identity = json.dumps([os.getcwd(), *command]).encode(errors="surrogateescape")  # noqa: PTH109 - with its symbolic links
    stem = f"standalone-{hashlib.sha256(identity).hexdigest()[:_DIGITS]}"
    number = finished = 0
    running = {each.job.job_id for each in known_jobs() if each.is_alive}
    while True:
        number += 1
        job_id = stem if number == 1 else f"{stem}-{number}"
        if not keeps_checkpoints and _is_finished(job_id):
            finished = number
        elif job_id not in running and _try_lock(log_dir / f".{job_id}.lock"):
            break
    if number > 1:
        why = "finished, so this one begins anew" if finished == number - 1 else "runs, so this one is another job"
        click.echo(f"elastic-agent: the job of this line in this directory {why}: {job_id}", err=True)
    return job_id


def note_finished(job_id: str) -> None:
    """Record that the job has succeeded, so that the same line starts a new job next time.

    Without a checkpoint directory nothing is recorded: the next start begins anew anyway. Nothing is recorded in a
    directory that the user has chosen either.
    """
    directory = checkpoints_of(job_id)
    with suppress(OSError):
        if directory.is_dir():
            (directory / _FINISHED).touch()


def checkpoints_of(job_id: str) -> Path:
    """The directory of a job's checkpoints, unless `--checkpoint_dir` names another."""
    return Path("checkpoints") / job_id


def _is_finished(job_id: str) -> bool:
    return (checkpoints_of(job_id) / _FINISHED).exists()


def release_claims() -> None:
    """Remove the lock files of this process, and release them. Called at its end.

    Only the holder of a lock removes its file, and `_try_lock` does not accept a lock on a removed file. So two agents
    never hold the same claim.
    """
    while _claims:
        fd, path = _claims.popitem()
        with suppress(OSError):
            path.unlink()
        os.close(fd)


atexit.register(release_claims)


def _try_lock(path: Path) -> bool:
    """Whether this process holds the lock now. True also if the file cannot be made: then no logs can mix either."""
    path = path.absolute()
    while True:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:  # a file system without locks
            os.close(fd)
            return True
        if _is_named(fd, path):
            _claims[fd] = path
            return True
        os.close(fd)  # its last holder has just removed it


def _is_named(fd: int, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
