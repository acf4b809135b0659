"""Measures the offset of a peer's wall clock from the heartbeats that it answers.

A peer puts its wall time into each answer. It read its clock at some moment between the request and the answer.
Assuming the midpoint is wrong by at most half of the round trip (F. Cristian, "Probabilistic clock synchronization",
1989). The shorter the round trip, the better the measurement, so the best one is kept. As it ages the clocks may drift
apart, and in the end a newer measurement is better. If a clock was set, a new measurement contradicts the kept one;
then the new one counts.

The reported error bound is twice the measured one, at least 0.5 ms larger. The report therefore stays true while drift
and noise use up this margin, and only then a new one is made: an hour of heartbeats causes only a few reports.
"""

from __future__ import annotations

from dataclasses import dataclass

_DRIFT = 1e-4
"""Seconds per second by which two clocks without synchronization may drift apart."""
_MARGIN_S = 5e-4


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a clock from ours, in seconds."""

    ahead_s: float
    """Positive: the other clock is ahead."""
    error_s: float
    """Bound of the error of `ahead_s`."""


@dataclass(frozen=True)
class _Measurement:
    ahead_s: float
    error_s: float
    at: float

    def error_at_s(self, now: float) -> float:
        return self.error_s + _DRIFT * (now - self.at)


class ClockComparison:
    """The clock of one peer. Moments are on our monotonic clock, wall times are seconds since 1970."""

    def __init__(self) -> None:
        self._best: _Measurement | None = None
        self._reported: ClockOffset | None = None

    def take(self, asked: float, answered: float, *, mine: float, theirs: float) -> ClockOffset | None:
        """Process an answer.

        Args:
            asked: when the request was sent.
            answered: when the answer was received.
            mine: our wall time at `answered`.
            theirs: the wall time in the answer.

        Returns:
            The offset to report now. None: the last report still holds.
        """
        half_s = (answered - asked) / 2
        best = _better(self._best, _Measurement(theirs - (mine - half_s), half_s, answered))
        self._best = best
        found = ClockOffset(best.ahead_s, best.error_at_s(answered))
        if self._reported is not None and not _is_worth_reporting(found, self._reported):
            return None
        self._reported = _with_margin(found)
        return self._reported


def _better(best: _Measurement | None, new: _Measurement) -> _Measurement:
    if best is None:
        return new
    error_s = best.error_at_s(new.at)
    was_set = abs(best.ahead_s - new.ahead_s) > error_s + new.error_s
    return new if was_set or new.error_s < error_s else best


def _is_worth_reporting(found: ClockOffset, reported: ClockOffset) -> bool:
    """Whether the last report may no longer be true, or can be replaced by one with half of the error."""
    may_be_apart_s = abs(found.ahead_s - reported.ahead_s) + found.error_s
    return may_be_apart_s > reported.error_s or _with_margin(found).error_s < reported.error_s / 2


def _with_margin(found: ClockOffset) -> ClockOffset:
    return ClockOffset(found.ahead_s, found.error_s + max(found.error_s, _MARGIN_S))
