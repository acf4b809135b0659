"""Outcomes of many faults, by kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from chaos.faults import FAULTS
from chaos.play import Outcome

HEADINGS = (
    *("fault", "n", "recovered", "median s", "99 % s", "too late", "back: median s", "99 % s"),
    *("steps lost (most)", "groups (most)", "wrong"),
)


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`: seconds are the longest time without a finished step."""
    found = [(fault, [outcome for outcome in outcomes if outcome.fault == name]) for name, fault in FAULTS.items()]
    return [(fault.title, *_cells(mine)) for fault, mine in found if mine]


def _cells(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return (
        str(len(outcomes)),
        str(sum(outcome.has_recovered for outcome in outcomes)),
        *_seconds([max(outcome.pauses_s) for outcome in outcomes if outcome.pauses_s]),
        str(sum(bool(outcome.late) for outcome in outcomes)),
        *_seconds([outcome.back_s for outcome in outcomes if outcome.has_recovered]),
        _counts([outcome.lost for outcome in outcomes]),
        _counts([outcome.groups for outcome in outcomes]),
        str(sum(bool(outcome.problems) for outcome in outcomes)),
    )


def _seconds(values: Sequence[float]) -> tuple[str, str]:
    """Median, and what 99 % do not exceed."""
    if not values:
        return "", ""
    return f"{statistics.median(values):.2f}", f"{percentile(sorted(values), 99):.2f}"


def _counts(values: Sequence[int]) -> str:
    """Median, and the most."""
    return f"{statistics.median(values):g} ({max(values)})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of these sorted values that so many percent of them do not exceed."""
    return values[math.ceil(len(values) * percent / 100) - 1]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """For a document."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADINGS, ["---"] * len(HEADINGS), *cells)) + "\n"
