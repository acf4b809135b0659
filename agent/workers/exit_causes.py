"""What the system knows of a worker's end: that memory ran out, or that a GPU failed.

Part of the guardian (`guardian.py`), so standard library only, and quick to import. Nothing here waits, and what cannot
be read is left out: the kernel's log is mostly hidden from a container.

| what | seen in |
|---|---|
| the kernel killed it for want of memory | the kernel's log, by its pid |
| same | its memory cgroup's count of such kills, which has grown since the worker's start |
| a GPU failed | `NVRM: Xid` in the kernel's log |
| a limit of the process was reached | `getrlimit`, and what it wrote last |
| shared memory is full | the file system at /dev/shm, after a SIGBUS |

A data loader's process that the worker names in its last words counts as itself: it died of that one's death.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from contextlib import suppress

TYPE_CHECKING = False  # `typing` would take longer to import than the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Entry = tuple[float, str]
    """Of the kernel's log: seconds since boot, and the text."""

_SHELL_CODES = range(129, 160)
"""A shell's exit code when a signal ended its child: 128 more than that."""
_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_LOADER_KILLED = "is killed by signal: Killed"
_LOADER_BUS_ERROR = re.compile("is killed by signal: Bus error|Unexpected bus error encountered in worker")

_KERNEL_LOG = "/dev/kmsg"
_RECORD_BYTES = 8192
_READ_WITHIN_S = 0.2
_OOM_LIMIT = re.compile(r"memory: usage \d+kB, limit (\d+)kB")
_OOM_KILL = re.compile(r"(Memory cgroup out|Out) of memory: Kill(?:ed)? process (\d+) ")
_INIT_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode. Only there are the pids of the kernel's log ours too."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\dA-Fa-f:.]+)\): (\d+),(?: pid=([^,]*),)?(?: name=[^,]*,)? *(.*)")
_GPU_FAILED = {
    48: "double-bit ECC error",
    63: "ECC page retired or row remapped",
    64: "ECC page could not be retired or row remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "timeout of its system processor",
}
"""The hardware did, whichever process the kernel names. After NVIDIA's catalogue of Xid errors."""
_GPU_REFUSED = {13: "graphics engine exception", 31: "GPU memory page fault", 43: "GPU stopped processing"}
"""It ended what one process did, mostly by a fault of that one."""
_CLEANUP = 45
"""Comes after any of these, and when a process is killed that used the GPU: it is no cause."""
_GPU_WITHIN_S = 1800.0
"""A rank may wait for so long in a collective before it ends. What is older than that it has survived."""
_CLOCK_DRIFT = 1e-4
"""Of the time since boot: the kernel's log has a clock that is never corrected."""

_NO_LIMIT_BYTES = 1 << 60
_LIMIT_CHARACTERS = 2000
_LIMITS = (
    (
        resource.RLIMIT_NOFILE,
        0,
        re.compile("Too many open files"),
        "it may have no more than {} files open (ulimit -n)",
    ),
    (
        resource.RLIMIT_FSIZE,
        signal.SIGXFSZ,
        re.compile("File too large"),
        "a file may have no more than {} (ulimit -f)",
    ),
    (
        resource.RLIMIT_AS,
        0,
        re.compile("MemoryError|Cannot allocate memory|bad_alloc|failed to map segment|can't start new thread"),
        "it may have no more than {} of address space (ulimit -v)",
    ),
    (
        resource.RLIMIT_NPROC,
        0,
        re.compile(
            r"can't start new thread"
            r"|(?:\bfork: |os\.fork\(|_fork_exec\(|pthread_create|[Tt]hread creation)"
            r"(?s:.{0,1000}?)Resource temporarily unavailable"
        ),
        "its user may have no more than {} processes and threads (ulimit -u)",
    ),
    (resource.RLIMIT_CPU, signal.SIGXCPU, re.compile("(?!)"), "it may compute for no more than {} s (ulimit -t)"),
)
"""Which, the signal that comes of it, what is said where it is reached, and how it is told."""
_IN_BYTES = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
_SHM = "/dev/shm"  # noqa: S108 - it is looked at, not written
_SHM_FULL = 0.02
_SHM_SMALL_BYTES = 64 << 20
"""What a container has that asked for no more."""


def death_of(status: int) -> int:
    """The signal that ended a process, as wait() tells of it, or the last child of a shell; 0: none."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return -code
    return code - 128 if code in _SHELL_CODES else 0


class ExitCauses:
    """Made when a worker starts, and asked when it has ended."""

    def __init__(self) -> None:
        self._log = _KernelLog()
        self._levels: list[Level] = []
        with suppress(ValueError, LookupError):  # a kernel that writes its files in another way
            self._levels = memory_levels()
        self._before = [level.counts() for level in self._levels]

    def why(self, pid: int, status: int, words: str) -> str:
        """What the system knows of a worker's end, in a few words; empty: nothing.

        Args:
            pid: The worker's.
            status: As wait() gave it.
            words: The end of what it wrote to standard error.
        """
        death, loaders = death_of(status), _loaders_in(words)
        pids = {pid, *loaders} if _are_kernel_pids() else set()
        entries, is_all = self._log.read()
        if death == signal.SIGKILL or _LOADER_KILLED in words:
            # The count may have grown by another's death; but the log does not name a shell's child as ours.
            is_told = is_all and pids and (os.WIFSIGNALED(status) or loaders)
            return oom_kill_in(entries, pids) or ("" if is_told else self._cgroup_kill())
        if death == signal.SIGBUS or _LOADER_BUS_ERROR.search(words):
            return shared_memory()
        if death == signal.SIGTERM:
            return ""
        limit = limit_reached(death, words)
        if limit:
            return limit
        now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        return oom_kill_in(entries, pids) or gpu_error_in(entries, pids, now_s)

    def _cgroup_kill(self) -> str:
        """Whether the kernel has killed something in the worker's cgroup, and which limit was hit: the innermost."""
        after = [level.counts() for level in self._levels]
        if not self._levels or after[0][0] <= self._before[0][0]:
            return ""
        for level, (_, hits), (_, hits_before) in zip(self._levels, after, self._before, strict=True):
            limit_bytes = level.limit_bytes()
            if hits > hits_before and limit_bytes < _NO_LIMIT_BYTES:
                return _killed_by_limit(limit_bytes)
        return _KILLED


def limit_reached(death: int, words: str) -> str:
    """The limit of the process (`ulimit`) that its end comes of; empty: none."""
    tail = words[-_LIMIT_CHARACTERS:]
    for which, number, pattern, told in _LIMITS:
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY and (death == number if number and death else pattern.search(tail)):
            return told.format(_size(limit) if which in _IN_BYTES else limit)
    return ""


def _loaders_in(words: str) -> set[int]:
    return {int(pid) for pids in _LOADER.findall(words) for pid in re.findall(r"\d+", pids)}


_KILLED = "out of memory: the kernel killed it"


def _killed_by_limit(limit_bytes: int) -> str:
    return f"out of memory: its cgroup's limit of {_size(limit_bytes)} killed it"


def _size(count: int) -> str:
    if count < 1 << 20:
        return f"{count} bytes"
    return f"{count / (1 << 30):.4g} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.4g} MiB"


# The kernel's log


def _are_kernel_pids() -> bool:
    """Whether this process counts pids as the kernel's log does: it is in no pid namespace but the first."""
    return os.stat("/proc/self/ns/pid").st_ino == _INIT_PID_NAMESPACE  # noqa: PTH116 - of the link's target


class _KernelLog:
    """What the kernel says from now on."""

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):
            fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(fd, 0, os.SEEK_END)
            self._fd = fd

    def read(self) -> tuple[list[Entry], bool]:
        """What it has said, but not without end; and whether that is all."""
        entries: list[Entry] = []
        is_all = self._fd >= 0
        give_up_at = time.monotonic() + _READ_WITHIN_S
        while self._fd >= 0 and time.monotonic() < give_up_at:
            try:
                entries.append(parse_record(os.read(self._fd, _RECORD_BYTES)))
            except BrokenPipeError:  # what came next has been overwritten: the reading goes on after it
                is_all = False
            except BlockingIOError:
                return entries, is_all
            except (OSError, ValueError, LookupError):
                break
        return entries, False


def parse_record(record: bytes) -> Entry:
    """`6,724,3589485103,-;text`, and lines of details: the third number is microseconds since boot."""
    head, _, text = record.decode(errors="replace").partition(";")
    return int(head.split(",")[2]) / 1e6, text.partition("\n")[0]


def oom_kill_in(entries: Iterable[Entry], pids: set[int]) -> str:
    """That one of these processes was killed for want of memory; empty: none was."""
    limit_bytes = 0
    for _, text in entries:
        limit = _OOM_LIMIT.search(text)
        if limit:  # comes just before the kill that it led to
            limit_bytes = int(limit[1]) << 10
        kill = _OOM_KILL.search(text)
        if kill and int(kill[2]) in pids:
            return _killed_by_limit(limit_bytes) if kill[1].startswith("Memory cgroup") and limit_bytes else _KILLED
    return ""


def gpu_error_in(entries: Iterable[Entry], pids: set[int], now_s: float) -> str:
    """The first GPU error of late that may have ended one of these processes; empty: none.

    Args:
        entries: Of the kernel's log.
        pids: Empty: the kernel's pids cannot be compared with ours.
        now_s: Since boot.
    """
    for at_s, text in entries:
        xid = _XID.search(text)
        if not xid or now_s - at_s > _GPU_WITHIN_S + now_s * _CLOCK_DRIFT:
            continue
        code, named = int(xid[2]), xid[3] or ""
        is_anothers = bool(pids) and named.isdigit() and int(named) not in pids
        if code != _CLEANUP and (code in _GPU_FAILED or not is_anothers):
            what = _GPU_FAILED.get(code) or _GPU_REFUSED.get(code) or xid[4].strip()[:80]
            return f"GPU error Xid {code} ({what}) on PCI {xid[1]}"
    return ""


# Memory


class Level:
    """A memory cgroup, or one above it. `counts` is the kills in it, and how often its limit was hit."""

    def __init__(self, path: str, *, is_v2: bool) -> None:
        self._path = path
        self._is_v2 = is_v2

    def counts(self) -> tuple[int, int]:
        """0 for what cannot be read."""
        if self._is_v2:
            events = self._numbers("memory.events")
            return events.get("oom_kill", 0), events.get("oom", 0)
        return self._numbers("memory.oom_control").get("oom_kill", 0), self._number("memory.failcnt")

    def limit_bytes(self) -> int:
        """How much it may take; where there is no limit, more than there is."""
        return self._number("memory.max" if self._is_v2 else "memory.limit_in_bytes") or _NO_LIMIT_BYTES

    def _numbers(self, name: str) -> dict[str, int]:
        pairs = (line.partition(" ") for line in _read(f"{self._path}/{name}").splitlines())
        return {key: int(value) for key, _, value in pairs if value.isdigit()}

    def _number(self, name: str) -> int:
        """0: it cannot be read, or is the word `max`."""
        text = _read(f"{self._path}/{name}").strip()
        return int(text) if text.isdigit() else 0


def memory_levels() -> list[Level]:
    """This process's memory cgroup, where its worker will be too, and those above it, innermost first."""
    cgroups = [line.split(":", 2) for line in _read("/proc/self/cgroup").splitlines()]
    v1 = [path for _, controllers, path in cgroups if "memory" in controllers.split(",")]
    v2 = [path for _, controllers, path in cgroups if not controllers]
    mounts = [line.split() for line in _read("/proc/self/mountinfo").splitlines()]
    for path in v1 or v2:
        for fields in mounts:
            root, mount_point, kind, options = fields[3], fields[4], fields[-3], fields[-1].split(",")
            if kind == ("cgroup" if v1 else "cgroup2") and (not v1 or "memory" in options):
                return [Level(each, is_v2=not v1) for each in _upwards(mount_point, path.removeprefix(root))]
    return []


def _upwards(top: str, below: str) -> Iterator[str]:
    names = [name for name in below.split("/") if name not in {"", ".."}]
    has_events = False
    for count in range(len(names), -1, -1):
        path = "/".join((top, *names[:count]))
        # Where memory is not counted for a cgroup by itself, the next one above it counts.
        has_events = has_events or any(map(os.path.exists, (f"{path}/memory.events", f"{path}/memory.oom_control")))
        if has_events:
            yield path


def shared_memory() -> str:
    """That shared memory is full, or so small that it most likely was."""
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        return ""
    size_bytes = shm.f_blocks * shm.f_frsize
    if shm.f_bavail <= shm.f_blocks * _SHM_FULL:
        return f"out of shared memory: {_SHM} is full ({_size(size_bytes)})"
    if size_bytes <= _SHM_SMALL_BYTES:
        return f"most likely out of shared memory: {_SHM} has no more than {_size(size_bytes)}"
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib is slow
            return file.read()
    except OSError:
        return ""
