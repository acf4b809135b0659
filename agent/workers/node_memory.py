"""How much memory this node has left, by the kernel's estimate and by the limits of its cgroups."""

from __future__ import annotations

import psutil

from agent.workers.exit_causes import memory_levels


def available_bytes() -> int:
    """What processes that are started here could use before something has to give way."""
    try:
        rooms = [level.room_bytes() for level in memory_levels()]
    except (ValueError, LookupError):  # a kernel that writes its files in another way
        rooms = []
    return min([psutil.virtual_memory().available, *rooms])
