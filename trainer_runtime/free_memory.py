"""Free memory of this process: what the kernel reports as available, and what its control groups leave."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_V1, _V2 = Path("sys/fs/cgroup/memory"), Path("sys/fs/cgroup")


def free_memory(root: Path = Path("/")) -> int:
    """Return the free memory in bytes: the smallest of the kernel's and the control groups' values.

    Args:
        root: directory that contains `proc` and `sys`.
    """
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    return min([int(meminfo["MemAvailable"].split()[0]) << 10, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_above(root / _V2, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _left_above(root / _V1, path, *names)


def _left_above(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Yield what is left in a group and in its parents. In a container the path may not exist."""
    group = mount / path.lstrip("/")
    for place in [group, *group.parents]:
        with suppress(OSError, ValueError, KeyError):  # a limit of "max" is not a number
            stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            used = int((place / usage).read_text()) - int(stat[reclaimable])
            yield max(0, int((place / limit).read_text()) - used)
        if place == mount:
            return
