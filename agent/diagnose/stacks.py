"""What a rank is doing right now: its stacks, and the kernel's state of its main thread. In bounded time.

A worker that uses `trainer_runtime` appends its stacks to a memory file on a signal (`trainer_runtime.stacks`), even
while C code holds the interpreter's lock. Stacks of other Python programs, and of stopped processes, are read from
outside by py-spy, if it is installed. Nothing here stops a worker, or blocks for longer than a few seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.reasons import Doing
    from agent.workers.process import RankProcess

_STACK_CHARACTERS = 4096
_FILE_BYTES = 1 << 20
_STATE_SAMPLES = 5
_SAMPLE_EVERY_S = 0.02
_WRITTEN_WITHIN_S = 1.0
_PY_SPY_WITHIN_S = 5.0
_ANSWERED_WITHIN_S = 0.5
_STILL_SHARE = 0.01
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")

_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<(?!string>|stdin>)|/trainer_runtime/")
_WAITING_FILES = re.compile(
    r"/torch/distributed/distributed_c10d\.py$|/trainer_runtime/(?:rank_messages|agent_channel|dist)\.py$"
)
"""In these files a rank waits for other ranks, or for its agent, which waits for them."""
_WAITING_FILES_IF_ASLEEP = re.compile(
    r"/torch/(?:distributed/.*|nn/parallel/distributed|autograd/(?:graph|__init__))\.py$"
)
"""In these files too, but only while the thread sleeps: they also compute."""


class SpyFrame(msgspec.Struct, frozen=True):
    """A line that is being executed, as py-spy reports it."""

    name: str
    filename: str
    line: int


class SpyThread(msgspec.Struct, frozen=True):
    """One of a process's threads, the innermost frame first."""

    os_thread_id: int | None
    frames: list[SpyFrame]


_py_spy_decoder = msgspec.json.Decoder(list[SpyThread])


class StacksFile:
    """The memory file to which a worker appends its stacks. Used by two threads."""

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(f"{contract.STACKS_NAME}:{name}", os.MFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, to be inherited by the worker."""
        return self._fd

    def clear(self) -> None:
        """Truncate the file. The write position is shared with the worker."""
        with self._lock, suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)

    def size(self) -> int:
        """Number of bytes written."""
        with self._lock:
            return 0 if self._fd < 0 else os.fstat(self._fd).st_size

    def read(self) -> str:
        """Return the contents."""
        with self._lock:
            return "" if self._fd < 0 else os.pread(self._fd, _FILE_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Frame:
    """A line of a program that is being executed."""

    path: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether it belongs to a library rather than to the user's code."""
        return _LIBRARY.search(self.path) is not None

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stacks:
    """The stacks of one process."""

    main: tuple[Frame, ...] = ()
    """Stack of the main thread, innermost frame first; empty: unknown."""
    text: str = ""

    @property
    def where(self) -> str:
        """The innermost frame of the user's code; else the outermost frame. Empty: unknown."""
        own = (frame for frame in self.main if not frame.is_library)
        return str(next(own, self.main[-1])) if self.main else ""


@dataclass(frozen=True)
class Dump:
    """What a rank was doing at one moment."""

    doing: Doing
    stacks: Stacks = Stacks()
    cpu_s: tuple[float, float] = (0.0, 0.0)
    """Processor time used by the process at the start and at the end of the dump."""
    at: float = 0.0
    stack_shows: Doing | None = None
    """What it does by its stack, if it waits only by torch's record of collectives. None: the same."""

    def is_unchanged_since(self, before: Dump) -> bool:
        """Whether the stacks are the same, and no processor time was used since then."""
        used_s = self.cpu_s[0] - before.cpu_s[1]
        is_same = (self.doing, self.stacks.main) == (before.doing, before.stacks.main)
        return is_same and used_s <= max(_TICKS_S, _STILL_SHARE * (self.at - before.at))


ENDED = Dump("exited")


def dump_ranks(ranks: Sequence[RankProcess]) -> list[Dump]:
    """Dump each rank that has not ended. Takes seconds at most, whatever the ranks are doing."""
    at = time.monotonic()
    living = [rank for rank in ranks if rank.exited is None]
    before = {rank.worker_pid: _cpu_s(rank.worker_pid) for rank in living}
    questions = {rank.worker_pid: rank.ask_unfinished() for rank in living}
    states = _sample_states([rank.worker_pid for rank in living])
    asked = [rank for rank in living if states[rank.worker_pid] not in "TtD" and _request_stacks(rank)]
    stacks_of = {rank.worker_pid: parse_faulthandler(text) for rank, text in _wait_for_stacks(asked)}
    waiting = _wait_for_unfinished(asked, questions)
    unanswered = [rank.worker_pid for rank in living if rank.worker_pid not in stacks_of]
    stacks_of |= {pid: _stacks_from_py_spy(threads) for pid, threads in _read_with_py_spy(unanswered).items()}

    def dump_of(rank: RankProcess) -> Dump:
        pid = rank.worker_pid
        if rank not in living:
            return ENDED
        stacks = stacks_of.get(pid, Stacks())
        shown = _doing(states[pid], stacks)
        dump = Dump(shown, stacks, (before[pid], _cpu_s(pid)), at)
        is_by_record = pid in waiting and shown in {"runs", "sleeps"}
        return replace(dump, doing="waits", stack_shows=shown) if is_by_record else dump

    return [dump_of(rank) for rank in ranks]


def parse_faulthandler(text: str) -> Stacks:
    """Parse the output of faulthandler. It writes the newest thread first, so the main thread is last."""
    _, *sections = (section.rstrip() for section in _THREAD.split(text))
    if not sections:
        return Stacks()
    frames = _FRAME.finditer(sections[-1])
    return Stacks(
        tuple(Frame(path, int(line), function) for path, line, function in (match.groups() for match in frames)),
        "\n".join(reversed(sections))[:_STACK_CHARACTERS],
    )


def _stacks_from_py_spy(threads: list[SpyThread]) -> Stacks:
    """Convert the threads that py-spy found to the form of `parse_faulthandler`. The main thread is first."""
    sections = [
        [f"Thread {thread.os_thread_id} (most recent call first):"]
        + [f'  File "{frame.filename}", line {frame.line} in {frame.name}' for frame in thread.frames]
        for thread in threads
    ]
    text = "\n".join(line for section in sections for line in section)
    main = tuple(Frame(frame.filename, frame.line, frame.name) for frame in threads[0].frames)
    return Stacks(main, text[:_STACK_CHARACTERS])


def _doing(state: str, stacks: Stacks) -> Doing:
    """What a rank is doing, as its stack shows."""
    if state in "Tt":
        return "stopped"
    if state == "D":
        return "disk"
    innermost = stacks.main[0].path if stacks.main else ""
    is_at_work = state == "R"
    if _WAITING_FILES.search(innermost) or (not is_at_work and _WAITING_FILES_IF_ASLEEP.search(innermost)):
        return "waits"
    return "runs" if is_at_work else "sleeps"


def _sample_states(pids: Sequence[int]) -> dict[int, str]:
    """Return the most frequent state of each main thread in a few samples."""
    seen: dict[int, Counter[str]] = {pid: Counter() for pid in pids}
    for number in range(_STATE_SAMPLES):
        if number:
            time.sleep(_SAMPLE_EVERY_S)
        for pid in pids:
            seen[pid][(_stat(pid) or ["X"])[0]] += 1
    return {pid: states.most_common(1)[0][0] for pid, states in seen.items()}


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _TICKS_S if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the process name before it may contain anything


def _request_stacks(rank: RankProcess) -> bool:
    """Send the signal named on the control page. Return False if there is none, or if it would kill the worker."""
    number = rank.page.stacks
    if not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return False
    try:
        pidfd = os.pidfd_open(rank.worker_pid)
    except OSError:
        return False
    try:
        # Read after the pidfd was opened, so that both refer to one process: a child of the guardian that has not
        # executed another program since it wrote its page.
        status = Path(f"/proc/{rank.worker_pid}/status").read_text(encoding="utf-8", errors="replace")
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        is_caught = int(fields["SigCgt"], 16) >> (number - 1) & 1
        if int(fields["PPid"]) != rank.guardian_pid or not is_caught:
            return False
        rank.stacks.clear()
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def _wait_for_stacks(ranks: Sequence[RankProcess]) -> list[tuple[RankProcess, str]]:
    """Wait briefly for the stacks. Ranks that wrote nothing are left out."""
    give_up_at = time.monotonic() + _WRITTEN_WITHIN_S
    sizes = [0] * len(ranks)
    while time.monotonic() < give_up_at:
        time.sleep(_SAMPLE_EVERY_S)
        before, sizes = sizes, [rank.stacks.size() for rank in ranks]
        if sizes == before and all(sizes):
            break
    return [(rank, rank.stacks.read()) for rank, size in zip(ranks, sizes, strict=True) if size]


def _wait_for_unfinished(ranks: Sequence[RankProcess], questions: Mapping[int, int]) -> set[int]:
    """Process ids of the ranks that have unfinished collectives. Those that do not answer soon are left out."""
    give_up_at = time.monotonic() + _ANSWERED_WITHIN_S
    left = list(ranks)
    while left and time.monotonic() < give_up_at:
        left = [rank for rank in left if rank.page.answered < questions[rank.worker_pid]]
        if left:
            time.sleep(_SAMPLE_EVERY_S)
    return {rank.worker_pid for rank in ranks if rank not in left and rank.page.unfinished}


def _read_with_py_spy(pids: list[int]) -> dict[int, list[SpyThread]]:
    """Return the threads of each process, the main thread first. Processes that cannot be read are left out.

    Takes some seconds at most.
    """
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return {}
    give_up_at = time.monotonic() + _PY_SPY_WITHIN_S
    started = {pid: _start_py_spy(program, pid) for pid in pids if pid}
    found = {pid: _py_spy_threads(started, pid, give_up_at) for pid, started in started.items()}
    return {pid: threads for pid, threads in found.items() if threads}


def _start_py_spy(program: str, pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [program, "dump", "--nonblocking", "--json", "--full-filenames", f"--pid={pid}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _py_spy_threads(started: subprocess.Popen[bytes], pid: int, give_up_at: float) -> list[SpyThread]:
    """Return the threads, main thread first; empty if py-spy failed or took too long."""
    try:
        output, _ = started.communicate(timeout=max(0.0, give_up_at - time.monotonic()))
        threads = _py_spy_decoder.decode(output)
    except subprocess.TimeoutExpired:
        started.kill()
        # Reap it on a thread: like the process that it reads, it may hang in the kernel.
        threading.Thread(target=started.communicate, name="reap-py-spy", daemon=True).start()
        return []
    except ValueError:  # not JSON, or not UTF-8
        return []
    return sorted(threads, key=lambda thread: thread.os_thread_id != pid)
