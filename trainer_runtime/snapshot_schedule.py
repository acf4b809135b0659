"""After which steps all ranks take a snapshot.

A snapshot is useful only if all ranks have taken it, so all take it after the same steps: every N steps, until a step
at which rank 0 sets N anew. Rank 0 posts that to the rank store, and the other ranks wait for it there; the steps in
between need no communication. A rank that can take no more snapshots proposes to stop: the first proposal holds.

There is at least one step without a snapshot between two with one (`snapshots`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer_runtime.snapshot_page import KEPT

_OFF = "off"
_LEAST = 2
"""Least steps between snapshots."""
_MOST_SNAPSHOTS = 64
"""Snapshots between two settlements; with so many, a settlement costs next to nothing."""
_LEAST_INTERVAL = 2.0
"""The interval of snapshots, as a multiple of the time until one is complete and sent: none waits for the last."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Snapshots after `anchor`, every `every` steps, until the step `until`."""

    anchor: int
    every: int
    until: int

    def after(self, step: int) -> int:
        """Return the first step after this one at which a snapshot is due."""
        return step + self.every - (step - self.anchor) % self.every


def first_schedule(step: int) -> Schedule:
    """Return the schedule for the first steps, before the durations of a step and a snapshot are known.

    Args:
        step: step of the first snapshot.

    The first snapshot in each slot allocates memory that later ones reuse, and is waited for as long as it takes: its
    cost shows in the cost of the next one. One more snapshot then costs what all later ones will.
    """
    return Schedule(step, _LEAST, step + _LEAST * (KEPT + 1))


def next_schedule(number: int, step: int, *, cost_s: float, step_s: float, overhead: float, busy_s: float) -> Schedule:
    """Return the next schedule.

    Args:
        number: number of this settlement, from 1. Settlements become rarer as the measurements become more reliable.
        step: step of the settlement.
        cost_s: seconds that a snapshot usually takes.
        step_s: seconds that a step takes without a snapshot.
        overhead: largest share of the steps' time that snapshots may take, from 0 to 1.
        busy_s: seconds until a snapshot is complete, and its part sent to other nodes if there are any.
    """
    every = max(_LEAST, math.ceil(_LEAST_INTERVAL * busy_s / step_s), math.ceil(cost_s / (overhead * step_s)))
    return Schedule(step, every, step + every * min(2**number, _MOST_SNAPSHOTS))


def text_of(schedule: Schedule | None) -> str:
    """Return the text for the rank store; None: no more snapshots."""
    if schedule is None:
        return _OFF
    return f"{schedule.anchor} {schedule.every} {schedule.until}"


def schedule_of(text: str) -> Schedule | None:
    """Parse the text from the rank store."""
    if text == _OFF:
        return None
    return Schedule(*map(int, text.split()))
