"""The agent's one clock for durations: it runs on while the machine sleeps, as leases do."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds since boot, for comparison with other times of this node only."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
