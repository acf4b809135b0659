"""Waits that double each time something has come to nothing, however often that was."""

from __future__ import annotations

_MOST_TIMES = 64
"""Every wait is at its longest by then. A job that waits all night gets to 2.0**1024, which is no number any more."""


def doubled_s(first_s: float, times: int, longest_s: float) -> float:
    """The first wait, doubled so many times, up to the longest."""
    return min(first_s * 2.0 ** min(times, _MOST_TIMES), longest_s)
