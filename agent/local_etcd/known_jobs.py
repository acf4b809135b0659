"""This user's jobs on this machine whose etcd is run by an agent, so that commands find them without options.

    {XDG_RUNTIME_DIR}/elastic-agent/{job_id}.{pid}.job        where etcd and the logs are
    {XDG_RUNTIME_DIR}/elastic-agent/{job_id}.{pid}.records    etcd's records, for the time after etcd has ended

Without that variable the directory is `elastic-agent-{uid}` in the directory for temporary files. It is used only if it
belongs to this user and no other user may enter it.

The agent holds a lock on the first file as long as it lives; the kernel releases the lock when the process ends. Only
the lock shows that an agent lives, never the file's name or age. (`agent/cli/standalone.py` has another lock, in the
directory of the job's logs: machines may share that directory, and the lock shows whether a job id is in use.)
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.files import open_regular

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\.[0-9]{1,10}")
_JOB, _RECORDS = ".job", ".records"
_JOB_BYTES = 1 << 16
_RECORDS_BYTES = 1 << 26
_MAX_ENDED = 20
"""How many jobs are kept whose agents have ended."""


class KnownJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent notes about its job."""

    job_id: str
    endpoints: tuple[str, ...]
    """Endpoints of its etcd."""
    is_private: bool
    """Whether its etcd ends with this agent. Otherwise the agents of other machines may keep it running."""
    has_secret: bool = False
    """Whether its etcd requires the secret that the job's machines share."""
    directory: str
    """Working directory of the agent."""
    log_dir: str
    began_at: float
    """Wall time in seconds since 1970."""


@dataclass(frozen=True)
class FoundJob:
    """A job found on this machine."""

    job: KnownJob
    is_alive: bool
    """Whether its agent lives."""
    folder: Path
    name: str
    kept_at: float
    """When its records were last kept, in seconds since 1970. 0: never."""

    def records(self) -> bytes:
        """Return the kept records; empty: there are none."""
        try:
            with _opened(self.folder) as folder:
                return _read(folder, self.name + _RECORDS, _RECORDS_BYTES)
        except OSError:
            return b""


class JobNote:
    """The note of a job, found by commands as long as this process lives. Raises `OSError` if it cannot be written."""

    def __init__(self, job: KnownJob) -> None:
        self._job = job
        self._name = f"{job.job_id}.{os.getpid()}"
        self._lock = -1
        self._write()

    def keep(self, records: bytes) -> None:
        """Replace the kept records. Raises `OSError`."""
        if not self.is_there():  # the system may remove the directory when the user logs out
            self._write()
        with _opened(_usual_folder()) as folder:
            os.close(_write_atomically(folder, self._name + _RECORDS, records))

    def close(self) -> None:
        """Release the lock: the job counts as one whose agent has ended."""
        os.close(self._lock)

    def _write(self) -> None:
        place = _usual_folder()
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        with _opened(place) as folder:
            _remove_old(folder, self._job.job_id)
            lock = _write_atomically(folder, self._name + _JOB, msgspec.json.encode(self._job), is_locked=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    def is_there(self) -> bool:
        """Whether commands still find the note."""
        try:
            return os.path.samestat(os.stat(_usual_folder() / (self._name + _JOB)), os.fstat(self._lock))  # noqa: PTH116
        except OSError:
            return False


def known_jobs() -> list[FoundJob]:
    """Return all jobs: first those whose agents live, then the newest.

    Of several agents of a job, one that lives counts, else the one with the newest records: an agent that has left the
    job early, for instance because its node was drained, does not know how the job ended.
    """
    found = [each for place in _folders() for each in _found_in(place)]
    found.sort(key=lambda each: (each.is_alive, each.kept_at, each.job.began_at))
    jobs = {each.job.job_id: each for each in found}.values()
    return sorted(jobs, key=lambda each: (each.is_alive, each.job.began_at), reverse=True)


def _found_in(place: Path) -> Iterator[FoundJob]:
    with suppress(OSError), _opened(place) as folder:
        for name in _names(folder):
            with suppress(OSError, msgspec.MsgspecError):
                job = msgspec.json.decode(_read(folder, name + _JOB, _JOB_BYTES), type=KnownJob)
                yield FoundJob(job, _is_locked(folder, name), place, name, _kept_at(folder, name))


def _folders() -> list[Path]:
    """Return the directories of notes, including the one used by an agent without `XDG_RUNTIME_DIR`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [Path(runtime, "elastic-agent")] if runtime.startswith("/") and _is_own(Path(runtime), stat.S_IWOTH) else []
    return [*found, Path(tempfile.gettempdir(), f"elastic-agent-{os.geteuid()}")]


def _usual_folder() -> Path:
    return _folders()[0]


def _is_own(folder: Path, forbidden: int) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & forbidden


@contextmanager
def _opened(place: Path) -> Iterator[int]:
    """Open a directory that only this user may enter. Raises `OSError`."""
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{place} must belong to this user, with mode 0700")
        yield folder
    finally:
        os.close(folder)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name.removesuffix(_JOB) for entry in entries if entry.name.endswith(_JOB)]
    return [name for name in names if _NAME.fullmatch(name)]


def _write_atomically(folder: int, name: str, content: bytes, *, is_locked: bool = False) -> int:
    """Write a file atomically; return its descriptor."""
    fresh = f".new.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(fresh, dir_fd=folder)  # left by a process with the same id
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if is_locked:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before others can see it
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.unlink(fresh, dir_fd=folder)
        raise
    return fd


def _read(folder: int, name: str, limit_bytes: int) -> bytes:
    with _file(folder, name) as fd, open(fd, "rb", closefd=False) as file:
        content = file.read(limit_bytes + 1)
    return content if len(content) <= limit_bytes else b""


@contextmanager
def _file(folder: int, name: str) -> Iterator[int]:
    fd = open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(f"{name} belongs to another user")
        yield fd
    finally:
        os.close(fd)


def _is_locked(folder: int, name: str) -> bool:
    with _file(folder, name + _JOB) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _kept_at(folder: int, name: str) -> float:
    try:
        return os.stat(name + _RECORDS, dir_fd=folder, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _remove_old(folder: int, job_id: str) -> None:
    """Remove the files of agents that have ended: all of this job, and the oldest of other jobs."""
    dead: list[tuple[float, str]] = []
    for name in _names(folder):
        with suppress(OSError):
            if not _is_locked(folder, name):
                dead.append((os.stat(name + _JOB, dir_fd=folder).st_mtime, name))
    others = sorted(each for each in dead if each[1].rpartition(".")[0] != job_id)
    gone = {name for _, name in dead} - {name for _, name in others[-_MAX_ENDED:]}
    for name in gone:
        for suffix in (_JOB, _RECORDS):
            with suppress(OSError):
                os.unlink(name + suffix, dir_fd=folder)
