"""All processes below this one. Part of the guardian (`guardian.py`), so standard library only."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

_COMMAND_BYTES = 200
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
"""In their command. They wait for a pipe's end, and end a moment later; the last is of torch's compiler."""


def kill_descendants() -> None:
    """SIGKILL to each; those born meanwhile are missed."""
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def left_behind() -> list[tuple[int, str]]:
    """The pid and command of each that has not ended, but for helpers that end with whoever started them."""
    commands = ((pid, _command(pid)) for pid in _descendants(os.getpid()))
    return [(pid, command) for pid, command in commands if command and not any(name in command for name in _HELPERS)]


def _command(pid: int) -> str:
    """Empty: it has ended."""
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
            # pid (name) state ppid ...: the name may hold anything, brackets too.
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # it is gone, or another user's, and not to be looked at (hidepid)
        return 0
