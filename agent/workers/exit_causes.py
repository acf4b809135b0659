"""Finds the system's causes of a worker's end, such as lack of memory or a failed GPU.

Part of the guardian (`guardian.py`), so standard library only, and quick to import. Nothing here blocks. Sources that
cannot be read are skipped: a container rarely has access to the kernel's log.

| cause | source |
|---|---|
| the kernel killed the process because memory ran out | the kernel's log, by pid |
| same | the OOM kill counter of its memory cgroup, if it has increased since the worker's start |
| a GPU failed | `NVRM: Xid` in the kernel's log |
| a limit of the process was reached | `getrlimit`, and the end of its output |
| shared memory is full | the file system at /dev/shm, after a SIGBUS |
| another rank did not take part in a collective | the end of its output |

If the end of the worker's output names a data loader's process, that process is included: the worker ended because of
it.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from contextlib import suppress

TYPE_CHECKING = False  # importing `typing` would take longer than all other imports
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Entry = tuple[float, str]
    """An entry of the kernel's log: seconds since boot, and the text."""

_SHELL_CODES = range(129, 160)
"""Exit codes of a shell whose child was ended by a signal: 128 plus the signal."""
_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_LOADER_KILLED = "is killed by signal: Killed"
_LOADER_BUS_ERROR = re.compile("is killed by signal: Bus error|Unexpected bus error encountered in worker")

_KERNEL_LOG = "/dev/kmsg"
_RECORD_BYTES = 8192
_READ_WITHIN_S = 0.2
_OOM_LIMIT = re.compile(r"memory: usage \d+kB, limit (\d+)kB")
_OOM_KILL = re.compile(r"(Memory cgroup out|Out) of memory: Kill(?:ed)? process (\d+) ")
_INIT_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial pid namespace. Only there, pids in the kernel's log equal this process's."""

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
"""Xid errors of failed hardware, whichever process the kernel names. From NVIDIA's catalogue of Xid errors."""
_GPU_STOPPED_PROCESS = {13: "graphics engine exception", 31: "GPU memory page fault", 43: "GPU stopped processing"}
"""Xid errors that end one process, mostly by that process's own fault."""
_XID_CLEANUP = 45
"""Follows any other Xid, and the kill of any process that used the GPU, so it is no cause."""
_GPU_WITHIN_S = 1800.0
"""A rank may wait in a collective for this long before it ends. It has survived older errors."""
_CLOCK_DRIFT = 1e-4
"""Drift as a share of the time since boot: the clock of the kernel's log is never adjusted."""

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
"""Each limit, with the signal that it raises, the text printed when it is reached, and its description."""
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send) operation to complete"
)
"""As NCCL's watchdog and gloo say it."""
_IN_BYTES = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
_SHM = "/dev/shm"  # noqa: S108 - it is read, not written
_SHM_FULL = 0.02
_SHM_SMALL_BYTES = 64 << 20
"""The default size in a container."""


def fatal_signal_of(status: int) -> int:
    """Return the signal that ended a process, or the last child of a shell; 0: none.

    Args:
        status: as returned by wait().
    """
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return -code
    return code - 128 if code in _SHELL_CODES else 0


class ExitCauses:
    """The causes of one worker's end. Create it when the worker starts, and ask when it has ended."""

    def __init__(self) -> None:
        self._log = _KernelLog()
        self._cgroups: list[MemoryCgroup] = []
        with suppress(ValueError, LookupError):  # an unknown format of the kernel's files
            self._cgroups = memory_cgroups()
        self._counts_at_start = [cgroup.counts() for cgroup in self._cgroups]

    def explain(self, pid: int, status: int, stderr_text: str) -> str:
        """Explain a worker's end in a few words; empty: no cause is known.

        Args:
            pid: The worker's pid.
            status: Its status, as returned by wait().
            stderr_text: The end of its standard error.
        """
        fatal_signal, loaders = fatal_signal_of(status), _loaders_in(stderr_text)
        pids = {pid, *loaders} if _are_kernel_pids() else set()
        entries, is_complete = self._log.read()
        if fatal_signal == signal.SIGKILL or _LOADER_KILLED in stderr_text:
            # The counter may have grown by another process's kill. The log does not link a shell's child to the worker.
            is_log_complete = is_complete and pids and (os.WIFSIGNALED(status) or loaders)
            return oom_kill_in(entries, pids) or ("" if is_log_complete else self._cgroup_kill())
        if fatal_signal == signal.SIGBUS or _LOADER_BUS_ERROR.search(stderr_text):
            return shared_memory()
        if fatal_signal == signal.SIGTERM:
            return ""
        limit = limit_reached(fatal_signal, stderr_text)
        if limit:
            return limit
        now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        return oom_kill_in(entries, pids) or gpu_error_in(entries, pids, now_s) or time_out_in(stderr_text)

    def _cgroup_kill(self) -> str:
        """Describe the kernel's kill in the worker's cgroup, and the innermost limit that was hit; empty: none."""
        after = [cgroup.counts() for cgroup in self._cgroups]
        if not self._cgroups or after[0][0] <= self._counts_at_start[0][0]:
            return ""
        for cgroup, (_, hits), (_, hits_before) in zip(self._cgroups, after, self._counts_at_start, strict=True):
            limit_bytes = cgroup.limit_bytes()
            if hits > hits_before and limit_bytes < _NO_LIMIT_BYTES:
                return _killed_by_limit(limit_bytes)
        return _OUT_OF_MEMORY


def time_out_in(stderr_text: str) -> str:
    """Describe a collective that another rank did not join in time; empty: none. That rank is the cause."""
    return "another rank did not take part in a collective in time" if _TIMED_OUT.search(stderr_text) else ""


def limit_reached(fatal_signal: int, stderr_text: str) -> str:
    """Describe the limit of the process (`ulimit`) that has caused its end; empty: none."""
    tail = stderr_text[-_LIMIT_CHARACTERS:]
    for which, number, pattern, text in _LIMITS:
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY and (
            fatal_signal == number if number and fatal_signal else pattern.search(tail)
        ):
            return text.format(_size(limit) if which in _IN_BYTES else limit)
    return ""


def _loaders_in(stderr_text: str) -> set[int]:
    return {int(pid) for pids in _LOADER.findall(stderr_text) for pid in re.findall(r"\d+", pids)}


_OUT_OF_MEMORY = "out of memory: the kernel killed it"


def _killed_by_limit(limit_bytes: int) -> str:
    return f"out of memory: its cgroup's limit of {_size(limit_bytes)} killed it"


def _size(count: int) -> str:
    if count < 1 << 20:
        return f"{count} bytes"
    return f"{count / (1 << 30):.4g} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.4g} MiB"


# The kernel's log


def _are_kernel_pids() -> bool:
    """Whether pids in the kernel's log are this process's pids: it is in the initial pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino == _INIT_PID_NAMESPACE  # noqa: PTH116 - follows the link


class _KernelLog:
    """The entries of the kernel's log from now on."""

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):
            fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(fd, 0, os.SEEK_END)
            self._fd = fd

    def read(self) -> tuple[list[Entry], bool]:
        """Read the new entries, within a time limit. Also return whether they are complete."""
        entries: list[Entry] = []
        is_complete = self._fd >= 0
        give_up_at = time.monotonic() + _READ_WITHIN_S
        while self._fd >= 0 and time.monotonic() < give_up_at:
            try:
                entries.append(parse_record(os.read(self._fd, _RECORD_BYTES)))
            except BrokenPipeError:  # the next entry was overwritten: continue with the one after it
                is_complete = False
            except BlockingIOError:
                return entries, is_complete
            except (OSError, ValueError, LookupError):
                break
        return entries, False


def parse_record(record: bytes) -> Entry:
    """Parse a record `6,724,3589485103,-;text` with lines of details. The third number is microseconds since boot."""
    head, _, text = record.decode(errors="replace").partition(";")
    return int(head.split(",")[2]) / 1e6, text.partition("\n")[0]


def oom_kill_in(entries: Iterable[Entry], pids: set[int]) -> str:
    """Describe the OOM kill of one of these processes; empty: there was none."""
    limit_bytes = 0
    for _, text in entries:
        limit = _OOM_LIMIT.search(text)
        if limit:  # logged just before the kill that it causes
            limit_bytes = int(limit[1]) << 10
        kill = _OOM_KILL.search(text)
        if kill and int(kill[2]) in pids:
            return (
                _killed_by_limit(limit_bytes) if kill[1].startswith("Memory cgroup") and limit_bytes else _OUT_OF_MEMORY
            )
    return ""


def gpu_error_in(entries: Iterable[Entry], pids: set[int], now_s: float) -> str:
    """Describe the first recent GPU error that may have ended one of these processes; empty: there was none.

    Args:
        entries: Entries of the kernel's log.
        pids: Pids of the processes. Empty: pids in the log are not comparable.
        now_s: Seconds since boot.
    """
    for at_s, text in entries:
        xid = _XID.search(text)
        if not xid or now_s - at_s > _GPU_WITHIN_S + now_s * _CLOCK_DRIFT:
            continue
        code, pid_text = int(xid[2]), xid[3] or ""
        is_other_process = bool(pids) and pid_text.isdigit() and int(pid_text) not in pids
        if code != _XID_CLEANUP and (code in _GPU_FAILED or not is_other_process):
            what = _GPU_FAILED.get(code) or _GPU_STOPPED_PROCESS.get(code) or xid[4].strip()[:80]
            return f"GPU error Xid {code} ({what}) on PCI {xid[1]}"
    return ""


# Memory


class MemoryCgroup:
    """A memory cgroup of this process."""

    def __init__(self, path: str, *, is_v2: bool) -> None:
        self._path = path
        self._is_v2 = is_v2

    def counts(self) -> tuple[int, int]:
        """Return the OOM kills in it, and how often its limit was hit; 0 for what cannot be read."""
        if self._is_v2:
            events = self._numbers("memory.events")
            return events.get("oom_kill", 0), events.get("oom", 0)
        return self._numbers("memory.oom_control").get("oom_kill", 0), self._number("memory.failcnt")

    def limit_bytes(self) -> int:
        """Return its limit. Without a limit, a number above any memory size."""
        return self._number("memory.max" if self._is_v2 else "memory.limit_in_bytes") or _NO_LIMIT_BYTES

    def _numbers(self, name: str) -> dict[str, int]:
        pairs = (line.partition(" ") for line in _read(f"{self._path}/{name}").splitlines())
        return {key: int(value) for key, _, value in pairs if value.isdigit()}

    def _number(self, name: str) -> int:
        """Read a number; 0 if it cannot be read, or is the word `max`."""
        text = _read(f"{self._path}/{name}").strip()
        return int(text) if text.isdigit() else 0


def memory_cgroups() -> list[MemoryCgroup]:
    """Return this process's memory cgroups, innermost first. The worker will be in the same ones."""
    cgroups = [line.split(":", 2) for line in _read("/proc/self/cgroup").splitlines()]
    v1 = [path for _, controllers, path in cgroups if "memory" in controllers.split(",")]
    v2 = [path for _, controllers, path in cgroups if not controllers]
    mounts = [line.split() for line in _read("/proc/self/mountinfo").splitlines()]
    for path in v1 or v2:
        for fields in mounts:
            root, mount_point, kind, options = fields[3], fields[4], fields[-3], fields[-1].split(",")
            if kind == ("cgroup" if v1 else "cgroup2") and (not v1 or "memory" in options):
                return [MemoryCgroup(each, is_v2=not v1) for each in _upwards(mount_point, path.removeprefix(root))]
    return []


def _upwards(top: str, below: str) -> Iterator[str]:
    names = [name for name in below.split("/") if name not in {"", ".."}]
    has_events = False
    for count in range(len(names), -1, -1):
        path = "/".join((top, *names[:count]))
        # A cgroup without its own memory accounting is counted by the next one above it.
        has_events = has_events or any(map(os.path.exists, (f"{path}/memory.events", f"{path}/memory.oom_control")))
        if has_events:
            yield path


def shared_memory() -> str:
    """Describe that shared memory is full, or so small that it most likely was full; empty: neither."""
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
