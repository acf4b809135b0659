"""Which part of the data is whose: each is trained by one worker, and by another if that one is lost in it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Leases:
    """The parts of one pass through the data."""

    parts: int
    done: set[int] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)
    """By which worker."""

    def take(self, worker: int) -> int | None:
        """A part for this worker: one that it holds already, else the first that nobody has; None: there is none."""
        for part, holder in self.held.items():
            if holder == worker:
                return part
        free = (part for part in range(self.parts) if part not in self.done and part not in self.held)
        if (found := next(free, None)) is not None:
            self.held[found] = worker
        return found

    def finish(self, part: int, worker: int) -> None:
        """It is trained. Of one that another has been given since, that one says so.

        Who has it is known to one server only: another one that follows knows of nobody, and believes who has trained.
        """
        if 0 <= part < self.parts and self.held.get(part, worker) == worker:
            self.held.pop(part, None)
            self.done.add(part)

    def leave(self, worker: int) -> None:
        """What it holds is free again."""
        self.held = {part: holder for part, holder in self.held.items() if holder != worker}

    @property
    def is_over(self) -> bool:
        """Whether all is trained."""
        return len(self.done) >= self.parts
