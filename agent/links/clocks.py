"""How far a peer's wall clock is from our own, by the heartbeats that it answers.

A peer names its time in each answer. It read its clock at some moment between our question and its answer; taken as
the middle, that is wrong by at most half of the round trip (F. Cristian, "Probabilistic clock synchronization", 1989).
A quick round trip says most, so the best answer is kept; but as it ages the clocks may drift apart, and in the end a
newer one is better. A clock that was set, by whomever, shows as an answer that the kept one cannot explain: then the
newer one counts.

What is told leaves room for as much error again, half a millisecond at least. So it stays true while both drift and
noise use up that room, and then it is told anew: an hour of heartbeats is told in a few words.
"""

from __future__ import annotations

from dataclasses import dataclass

_DRIFT = 1e-4
"""Seconds a second: by how much two clocks may run apart that nobody steers."""
_ROOM_S = 5e-4


@dataclass(frozen=True)
class ClockOffset:
    """By how much a clock is ahead of ours, in seconds."""

    ahead_s: float
    error_s: float
    """By how much that may be wrong."""


@dataclass(frozen=True)
class _Answer:
    ahead_s: float
    error_s: float
    at: float

    def error_at_s(self, now: float) -> float:
        return self.error_s + _DRIFT * (now - self.at)


class ClockComparison:
    """The clock of one peer. Moments are on our monotonic clock, wall times in seconds since 1970."""

    def __init__(self) -> None:
        self._kept: _Answer | None = None
        self._told: ClockOffset | None = None

    def take(self, asked: float, answered: float, *, mine: float, theirs: float) -> ClockOffset | None:
        """Take in an answer.

        Args:
            asked: when the question was sent.
            answered: when the answer had come.
            mine: our wall time at `answered`.
            theirs: the wall time that the peer named.

        Returns:
            What is to be told now, or None: what was told still holds.
        """
        half_s = (answered - asked) / 2
        kept = _better(self._kept, _Answer(theirs - (mine - half_s), half_s, answered))
        self._kept = kept
        found = ClockOffset(kept.ahead_s, kept.error_at_s(answered))
        if self._told is not None and not _is_news(found, self._told):
            return None
        self._told = _with_room(found)
        return self._told


def _better(kept: _Answer | None, new: _Answer) -> _Answer:
    if kept is None:
        return new
    error_s = kept.error_at_s(new.at)
    was_set = abs(kept.ahead_s - new.ahead_s) > error_s + new.error_s
    return new if was_set or new.error_s < error_s else kept


def _is_news(found: ClockOffset, told: ClockOffset) -> bool:
    """Whether what was told may not be true any more, or can be said with half of the error."""
    may_be_apart_s = abs(found.ahead_s - told.ahead_s) + found.error_s
    return may_be_apart_s > told.error_s or _with_room(found).error_s < told.error_s / 2


def _with_room(found: ClockOffset) -> ClockOffset:
    return ClockOffset(found.ahead_s, found.error_s + max(found.error_s, _ROOM_S))
