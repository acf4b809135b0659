"""Exponential backoff: waits that double with each failed try."""

from __future__ import annotations

import zlib

_MOST_TIMES = 64
"""Doublings after which every wait has reached its maximum. Without this limit, `2.0**1024` would overflow."""


def doubled_s(first_s: float, times: int, longest_s: float) -> float:
    """The first wait, doubled `times` times, up to the longest."""
    return min(first_s * 2.0 ** min(times, _MOST_TIMES), longest_s)


def spread(who: str) -> float:
    """A share from 0.5 to 1 that differs between agents, so that they do not all come back at once."""
    return 0.5 + zlib.crc32(who.encode()) / 2**33
