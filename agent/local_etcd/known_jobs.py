"""The jobs of this user on this machine whose etcd an agent has brought: commands find them here without being told.

    {XDG_RUNTIME_DIR}/elastic-agent/{job_id}.{pid}.job        where etcd and logs are
    {XDG_RUNTIME_DIR}/elastic-agent/{job_id}.{pid}.records    what etcd had, for when it has ended with its agent

Without that variable the directory is `elastic-agent-{uid}` among the temporary ones. Only one of this user's own is
written to and read, that nobody else may enter.

The agent holds a lock on the first file as long as it lives; the kernel drops it with the process, however that ends.
So what a file says of a living agent is never believed by its name or its age. (`agent/cli/standalone.py` has another
lock, beside the job's logs: machines may share that directory, and it tells whether an id is taken.)
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
_REMEMBERED = 20
"""Jobs whose agents are gone."""


class KnownJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent notes of its job."""

    job_id: str
    endpoints: tuple[str, ...]
    """Of its etcd."""
    is_private: bool
    """That etcd ends with this agent. If not, other machines' agents may keep it."""
    has_secret: bool = False
    """That etcd lets nobody in without the secret that the job's machines share."""
    directory: str
    """Where the agent was started."""
    log_dir: str
    began_at: float
    """Wall clock, seconds since 1970."""


@dataclass(frozen=True)
class FoundJob:
    """A job that was noted."""

    job: KnownJob
    is_alive: bool
    """Its agent is."""
    folder: Path
    name: str

    def records(self) -> bytes:
        """What was kept of it; empty: nothing."""
        try:
            with _opened(self.folder) as folder:
                return _read(folder, self.name + _RECORDS, _RECORDS_BYTES)
        except OSError:
            return b""


class JobNote:
    """A job, noted for as long as this process lives. Raises `OSError` where that cannot be done."""

    def __init__(self, job: KnownJob) -> None:
        self._job = job
        self._name = f"{job.job_id}.{os.getpid()}"
        self._lock = -1
        self._write()

    def keep(self, records: bytes) -> None:
        """Put what is to be known of it later in the place of what was. Raises `OSError`."""
        if not self.is_there():  # the system may remove the directory when its user logs out
            self._write()
        with _opened(_usual_folder()) as folder:
            os.close(_put(folder, self._name + _RECORDS, records))

    def close(self) -> None:
        """Let go of it: its agent lives no more."""
        os.close(self._lock)

    def _write(self) -> None:
        place = _usual_folder()
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        with _opened(place) as folder:
            _forget_old(folder, self._job.job_id)
            lock = _put(folder, self._name + _JOB, msgspec.json.encode(self._job), is_locked=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    def is_there(self) -> bool:
        """Whether commands still find it."""
        try:
            return os.path.samestat(os.stat(_usual_folder() / (self._name + _JOB)), os.fstat(self._lock))  # noqa: PTH116
        except OSError:
            return False


def known_jobs() -> list[FoundJob]:
    """All of them, those whose agents live first, then the newest first; of several agents of one job the first."""
    found = [each for place in _folders() for each in _found_in(place)]
    found.sort(key=lambda each: (each.is_alive, each.job.began_at), reverse=True)
    return list({each.job.job_id: each for each in reversed(found)}.values())[::-1]


def _found_in(place: Path) -> Iterator[FoundJob]:
    with suppress(OSError), _opened(place) as folder:
        for name in _names(folder):
            with suppress(OSError, msgspec.MsgspecError):
                job = msgspec.json.decode(_read(folder, name + _JOB, _JOB_BYTES), type=KnownJob)
                yield FoundJob(job, _is_locked(folder, name), place, name)


def _folders() -> list[Path]:
    """Where jobs may have been noted, also by an agent that was started with less of an environment than this."""
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
    """Open a directory that is this user's alone. Raises `OSError`."""
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{place} must be this user's, and nobody else's to enter (mode 0700)")
        yield folder
    finally:
        os.close(folder)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name.removesuffix(_JOB) for entry in entries if entry.name.endswith(_JOB)]
    return [name for name in names if _NAME.fullmatch(name)]


def _put(folder: int, name: str, content: bytes, *, is_locked: bool = False) -> int:
    """Put a file in its place, whole; return its descriptor."""
    fresh = f".new.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(fresh, dir_fd=folder)  # of a process that had this number
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if is_locked:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before anybody finds it
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
            raise PermissionError(f"{name} is another user's")
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


def _forget_old(folder: int, job_id: str) -> None:
    """Remove what is left of earlier agents: of this job, and of others if there are many."""
    dead: list[tuple[float, str]] = []
    for name in _names(folder):
        with suppress(OSError):
            if not _is_locked(folder, name):
                dead.append((os.stat(name + _JOB, dir_fd=folder).st_mtime, name))
    others = sorted(each for each in dead if each[1].rpartition(".")[0] != job_id)
    gone = {name for _, name in dead} - {name for _, name in others[-_REMEMBERED:]}
    for name in gone:
        for suffix in (_JOB, _RECORDS):
            with suppress(OSError):
                os.unlink(name + suffix, dir_fd=folder)
