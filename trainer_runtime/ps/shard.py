"""What one server has: its part of all tables, and which pushes it has had. It decides, without socket or clock.

All that changes it is a `ShardChange`, so that another server that is given the same changes in the same order holds
the same. Each names the steps that it contains, and is atomic: what is sent again is known again, so it counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from trainer_runtime.ps.frames import ALL_DONE, ALL_HELD, PART
from trainer_runtime.ps.leases import Leases
from trainer_runtime.ps.messages import Gradients, Push
from trainer_runtime.ps.table import Table, TableSpec
from trainer_runtime.ps.worker_progress import Mode, WorkerProgress

MAX_TABLES = 4096
RUN_ENDS = "/"
"""After the run, in the name of a pass through the data."""


class Author(NamedTuple):
    """A worker's process."""

    worker: int
    incarnation: int
    """Grows with each process that takes this worker's place."""


@dataclass(frozen=True)
class ShardChange:
    """What is done at once."""

    steps: tuple[tuple[Author, int], ...]
    """Whose step of which number is contained."""
    parts: tuple[Gradients, ...]
    now_s: int
    """Seconds since 1970."""
    begins: bool = False
    """They are no gradients, but values for rows that are not there yet."""


class Shard:
    """Tables, and the workers that change them."""

    def __init__(self, mode: Mode) -> None:
        self.pace = WorkerProgress(mode)
        self.tables: list[Table] = []
        self.applied: dict[Author, int] = {}
        """The last step of each worker's newest process that is contained."""
        self.passes: dict[str, Leases] = {}
        """Through the data, by name."""
        self._numbers: dict[str, int] = {}
        self._waiting: dict[int, dict[Author, Push]] = {}
        """Of steps that are not whole yet."""

    def declare(self, spec: TableSpec) -> int:
        """The number of a table, which is made if it is new. Raises `ValueError`: it is here, and another one."""
        number = self._numbers.get(spec.name)
        if number is None:
            if len(self.tables) >= MAX_TABLES:
                raise ValueError(f"{MAX_TABLES} tables are here already")
            self._numbers[spec.name] = number = len(self.tables)
            self.tables.append(Table(spec))
        elif difference := self.tables[number].spec.difference(spec):
            raise ValueError(difference)
        return number

    def push(self, author: Author, push: Push, now_s: int) -> list[ShardChange]:
        """Take what a worker has found; return what is to be done, which may be nothing yet."""
        self.pace.note(author.worker, push.step)
        if push.step <= self.applied.get(author, 0):
            return []
        if not self.pace.mode.merges:
            return [ShardChange(((author, push.step),), self._admitted(push.parts), now_s)]
        if push.step > self.pace.done:
            self._waiting.setdefault(push.step, {})[author] = push
        return self.whole_steps(now_s)

    def is_left_out(self, author: Author, step: int) -> bool:
        """Whether what a worker has sent of a common step, which is over, is not contained: it came too late."""
        return self.pace.mode.merges and self.applied.get(author, 0) < step

    def expect(self, workers: int, *, begins: bool) -> None:
        """Wait for a job's workers: for all where it begins, else for those that have made steps here."""
        last = {author.worker: step for author, step in sorted(self.applied.items()) if author.worker < workers}
        begin = self.pace.done if self.pace.mode.merges else min(last.values(), default=0)
        self.pace.expect(range(workers) if begins else sorted(last), begin)

    def join(self, author: Author) -> int:
        """A worker's process is here; return the step after which it begins.

        What its predecessor had sent of a step that is not whole is dropped: it is for this one to make it.
        """
        if self._drop_pushes(author.worker, but=author):
            self.pace.leave(author.worker)
        return self.pace.join(author.worker)

    def leave(self, worker: int, now_s: int) -> list[ShardChange]:
        """A worker is gone: drop its part of steps that are not whole, free its data; return what is to be done."""
        for leases in self.passes.values():
            leases.leave(worker)
        return self.rest(worker, now_s)

    def rest(self, worker: int, now_s: int) -> list[ShardChange]:
        """Wait for this worker no more; return what is to be done."""
        self.pace.leave(worker)
        self._drop_pushes(worker)
        return self.whole_steps(now_s)

    def _drop_pushes(self, worker: int, but: Author | None = None) -> bool:
        """Whether any had waited."""
        dropped = False
        for pushes in self._waiting.values():
            for author in [each for each in pushes if each.worker == worker and each != but]:
                del pushes[author]
                dropped = True
        return dropped

    def whole_steps(self, now_s: int) -> list[ShardChange]:
        """The changes of steps that all have sent."""
        changes = []
        for step in sorted(self._waiting):
            if not self.pace.is_whole(step):
                break
            pushes = sorted(self._waiting.pop(step).items())
            if pushes:
                parts = self._admitted(merge([push for _, push in pushes]))
                changes.append(ShardChange(tuple((author, step) for author, _ in pushes), parts, now_s))
        return changes

    def lease(self, name: str, parts: int, done: int | None, worker: int) -> int:
        """A worker has done a part of a pass through the data, if any, and wants another; `Kind.LEASE`'s answer.

        Raises `ValueError`: the pass has another number of parts.
        """
        leases = self.pass_of(name, parts)
        if done is not None:
            leases.finish(done, worker)
        part = leases.take(worker)
        if part is not None:
            return part + PART
        return ALL_DONE if leases.is_over else ALL_HELD

    def pass_of(self, name: str, parts: int) -> Leases:
        """A pass through the data, which begins if it is new.

        One of another run than this ends those of earlier ones: the rows outlive a run, its passes do not.

        Raises `ValueError`: it has another number of parts.
        """
        leases = self.passes.get(name)
        if leases is None:
            run = _run_of(name)
            self.passes = {other: each for other, each in self.passes.items() if _run_of(other) == run}
            leases = self.passes[name] = Leases(parts)
        elif leases.parts != parts:
            shown = name.removeprefix(f"{_run_of(name)}{RUN_ENDS}")
            raise ValueError(f"pass {shown!r} through the data has {leases.parts} parts, not {parts}: name another one")
        return leases

    def apply(self, change: ShardChange) -> None:
        """Do it."""
        for part in change.parts:
            table = self.tables[part.table]
            if change.begins:
                table.begin(part.ids, part.values)
            else:
                table.apply(part.ids, part.values, change.now_s, part.lr)
        for author, step in change.steps:
            if author not in self.applied:  # those that had this worker's place before are gone
                self.applied = {each: its for each, its in self.applied.items() if each.worker != author.worker}
            self.applied[author] = step
            if self.pace.mode.merges:
                self.pace.done = max(self.pace.done, step)

    def shrink(self, before_s: int) -> int:
        """Drop the rows that nobody has pushed to since then; return how many."""
        return sum(table.shrink(before_s) for table in self.tables)

    def is_answered(self, step: int) -> bool:
        """Whether a worker that has sent this step may be told to go on."""
        return self.pace.done >= step if self.pace.mode.merges else self.pace.may_go_on(step)

    def _admitted(self, parts: Sequence[Gradients]) -> tuple[Gradients, ...]:
        found = []
        for part in parts:
            mask = self.tables[part.table].admit(part.ids)
            found.append(part if mask.all() else replace(part, ids=part.ids[mask], values=part.values[mask]))
        return tuple(found)


def _run_of(name: str) -> str:
    run, ends, _ = name.partition(RUN_ENDS)
    return run if ends else ""


def merge(pushes: Sequence[Push]) -> list[Gradients]:
    """The weighted mean of the gradients of several workers, table by table."""
    whole = sum(push.weight for push in pushes) or 1.0
    by_table: dict[int, list[tuple[float, Gradients]]] = {}
    for push in pushes:
        for part in push.parts:
            by_table.setdefault(part.table, []).append((push.weight / whole, part))
    return [_mean(table, parts) for table, parts in sorted(by_table.items())]


def _mean(table: int, parts: Sequence[tuple[float, Gradients]]) -> Gradients:
    ids, places = torch.cat([part.ids for _, part in parts]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    values = torch.cat([part.values * share for share, part in parts])
    lr = parts[0][1].lr  # they make common steps: all have the same
    return Gradients(
        table, ids, torch.zeros(len(ids), values.shape[1], dtype=values.dtype).index_add_(0, places, values), lr
    )
