"""Numbers in words: shares, counts, and durations."""

from __future__ import annotations

from collections.abc import Callable


def percent(share: float) -> str:
    """`97.1 %`. Rounded down, so that 100 % means no downtime."""
    return f"{int(share * 1000 + 1e-6) / 10:.1f} %"


def count(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def bounds(*, is_at_least: bool) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Two functions that put `at most` or `at least` before a quantity; or leave it as it is, if it is exact."""
    if not is_at_least:
        return str, str
    return "at most {}".format, "at least {}".format


def replayed(steps: int) -> str:
    """`1 replayed step`, `2 replayed steps`."""
    return count(steps, "replayed step")


def duration(seconds: float) -> str:
    """`0.04 s`, `14.2 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`."""
    if seconds < 0.095:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours:02d} h"
