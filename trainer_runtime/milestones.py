"""When this process reached each milestone on its way to the first step; reported to the agent with that step.

The times are seconds since boot, so that they can be compared with the agent's clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


def boot_time() -> float:
    """Return the seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Milestones:
    """Times at which a process reached its milestones, in seconds since boot; 0.0: not reached."""

    entered: float
    """This runtime had been imported."""
    joined: float = 0.0
    """This rank had joined a process group, or was found to be in one."""
    loaded: float = 0.0
    """The State was restored."""

    def note_joined(self) -> None:
        """Note that the process is in a process group; only the first call counts."""
        self.joined = self.joined or boot_time()

    def note_loaded(self) -> None:
        """Note that the State is restored; the last call counts."""
        self.note_joined()
        self.loaded = boot_time()


reached = Milestones(entered=boot_time())
"""Milestones of this process."""
