"""What a rank is doing right now: its stacks, and what the kernel says of its main thread. In bounded time.

A worker that uses our runtime appends its stacks to a memory file on a signal (`trainer_runtime.stacks`), also
while C code holds the interpreter's lock. Of any other Python program, and of one that is stopped, py-spy can tell them
from outside, if it is installed. Nothing here stops a worker, or waits for one for longer than a moment.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.diagnose import py_spy
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.incident import Doing
    from agent.workers.process import RankProcess

_STACK_CHARACTERS = 4096
_FILE_BYTES = 1 << 20
_STATES = 5
_MOMENT_S = 0.02
_WRITTEN_WITHIN_S = 1.0
_STILL_SHARE = 0.01
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")

_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<(?!string>|stdin>)|/trainer_runtime/")
_WAITS = re.compile(
    r"/torch/distributed/distributed_c10d\.py$|/trainer_runtime/(?:rank_messages|agent_channel|dist)\.py$"
)
"""Here a rank waits for others, or for its agent, which does."""
_WAITS_ASLEEP = re.compile(r"/torch/(?:distributed/.*|nn/parallel/distributed|autograd/(?:graph|__init__))\.py$")
"""Here too, unless it is at work: these compute as well."""


class StacksFile:
    """The memory file that a worker appends its stacks to. Used by two threads."""

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(f"{contract.STACKS_NAME}:{name}", os.MFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """To be handed down."""
        return self._fd

    def clear(self) -> None:
        """Begin anew: the place to write at is one for all that have the file."""
        with self._lock, suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)

    def size(self) -> int:
        """Bytes written."""
        with self._lock:
            return 0 if self._fd < 0 else os.fstat(self._fd).st_size

    def read(self) -> str:
        """What was written."""
        with self._lock:
            return "" if self._fd < 0 else os.pread(self._fd, _FILE_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """Let go of it."""
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
        """It is not the user's."""
        return _LIBRARY.search(self.path) is not None

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stacks:
    """Of one process."""

    main: tuple[Frame, ...] = ()
    """Of its main thread, the innermost first; empty: not known."""
    text: str = ""

    @property
    def where(self) -> str:
        """The innermost frame that is the user's; else the outermost. Empty: not known."""
        own = (frame for frame in self.main if not frame.is_library)
        return str(next(own, self.main[-1])) if self.main else ""


@dataclass(frozen=True)
class Dump:
    """What a rank was doing."""

    doing: Doing
    stacks: Stacks = Stacks()
    cpu_s: tuple[float, float] = (0.0, 0.0)
    """Processor time that its process had used when it was looked at first, and last."""
    at: float = 0.0

    def stands_still_since(self, before: Dump) -> bool:
        """Whether it is where it was, and has used no processor time since."""
        used_s = self.cpu_s[0] - before.cpu_s[1]
        is_same = (self.doing, self.stacks.main) == (before.doing, before.stacks.main)
        return is_same and used_s <= max(_TICKS_S, _STILL_SHARE * (self.at - before.at))


ENDED = Dump("exited")


def dump(ranks: Sequence[RankProcess]) -> list[Dump]:
    """Look at each rank that has not ended with code 0. Takes seconds at most, whatever they are doing."""
    at = time.monotonic()
    living = [rank for rank in ranks if rank.exited is None]
    before = {rank.worker_pid: _cpu_s(rank.worker_pid) for rank in living}
    states = _states([rank.worker_pid for rank in living])
    asked = [rank for rank in living if states[rank.worker_pid] not in "TtD" and _ask(rank)]
    told = {rank.worker_pid: parse(text) for rank, text in _written(asked)}
    silent = [rank.worker_pid for rank in living if rank.worker_pid not in told]
    told |= {pid: _stacks(threads) for pid, threads in py_spy.look(silent).items()}

    def dump_of(rank: RankProcess) -> Dump:
        pid = rank.worker_pid
        if rank not in living:
            return ENDED
        stacks = told.get(pid, Stacks())
        return Dump(_doing(states[pid], stacks), stacks, (before[pid], _cpu_s(pid)), at)

    return [dump_of(rank) for rank in ranks]


def parse(text: str) -> Stacks:
    """What faulthandler wrote: the newest thread first, so the main one last."""
    _, *sections = (section.rstrip() for section in _THREAD.split(text))
    if not sections:
        return Stacks()
    frames = _FRAME.finditer(sections[-1])
    return Stacks(
        tuple(Frame(path, int(line), function) for path, line, function in (match.groups() for match in frames)),
        "\n".join(reversed(sections))[:_STACK_CHARACTERS],
    )


def _stacks(threads: list[py_spy.SpyThread]) -> Stacks:
    """As `parse`, of what py-spy found; its main thread first."""
    sections = [
        [f"Thread {thread.os_thread_id} (most recent call first):"]
        + [f'  File "{frame.filename}", line {frame.line} in {frame.name}' for frame in thread.frames]
        for thread in threads
    ]
    text = "\n".join(line for section in sections for line in section)
    main = tuple(Frame(frame.filename, frame.line, frame.name) for frame in threads[0].frames)
    return Stacks(main, text[:_STACK_CHARACTERS])


def _doing(state: str, stacks: Stacks) -> Doing:
    if state in "Tt":
        return "stopped"
    if state == "D":
        return "disk"
    innermost = stacks.main[0].path if stacks.main else ""
    is_at_work = state == "R"
    if _WAITS.search(innermost) or (not is_at_work and _WAITS_ASLEEP.search(innermost)):
        return "waits"
    return "runs" if is_at_work else "sleeps"


def _states(pids: Sequence[int]) -> dict[int, str]:
    """Of each main thread, what it is most of the time in this moment."""
    seen: dict[int, Counter[str]] = {pid: Counter() for pid in pids}
    for number in range(_STATES):
        if number:
            time.sleep(_MOMENT_S)
        for pid in pids:
            seen[pid][(_stat(pid) or ["X"])[0]] += 1
    return {pid: states.most_common(1)[0][0] for pid, states in seen.items()}


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _TICKS_S if fields else 0.0


def _stat(pid: int) -> list[str]:
    """What /proc says of a process, from its state on; nothing if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the name before it may hold anything


def _ask(rank: RankProcess) -> bool:
    """Send the signal on the rank's page; False: it has none, or would not survive it."""
    number = rank.page.stacks
    if not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return False
    try:
        pidfd = os.pidfd_open(rank.worker_pid)
    except OSError:
        return False
    try:
        # Looked up with the descriptor open, so that it is of this process: a child of the guardian, which has not
        # become another program since it wrote its page.
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


def _written(ranks: Sequence[RankProcess]) -> list[tuple[RankProcess, str]]:
    """Wait a moment for what they write; those that wrote nothing are left out."""
    give_up_at = time.monotonic() + _WRITTEN_WITHIN_S
    sizes = [0] * len(ranks)
    while time.monotonic() < give_up_at:
        time.sleep(_MOMENT_S)
        before, sizes = sizes, [rank.stacks.size() for rank in ranks]
        if sizes == before and all(sizes):
            break
    return [(rank, rank.stacks.read()) for rank, size in zip(ranks, sizes, strict=True) if size]
