"""After which steps all ranks take a snapshot.

A snapshot is of use only if all ranks have taken it, so they take it after the same steps: every so many, until a step
at which rank 0 says anew how many. It says so over the board, and the others wait for it there; no step in between
costs a word on the network. A rank that can take no more says that there are to be none: the first word counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer_runtime.snapshot_page import SLOTS

_OFF = "off"
_MOST_SNAPSHOTS = 64
"""Between two settlements: they cost little more than nothing then."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """After `anchor`, every so many steps until one."""

    anchor: int
    every: int
    until: int

    def after(self, step: int) -> int:
        """Return the first step after this one at which a snapshot is due."""
        return step + self.every - (step - self.anchor) % self.every


def first_schedule(step: int) -> Schedule:
    """Return what to begin with at the first step, before it is known how long a step and a snapshot take.

    The first one into each slot takes memory that later ones have, and is waited for as long as it takes: that shows
    in what the next one costs. One more costs what all later ones will.
    """
    return Schedule(step, 1, step + SLOTS + 1)


def next_schedule(number: int, step: int, *, cost_s: float, step_s: float, overhead: float) -> Schedule:
    """Return how to go on.

    Args:
        number: of this settlement, counted from 1. They become rarer, as what was measured becomes surer.
        step: at which it is settled.
        cost_s: seconds that a snapshot takes, as a rule.
        step_s: seconds that a step takes without one.
        overhead: the share of the steps' time that snapshots may take.
    """
    every = max(1, math.ceil(cost_s / (overhead * step_s)))
    return Schedule(step, every, step + every * min(2**number, _MOST_SNAPSHOTS))


def text_of(schedule: Schedule | None) -> str:
    """Return what is said on the board; None: there are to be no more snapshots."""
    return _OFF if schedule is None else f"{schedule.anchor} {schedule.every} {schedule.until}"


def schedule_of(text: str) -> Schedule | None:
    """Read what was said on the board."""
    return None if text == _OFF else Schedule(*map(int, text.split()))
