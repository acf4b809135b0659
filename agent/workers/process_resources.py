"""Priority and memory of a rank's process tree, for standbys that set up the script beside ranks that train."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_runtime.standby.priority import LOW, can_raise

if TYPE_CHECKING:
    from collections.abc import Iterator

_PSS = "Pss:"


def lower_priority(pid: int) -> None:
    """Lower the priority of this process, and of what it starts, if this agent may raise it again."""
    if can_raise():
        _set_priority(pid, LOW)


def restore_priority(pid: int) -> None:
    """Give each thread of this process and of its descendants the agent's own priority, if this agent may."""
    if can_raise():
        _set_priority(pid, os.getpriority(os.PRIO_PROCESS, 0))


def memory_bytes(pid: int) -> int:
    """Return the memory of this process and its descendants, each shared page counted in parts; 0: it has ended."""
    return sum(map(_own_memory_bytes, _tree(pid)))


def _own_memory_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(_PSS)), 0)


def _set_priority(pid: int, nice: int) -> None:
    for process in _tree(pid):
        for thread in _threads(process):
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, nice)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for thread in _threads(pid):
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from _tree(int(child))


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - names only
    except OSError:  # it has ended
        return []
