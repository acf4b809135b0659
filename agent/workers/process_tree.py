"""All processes below this one. Part of the guardian (`guardian.py`), so standard library only."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

_COMMAND_BYTES = 200
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
"""Parts of their commands. They end a moment after their pipe is closed. The last one is of torch's compiler."""


def kill_descendants() -> None:
    """Send SIGKILL to each descendant. Processes that start meanwhile are missed."""
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def surviving_descendants() -> list[tuple[int, str]]:
    """Return pid and command of each living descendant, without helpers that end with their starter."""
    commands = ((pid, _command(pid)) for pid in _descendants(os.getpid()))
    return [(pid, command) for pid, command in commands if command and not any(name in command for name in _HELPERS)]


def _command(pid: int) -> str:
    """Return the command of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - pathlib is slow
            words = file.read(_COMMAND_BYTES).rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace")


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slow
        if name.isdigit():
            children.setdefault(_parent(name), []).append(int(name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib is slow
            # pid (name) state ppid ...: the name may contain anything, even brackets.
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # it has ended, or it is another user's and hidden (hidepid)
        return 0
