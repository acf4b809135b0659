"""The curves of the metrics that rank 0 commits, from polls of its node. Pure: no clock here."""

from __future__ import annotations

import msgspec

from agent.links.queries import LiveRanks

MAX_POINTS = 900


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One value of a metric."""

    at: float
    """When it was polled: wall clock in seconds since 1970."""
    group: int
    step: int
    value: float | None
    """None: not a finite number."""


class Curve:
    """A metric over the whole time. Once there are too many points, every second one is left out, and half of the next.

    So its memory is bounded, and its points are as dense at its beginning as at its end.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._min_gap_s = 0.0

    def add(self, point: Point) -> bool:
        """Add the next point; return whether it is one of those that are kept."""
        if self.points and point.at - self.points[-1].at < self._min_gap_s:
            return False
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            self._min_gap_s = 2 * (self.points[-1].at - self.points[0].at) / len(self.points)
            self.points = self.points[::2]
        return True


class Curves:
    """The curves of all metrics, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Curve] = {}
        self._last = (0, 0)
        """Group and step of the last points."""

    def note(self, now: float, nodes: dict[str, LiveRanks]) -> dict[str, Point]:
        """Take the answers of one poll; return the points of steps that were not seen before, by metric."""
        found = [(live.group, rank) for live in nodes.values() for rank in live.ranks if rank.metrics_step]
        if not found:
            return {}
        group, rank = max(found, key=lambda each: each[0])  # an agent may still answer for an older group
        if (group, rank.metrics_step) == self._last:
            return {}
        self._last = group, rank.metrics_step
        new = {name: Point(now, group, rank.metrics_step, value) for name, value in rank.metrics.items()}
        return {name: point for name, point in new.items() if self.by_name.setdefault(name, Curve()).add(point)}

    def points(self) -> dict[str, list[Point]]:
        """Return all points, by metric."""
        return {name: curve.points for name, curve in self.by_name.items()}
