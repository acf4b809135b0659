"""Marks on axes of time: how far apart, and how they are written."""

from __future__ import annotations

_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200),
    *(86400, 172800, 604800),
)


def ticks(until_s: float, most: int = 9) -> list[float]:
    """Round times from 0 up to `until_s`, at most so many."""
    step = next((each for each in _STEPS_S if until_s / each < most), _STEPS_S[-1] * (1 + until_s // 604800 // most))
    return [index * step for index in range(int(until_s / step) + 1)]


def written(at_s: float, until_s: float) -> str:
    """A time on an axis that goes to `until_s`, in the form that `unit` names."""
    if until_s < 120:
        return f"{at_s:g}"
    if until_s < 7200:
        return f"{int(at_s) // 60}:{int(at_s) % 60:02d}"
    if until_s < 4 * 86400:
        return f"{int(at_s) // 3600}:{int(at_s) // 60 % 60:02d}"
    return f"{at_s / 86400:g}"


def unit(until_s: float) -> str:
    """What the numbers of such an axis are."""
    if until_s < 120:
        return "seconds"
    if until_s < 7200:
        return "minutes:seconds"
    return "hours:minutes" if until_s < 4 * 86400 else "days"
