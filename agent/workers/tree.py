"""All processes below this one. Part of the guardian (`guardian.py`), so standard library only."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def kill_descendants() -> None:
    """SIGKILL to each; those born meanwhile are missed."""
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


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
