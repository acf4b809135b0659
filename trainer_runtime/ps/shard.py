"""A shard: one part of all tables, and the pushes that it contains. It decides without sockets and clocks.

A shard changes only by a `ShardChange`. A server that applies the same changes in the same order holds the same state.
Each change is atomic and names the steps that it contains. A push that is sent again is recognized, so it counts once.
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
"""Separates the run from the rest of the name of a pass through the data."""


class Author(NamedTuple):
    """A worker's process."""

    worker: int
    incarnation: int
    """Grows with each process that takes the place of this worker."""


@dataclass(frozen=True)
class ShardChange:
    """A change that is applied atomically."""

    steps: tuple[tuple[Author, int], ...]
    """The steps that the change contains, with their authors."""
    parts: tuple[Gradients, ...]
    now_s: int
    """Seconds since 1970."""
    initializes: bool = False
    """The parts are initial values of rows that do not exist yet, not gradients."""


class Shard:
    """Tables, and the workers that change them."""

    def __init__(self, mode: Mode) -> None:
        self.progress = WorkerProgress(mode)
        self.tables: list[Table] = []
        self.applied: dict[Author, int] = {}
        """The last applied step of the newest process of each worker."""
        self.passes: dict[str, Leases] = {}
        """Passes through the data, by name."""
        self._numbers: dict[str, int] = {}
        self._waiting: dict[int, dict[Author, Push]] = {}
        """Pushes of steps that are not complete yet."""

    def declare(self, spec: TableSpec) -> int:
        """Return the number of a table, and create it if it is new.

        Raises `ValueError` if it exists with other settings.
        """
        number = self._numbers.get(spec.name)
        if number is None:
            if len(self.tables) >= MAX_TABLES:
                raise ValueError(f"wanted at most {MAX_TABLES} tables, got one more")
            self._numbers[spec.name] = number = len(self.tables)
            self.tables.append(Table(spec))
        elif difference := self.tables[number].spec.difference(spec):
            raise ValueError(difference)
        return number

    def push(self, author: Author, push: Push, now_s: int) -> list[ShardChange]:
        """Accept a worker's push; return the changes to apply, which may be none yet."""
        self.progress.record_step(author.worker, push.step)
        if push.step <= self.applied.get(author, 0):
            return []
        if not self.progress.mode.merges:
            return [ShardChange(((author, push.step),), self._admitted(push.parts), now_s)]
        if push.step > self.progress.done:
            self._waiting.setdefault(push.step, {})[author] = push
        return self.complete_steps(now_s)

    def is_left_out(self, author: Author, step: int) -> bool:
        """Return whether a worker's push of a common step was too late and is not contained."""
        return self.progress.mode.merges and self.applied.get(author, 0) < step

    def expect(self, workers: int, *, begins: bool) -> None:
        """Wait for the job's workers: for all when the job begins, otherwise for those that have made steps here."""
        last = {author.worker: step for author, step in sorted(self.applied.items()) if author.worker < workers}
        begin = self.progress.done if self.progress.mode.merges else min(last.values(), default=0)
        self.progress.expect(range(workers) if begins else sorted(last), begin)

    def join(self, author: Author) -> int:
        """Register a worker's process; return the step after which it begins.

        Pushes of an earlier process for steps that are not complete are dropped: the new process makes these steps.
        """
        if self._drop_pushes(author.worker, keep=author):
            self.progress.leave(author.worker)
        return self.progress.join(author.worker)

    def leave(self, worker: int, now_s: int) -> list[ShardChange]:
        """Remove a worker: drop its pushes of incomplete steps and free its parts. Returns the changes to apply."""
        for leases in self.passes.values():
            leases.leave(worker)
        return self.rest(worker, now_s)

    def rest(self, worker: int, now_s: int) -> list[ShardChange]:
        """Stop waiting for a worker; return the changes to apply."""
        self.progress.leave(worker)
        self._drop_pushes(worker)
        return self.complete_steps(now_s)

    def _drop_pushes(self, worker: int, keep: Author | None = None) -> bool:
        """Drop the waiting pushes of a worker, and return whether there were any."""
        dropped = False
        for pushes in self._waiting.values():
            for author in [each for each in pushes if each.worker == worker and each != keep]:
                del pushes[author]
                dropped = True
        return dropped

    def complete_steps(self, now_s: int) -> list[ShardChange]:
        """Return the changes of the steps that all workers have sent."""
        changes = []
        for step in sorted(self._waiting):
            if not self.progress.is_complete(step):
                break
            pushes = sorted(self._waiting.pop(step).items())
            if pushes:
                parts = self._admitted(merge([push for _, push in pushes]))
                changes.append(ShardChange(tuple((author, step) for author, _ in pushes), parts, now_s))
        return changes

    def lease(self, name: str, parts: int, done: int | None, worker: int) -> int:
        """Finish a worker's part of the data, if any, and assign another; return the answer to `MessageKind.LEASE`.

        Raises `ValueError` if the pass has another number of parts.
        """
        leases = self.pass_of(name, parts)
        if done is not None:
            leases.finish(done, worker)
        part = leases.take(worker)
        if part is not None:
            return part + PART
        return ALL_DONE if leases.is_over else ALL_HELD

    def pass_of(self, name: str, parts: int) -> Leases:
        """Return a pass through the data, and start it if it is new.

        The first pass of a run ends the passes of earlier runs: rows outlive a run, passes do not.

        Raises `ValueError` if the pass has another number of parts.
        """
        leases = self.passes.get(name)
        if leases is None:
            run = _run_of(name)
            self.passes = {other: each for other, each in self.passes.items() if _run_of(other) == run}
            leases = self.passes[name] = Leases(parts)
        elif leases.parts != parts:
            shown = name.removeprefix(f"{_run_of(name)}{RUN_ENDS}")
            raise ValueError(f"pass {shown!r} through the data has {leases.parts} parts, not {parts}: use another name")
        return leases

    def apply(self, change: ShardChange) -> None:
        """Apply a change."""
        for part in change.parts:
            table = self.tables[part.table]
            if change.initializes:
                table.initialize(part.ids, part.values)
            else:
                table.apply(part.ids, part.values, change.now_s, part.lr)
        for author, step in change.steps:
            if author not in self.applied:  # earlier processes of this worker are gone
                self.applied = {each: its for each, its in self.applied.items() if each.worker != author.worker}
            self.applied[author] = step
            if self.progress.mode.merges:
                self.progress.done = max(self.progress.done, step)

    def shrink(self, before_s: int) -> int:
        """Drop the rows that received no push since a time, and return their number."""
        return sum(table.shrink(before_s) for table in self.tables)

    def is_answered(self, step: int) -> bool:
        """Return whether a worker's push of this step can be answered."""
        return self.progress.done >= step if self.progress.mode.merges else self.progress.may_continue(step)

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
    """Return the weighted mean of the gradients of several workers, by table."""
    whole = sum(push.weight for push in pushes) or 1.0
    by_table: dict[int, list[tuple[float, Gradients]]] = {}
    for push in pushes:
        for part in push.parts:
            by_table.setdefault(part.table, []).append((push.weight / whole, part))
    return [_mean(table, parts) for table, parts in sorted(by_table.items())]


def _mean(table: int, parts: Sequence[tuple[float, Gradients]]) -> Gradients:
    ids, places = torch.cat([part.ids for _, part in parts]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    values = torch.cat([part.values * share for share, part in parts])
    lr = parts[0][1].lr  # the same for all workers of a common step
    return Gradients(
        table, ids, torch.zeros(len(ids), values.shape[1], dtype=values.dtype).index_add_(0, places, values), lr
    )
