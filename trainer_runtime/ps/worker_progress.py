"""The steps of the workers at one shard, and when a worker may continue with the next step.

A worker's step at a shard is that of its last push. In modes that merge, `done` is the last step that was applied.
Each shard decides for itself. The guarantee is that a worker begins step s + 1 only after all shards have allowed it.

Where workers wait for each other, they also wait, up to a deadline, for some that are absent: all workers of the job
when it begins, the workers that have made steps when a replica becomes the primary, and a worker whose connection has
ended. Workers that rest or have left are not waited for. Times are the caller's, of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mode:
    """How the gradients of several workers are combined."""

    merges: bool = False
    """Workers make common steps: the mean of their gradients is applied once all have sent theirs."""
    ahead: float = math.inf
    """How many steps a worker may be ahead of the slowest."""
    every: int = 0
    """Workers train copies of the rows and push the differences every so many steps. 0: they push gradients."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the fields contradict each other."""
        if self.ahead < 0 or self.every < 0 or (self.merges and (self.ahead or self.every)):
            raise ValueError(f"invalid mode {self}: merges excludes ahead and every, and numbers must not be negative")

    @property
    def waits(self) -> bool:
        """Whether workers wait for each other's steps."""
        return self.merges or self.ahead < math.inf


SYNC = Mode(merges=True, ahead=0)
ASYNC = Mode()


def bounded(ahead: int) -> Mode:
    """Apply each gradient at once; a worker may be so many steps ahead of the slowest."""
    return Mode(ahead=ahead)


def geo(every: int) -> Mode:
    """Train copies on the workers, and add the differences up on the servers every so many steps."""
    return Mode(every=every)


@dataclass
class WorkerProgress:
    """The progress of a job's workers at one shard."""

    mode: Mode
    steps: dict[int, int] = field(default_factory=dict)
    """The last step of each worker that the others wait for."""
    absent: dict[int, float] = field(default_factory=dict)
    """The absent workers among these, with the deadline until which the others wait."""
    done: int = 0
    """In modes that merge: the last step that was applied."""

    def expect(self, workers: Iterable[int], begin: int) -> None:
        """Wait for these workers, which begin after this step. `limit_wait` sets the deadline."""
        for worker in workers:
            self.steps[worker] = begin
            self.absent[worker] = math.inf

    def join(self, worker: int) -> int:
        """Register a worker that has connected; return the step after which it begins, that of the slowest."""
        self.absent.pop(worker, None)
        begin = self.done if self.mode.merges else min(self.steps.values(), default=0)
        return self.steps.setdefault(worker, begin)

    def disconnect(self, worker: int, until: float) -> None:
        """Wait until the deadline for a worker whose connection has ended."""
        if worker in self.steps:
            self.absent[worker] = until

    def leave(self, worker: int) -> None:
        """Stop waiting for a worker."""
        self.steps.pop(worker, None)
        self.absent.pop(worker, None)

    def limit_wait(self, until: float) -> None:
        """Limit the deadlines of absent workers. Called while a worker waits."""
        self.absent = {worker: min(own, until) for worker, own in self.absent.items()}

    def overdue(self, now: float) -> list[int]:
        """Return the workers whose deadline has passed."""
        return sorted(worker for worker, until in self.absent.items() if until <= now)

    @property
    def wake_at(self) -> float:
        """The earliest deadline; infinite: there is none."""
        return min(self.absent.values(), default=math.inf)

    def record_step(self, worker: int, step: int) -> None:
        """Record that a worker has sent its push of a step."""
        self.absent.pop(worker, None)
        self.steps[worker] = max(step, self.steps.get(worker, 0))

    def is_complete(self, step: int) -> bool:
        """Return whether all workers that are waited for have sent this step."""
        return all(sent >= step for sent in self.steps.values())

    def may_continue(self, step: int) -> bool:
        """Return whether a worker that has sent this step may begin the next one."""
        return min(self.steps.values(), default=step) + self.mode.ahead >= step
