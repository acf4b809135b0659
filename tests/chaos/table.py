"""Outcomes of many faults, by kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from chaos.faults import FAULTS
from chaos.play import Outcome

HEADINGS = ("fault", "n", "recovered", "median s", "99 % s", "too late", "steps lost (most)", "wrong")


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`: seconds are the longest time without a finished step."""
    cells = []
    for name, fault in FAULTS.items():
        mine = [outcome for outcome in outcomes if outcome.fault == name]
        if mine:
            pauses = sorted(max(outcome.pauses_s) for outcome in mine if outcome.pauses_s)
            cells.append(
                (
                    fault.title,
                    str(len(mine)),
                    str(sum(outcome.has_recovered for outcome in mine)),
                    f"{statistics.median(pauses):.2f}" if pauses else "",
                    f"{percentile(pauses, 99):.2f}" if pauses else "",
                    str(sum(bool(outcome.late) for outcome in mine)),
                    f"{statistics.median(outcome.lost for outcome in mine):g} ({max(each.lost for each in mine)})",
                    str(sum(bool(outcome.problems) for outcome in mine)),
                )
            )
    return cells


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of these sorted values that so many percent of them do not exceed."""
    return values[math.ceil(len(values) * percent / 100) - 1]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """For a document."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADINGS, ["---"] * len(HEADINGS), *cells)) + "\n"
