"""When this process got how far on its way to the first step: what the agent is told with it.

Seconds since boot, so that they compare with the agent's own clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


def boot_time() -> float:
    """Return seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Milestones:
    """Of one process."""

    entered: float
    """This runtime had been imported."""
    joined: float = 0.0
    """This rank was in a process group, or was found to be in one."""
    loaded: float = 0.0
    """It had what it begins from."""

    def note_joined(self) -> None:
        """It is in a process group; the first time counts."""
        self.joined = self.joined or boot_time()

    def note_loaded(self) -> None:
        """It has what it begins from; the last time counts."""
        self.note_joined()
        self.loaded = boot_time()


reached = Milestones(entered=boot_time())
"""By this process."""
