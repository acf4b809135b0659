"""The agent's only clock for durations. It also counts while the machine is suspended, as leases do."""

from __future__ import annotations

import time


def now() -> float:
    """Return seconds since boot. Compare them with other times of the same node only."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
