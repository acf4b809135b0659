"""Who waits for whom: how far each worker is, and when one may go on.

A worker's step is at one server what its last push said. `done` is the step up to which nobody here waits any more.
Servers judge each for itself; what holds is only that a worker does not begin step s + 1 before all of them let it.

Where workers wait for each other, one that is not here is waited for too, up to a time: those of the job when it
begins, those that have made steps when a server takes another's place, and one whose connection has ended. Who rests
or has left is not. Times are the caller's, of one clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mode:
    """How gradients of several workers come together."""

    merges: bool = False
    """Steps are the workers' common ones: the mean of their gradients is applied once all have sent theirs."""
    ahead: float = math.inf
    """So many steps one may be ahead of the slowest."""
    every: int = 0
    """Workers change copies of their own, and push what has become of them every so many steps. 0: they do not."""

    def __post_init__(self) -> None:
        """Raises `ValueError` where a law does not hold."""
        if self.ahead < 0 or self.every < 0 or (self.merges and (self.ahead or self.every)):
            raise ValueError(f"a mode cannot be {self}: steps that merge are common, and numbers are not negative")

    @property
    def waits(self) -> bool:
        """Whether workers wait for each other's steps."""
        return self.merges or self.ahead < math.inf


SYNC = Mode(merges=True, ahead=0)
ASYNC = Mode()


def bounded(ahead: int) -> Mode:
    """Each gradient counts at once; a worker may be so many steps ahead of the slowest."""
    return Mode(ahead=ahead)


def geo(every: int) -> Mode:
    """Workers train copies of their own, and add the differences up on the servers every so many steps."""
    return Mode(every=every)


@dataclass
class WorkerProgress:
    """The workers of one job, as one server sees them."""

    mode: Mode
    steps: dict[int, int] = field(default_factory=dict)
    """The last step of each worker that is waited for."""
    away: dict[int, float] = field(default_factory=dict)
    """Of those the ones that are not here: until when they are waited for."""
    done: int = 0
    """Of steps that merge: the last that was applied."""

    def expect(self, workers: Iterable[int], begin: int) -> None:
        """These are to come, and begin after this step. How long they are waited for `limit` says."""
        for worker in workers:
            self.steps[worker] = begin
            self.away[worker] = math.inf

    def join(self, worker: int) -> int:
        """A worker is here; return the step after which it begins: where the slowest is."""
        self.away.pop(worker, None)
        begin = self.done if self.mode.merges else min(self.steps.values(), default=0)
        return self.steps.setdefault(worker, begin)

    def lose(self, worker: int, until: float) -> None:
        """Its connection has ended: it is waited for until then."""
        if worker in self.steps:
            self.away[worker] = until

    def leave(self, worker: int) -> None:
        """It is not waited for any more."""
        self.steps.pop(worker, None)
        self.away.pop(worker, None)

    def limit(self, until: float) -> None:
        """Somebody waits now: nobody who is not here is waited for beyond that."""
        self.away = {worker: min(own, until) for worker, own in self.away.items()}

    def late(self, now: float) -> list[int]:
        """Those that have not come in time."""
        return sorted(worker for worker, until in self.away.items() if until <= now)

    @property
    def wake_at(self) -> float:
        """When the next of them is late; infinite: never."""
        return min(self.away.values(), default=math.inf)

    def note(self, worker: int, step: int) -> None:
        """It has sent what it found in this step."""
        self.away.pop(worker, None)
        self.steps[worker] = max(step, self.steps.get(worker, 0))

    def is_whole(self, step: int) -> bool:
        """Whether all who are waited for have sent what they found in this step."""
        return all(sent >= step for sent in self.steps.values())

    def may_go_on(self, step: int) -> bool:
        """Whether one that has sent this step may begin the next."""
        return min(self.steps.values(), default=step) + self.mode.ahead >= step
