"""The identity of a job on one machine that nobody named: the same line in the same directory is the same job.

The job's etcd ends with its agent; only its checkpoints remain, in `checkpoints/{id}`. The id is derived from the
directory, the script and its arguments, so that the next start finds them. If that job is running, or has finished, a
new start gets the same id with the next number.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

_FINISHED = "finished"
_DIGITS = 8
_claims: list[int] = []
"""Descriptors of locks, held until this process ends."""


def claim(command: Sequence[str], log_dir: Path) -> str:
    """Return the id of the job that this line stands for here, and keep others from taking it.

    Args:
        command: the script and its arguments.
        log_dir: where a lock is kept, beside the logs of the job.
    """
    told = json.dumps([os.getcwd(), *command]).encode(errors="surrogateescape")  # noqa: PTH109 - as it was given
    stem = f"standalone-{hashlib.sha256(told).hexdigest()[:_DIGITS]}"
    number = finished = 0
    while True:
        number += 1
        job_id = stem if number == 1 else f"{stem}-{number}"
        if _is_finished(job_id):
            finished = number
        elif _lock(log_dir / f".{job_id}.lock"):
            break
    if number > 1:
        why = "finished, so this one begins anew" if finished == number - 1 else "runs, so this one is another job"
        click.echo(f"elastic-agent: the job of this line in this directory {why}: {job_id}", err=True)
    return job_id


def note_finished(job_id: str) -> None:
    """Note that the job has succeeded, so that the same line begins anew next time.

    Where nothing was saved it does so anyway. In a directory that the user has chosen nothing is noted.
    """
    place = checkpoints_of(job_id)
    with suppress(OSError):
        if place.is_dir():
            (place / _FINISHED).touch()


def checkpoints_of(job_id: str) -> Path:
    """Where a job keeps its checkpoints, unless `--checkpoint_dir` says otherwise."""
    return Path("checkpoints") / job_id


def _is_finished(job_id: str) -> bool:
    return (checkpoints_of(job_id) / _FINISHED).exists()


def _lock(path: Path) -> bool:
    """Tell whether it is ours now. Where nothing can be written, nothing can get mixed up either."""
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
    _claims.append(fd)
    return True
