"""Which part of the data is whose: each is trained by one worker, and by another if that one is lost in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MAX_PARTS = 1 << 24
"""Of one pass."""


@dataclass
class Leases:
    """The parts of one pass through the data. One that is over takes no memory to speak of."""

    parts: int
    done_before: int = 0
    """All parts before this one are done; this one is not."""
    done: set[int] = field(default_factory=set)
    """Those that are done after it."""
    held: dict[int, int] = field(default_factory=dict)
    """By which worker."""
    _next: int = field(default=0, init=False, repr=False, compare=False)
    """All before are done or held."""

    def take(self, worker: int) -> int | None:
        """A part for this worker: one that it holds already, else the first that nobody has; None: there is none."""
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
        """It is trained. Of one that another has been given since, that one says so.

        Who has it is known to one server only: another one that follows knows of nobody, and believes who has trained.
        """
        if 0 <= part < self.parts and self.held.get(part, worker) == worker:
            self.held.pop(part, None)
            self.note_done(part, part + 1)

    def note_done(self, begin: int, end: int) -> None:
        """All from `begin` up to before `end` are trained."""
        if begin <= self.done_before:
            self.done_before = max(self.done_before, end)
        else:
            self.done.update(range(begin, end))
        while self.done_before in self.done:
            self.done.remove(self.done_before)
            self.done_before += 1

    def leave(self, worker: int) -> None:
        """What it holds is free again."""
        free = [part for part, holder in self.held.items() if holder == worker]
        for part in free:
            del self.held[part]
        self._next = min([self._next, *free])

    @property
    def is_over(self) -> bool:
        """Whether all is trained."""
        return self.done_before >= self.parts

    def ranges(self) -> list[tuple[int, int]]:
        """What is done, as ranges from the first up to before the second."""
        first = [(0, self.done_before)] if self.done_before else []
        ordered = sorted(self.done)
        if not ordered:
            return first
        gaps = [(one, other) for one, other in pairwise(ordered) if other != one + 1]
        begins = [ordered[0], *(other for _, other in gaps)]
        ends = [*(one + 1 for one, _ in gaps), ordered[-1] + 1]
        return [*first, *zip(begins, ends, strict=True)]


def leases_of(parts: int, done: Sequence[Sequence[int]]) -> Leases:
    """A pass of which these ranges are done. Raises `ValueError`, `TypeError`: they are none."""
    leases = Leases(parts)
    for begin, end in done:
        if not 0 <= begin < end <= parts <= MAX_PARTS:
            raise ValueError(f"{begin} to {end} are no parts of {parts}")
        leases.note_done(begin, end)
    return leases
