"""Ratios within one run that are compared with bounds, so that a large regression is seen on the day it comes.

Both parts of a ratio are measured in turns in the same minute. A busy or a slower machine changes both, so the bounds
hold on any. They are in `bounds.toml`. A new ratio needs an entry in `RATIOS` and one there.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import guard_commit, guard_leader, guard_meeting, guard_recovery
from benchmarks.jobs import NotStartedError

BOUNDS = Path(__file__).with_name("bounds.toml")
RATIOS: dict[str, Callable[[int], float]] = {
    "commit": guard_commit.commit_ratio,
    "snapshot": guard_commit.snapshot_ratio,
    "recovery": guard_recovery.ratio,
    "meeting-growth": lambda tries: guard_meeting.measure(tries).growth,
    "meeting": lambda tries: guard_meeting.measure(tries).over_bare,
    "leader-growth": lambda tries: guard_leader.measure(tries).growth,
    "leader": lambda tries: guard_leader.measure(tries).over_reference,
}
"""Each takes the number of repetitions, and returns one ratio: the smaller the better."""

HEADINGS = ("ratio", "of", "measured", "bound", "verdict")


@dataclass(frozen=True)
class Bound:
    """An entry of `bounds.toml`."""

    what: str
    """The ratio in plain English."""
    bound: float
    """A larger ratio fails."""
    measured: float
    """The ratio when the bound was set."""
    commit: str
    date: str


@dataclass(frozen=True)
class Verdict:
    """One ratio, compared with its bound."""

    name: str
    what: str
    measured: tuple[float, ...]
    """A second value is there if the first one was over the bound or NaN. The smaller one counts."""
    bound: float | None
    problem: str
    """Empty: the ratio is within its bound."""


def read_bounds(path: Path = BOUNDS) -> dict[str, Bound]:
    """Read the bounds by the names of their ratios. Raises `TypeError` if an entry lacks a field."""
    entries: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Bound(**{**entry, "date": str(entry["date"])}) for name, entry in entries.items()}


def measure(names: Sequence[str], bounds: Mapping[str, Bound], repetitions: int) -> dict[str, tuple[float, ...]]:
    """Measure these ratios; once more those that are over their bound or could not be measured (NaN)."""
    measured = {}
    for name in names:
        values = [_measure(name, repetitions)]
        if math.isnan(values[0]) or (name in bounds and values[0] > bounds[name].bound):
            values.append(_measure(name, repetitions))
        measured[name] = tuple(values)
    return measured


def _measure(name: str, repetitions: int) -> float:
    """Return NaN, and say why, if a job failed: this may have been a disturbance too."""
    try:
        return RATIOS[name](repetitions)
    except (NotStartedError, TimeoutError, RuntimeError) as error:
        sys.stderr.write(f"bench: guard: {name}: {error}\n")
        return math.nan


def judge(bounds: Mapping[str, Bound], measured: Mapping[str, Sequence[float]]) -> list[Verdict]:
    """Compare each ratio with its bound. A bound without a ratio and a ratio without a bound fail too."""
    return [_judge(name, bounds.get(name), tuple(measured.get(name, ()))) for name in sorted({*bounds, *measured})]


def _judge(name: str, bound: Bound | None, measured: tuple[float, ...]) -> Verdict:
    if bound is None:
        return Verdict(name, "", measured, None, f"has no bound: add it to {BOUNDS.name}")
    if not measured:
        problem = "was not measured: add it to RATIOS, or remove its bound"
    elif any(0 < value <= bound.bound for value in measured):  # not so with NaN
        problem = ""
    elif not any(value > bound.bound for value in measured):
        problem = "could not be measured"
    else:
        problem = f"over its bound; it was {bound.measured:g} at commit {bound.commit}, {bound.date}"
    return Verdict(name, bound.what, measured, bound.bound, problem)


def rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    return [
        (
            each.name,
            each.what,
            ", then ".join(f"{value:.3g}" for value in each.measured),
            "" if each.bound is None else f"{each.bound:g}",
            each.problem or "fine",
        )
        for each in verdicts
    ]
