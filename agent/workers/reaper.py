"""Finds, kills and reaps the orphans of a guardian that was killed.

The worker itself dies with its guardian, by its parent-death signal. Its orphans are inherited by the nearest *child
subreaper* above, which is the agent. There they must be told apart from the agent's other children, such as an embedded
etcd or the guardian of another rank. Two marks identify them, and the agent's own children never have either: an
environment variable that every process inherits from the worker, with a new value for each guardian; or the worker's
session. A list of the children that may live would be simpler, but a helper that is missing in the list would be
killed, whereas a mark can only miss a process. It misses a process that has left the worker's session *and* cleared its
environment *and* has no marked ancestor left. Such a process escapes only if the guardian itself is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.workers.process import GUARDIAN_MARK

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make this process, instead of init, the parent of orphaned descendants."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int


class Orphans:
    """The orphans of one guardian that was killed."""

    def __init__(self, mark: str, worker_pid: int) -> None:
        self._mark = f"{GUARDIAN_MARK}={mark}".encode()
        self._worker_pid = worker_pid
        self._killed: set[int] = set()
        """Pids that were killed and not reaped: a zombie shows no environment."""

    def kill(self) -> int | None:
        """Kill all orphans and reap the dead ones. Return a pid to wait for before the next call, or None."""
        while True:
            table = _processes()
            roots = [process for process in table if process.parent == os.getpid() and self._is_ours(process)]
            if not roots:
                return None
            for pid in _with_descendants(roots, table):
                self._killed.add(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            dying = [process.pid for process in roots if not _is_reaped(process.pid)]
            self._killed -= {process.pid for process in roots} - set(dying)
            if dying:
                return dying[0]

    def _is_ours(self, process: _Process) -> bool:
        if process.pid in self._killed:
            return True
        if self._worker_pid and self._worker_pid in (process.pid, process.session):
            return True
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False
        return self._mark in environment.split(b"\0")


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _with_descendants(roots: list[_Process], table: list[_Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process.pid)
    found = [root.pid for root in roots]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _processes() -> list[_Process]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # pid (name) state ppid pgrp session ...: the name may contain anything, even brackets.
            fields = (path / "stat").read_bytes().rpartition(b")")[2].split()
            found.append(_Process(int(path.name), parent=int(fields[1]), session=int(fields[3])))
    return found
