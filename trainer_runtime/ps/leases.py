"""Which worker trains which part of the data: each part has one worker, and another if that one is lost meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MAX_PARTS = 1 << 24
"""Maximum number of parts of one pass."""


@dataclass
class Leases:
    """The parts of one pass through the data. A pass that is over takes almost no memory."""

    parts: int
    done_before: int = 0
    """All parts before this one are done; this one is not."""
    done: set[int] = field(default_factory=set)
    """The parts after it that are done."""
    held: dict[int, int] = field(default_factory=dict)
    """The worker of each part that is being trained."""
    _next: int = field(default=0, init=False, repr=False, compare=False)
    """All parts before this one are done or held."""

    def take(self, worker: int) -> int | None:
        """Assign a part to a worker: the one that it holds, else the first free one. None: there is none."""
        for part, holder in self.held.items():
            if holder == worker:
                return part
        self._next = max(self._next, self.done_before)
        while self._next in self.done or self._next in self.held:
            self._next += 1
        if self._next >= self.parts:
            return None
        self.held[self._next] = worker
        return self._next

    def finish(self, part: int, worker: int) -> None:
        """Mark a part as done. Ignored if the part was given to another worker since, which will finish it.

        Replicas do not know who holds a part. After a failover the part counts as done by whichever worker finishes it.
        """
        if 0 <= part < self.parts and self.held.get(part, worker) == worker:
            self.held.pop(part, None)
            self.note_done(part, part + 1)

    def note_done(self, begin: int, end: int) -> None:
        """Mark the parts from `begin` up to before `end` as done."""
        if begin <= self.done_before:
            self.done_before = max(self.done_before, end)
        else:
            self.done.update(range(begin, end))
        while self.done_before in self.done:
            self.done.remove(self.done_before)
            self.done_before += 1

    def leave(self, worker: int) -> None:
        """Free the parts that a worker holds."""
        free = [part for part, holder in self.held.items() if holder == worker]
        for part in free:
            del self.held[part]
        self._next = min([self._next, *free])

    @property
    def is_over(self) -> bool:
        """Whether all parts are done."""
        return self.done_before >= self.parts

    def ranges(self) -> list[tuple[int, int]]:
        """Return the parts that are done, as ranges from the first up to before the second number."""
        first = [(0, self.done_before)] if self.done_before else []
        ordered = sorted(self.done)
        if not ordered:
            return first
        gaps = [(one, other) for one, other in pairwise(ordered) if other != one + 1]
        begins = [ordered[0], *(other for _, other in gaps)]
        ends = [*(one + 1 for one, _ in gaps), ordered[-1] + 1]
        return [*first, *zip(begins, ends, strict=True)]


def leases_of(parts: int, done: Sequence[Sequence[int]]) -> Leases:
    """Return a pass of which these ranges are done. Raises `ValueError`, `TypeError` if they are invalid."""
    leases = Leases(parts)
    for begin, end in done:
        if not 0 <= begin < end <= parts <= MAX_PARTS:
            raise ValueError(f"wanted a range of the {parts} parts, got {begin} to {end}")
        leases.note_done(begin, end)
    return leases
