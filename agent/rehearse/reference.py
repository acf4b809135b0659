"""The undisturbed run of a script, with which the others are compared, and whether the script is deterministic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from agent.rehearse.records import Key, ObjectRecord, RankRecords, StepRecord


@dataclass(frozen=True)
class Difference:
    """Something that a restart did not bring back."""

    kind: str
    """model, random state, data position, epoch, loss (no other difference explains it), or as in `ObjectRecord`."""
    step: int
    """The first step that shows it."""
    object: ObjectRecord | None = None
    """The object, if it is in the state of one."""
    detail: str = ""
    """More information for the report; may be empty."""


@dataclass
class Reference:
    """The undisturbed run.

    Args:
        ranks: the records by rank.
    """

    ranks: Mapping[int, RankRecords]
    ignored: frozenset[str | Key] = field(default=frozenset())
    """Global random states, modules and tensors that differ between two undisturbed runs.

    Training does not depend on them: otherwise the weights or the loss would differ too.
    """

    def __post_init__(self) -> None:
        self._by_step = {rank: {record.ordinal: record for record in records} for rank, records in self.ranks.items()}
        self.last = min(records[-1].ordinal for records in self.ranks.values())
        self.has_state = self.rank0[0].step is not None

    @property
    def rank0(self) -> RankRecords:
        """The records of rank 0."""
        return self.ranks[0]

    def at(self, rank: int, step: int) -> StepRecord | None:
        """Return the record of one step of one rank."""
        return self._by_step.get(rank, {}).get(step)

    def all_at(self, step: int) -> list[StepRecord]:
        """Return the records of one step of all ranks."""
        return [record for rank in self.ranks if (record := self.at(rank, step)) is not None]

    def epoch_of(self, step: int) -> int | None:
        """Return the epoch of a step, by the State's count or else by the script's own."""
        record = self.at(0, step)
        if record is None:
            return None
        counts_epochs = any(each.state_epoch for each in self.rank0)
        return record.state_epoch if counts_epochs else record.epoch

    def random_in_use(self) -> frozenset[str]:
        """Return the global random states from which training draws."""
        used = {
            name
            for records in self.ranks.values()
            for before, after in pairwise(records)
            for name in after.random
            if before.random.get(name) != after.random[name]
        }
        return frozenset(used) - self.ignored

    @cached_property
    def changing_tensors(self) -> frozenset[Key]:
        """The variables whose tensors training changes in place."""
        return frozenset(
            key
            for records in self.ranks.values()
            for before, after in pairwise([record.objects_by_key() for record in records])
            for key, entry in after.items()
            if entry.is_persistent and key in before and before[key].digest != entry.digest
        )

    @property
    def overwritten(self) -> frozenset[str]:
        """Files in the working directory that the script overwrote in place."""
        return frozenset(path for records in self.ranks.values() for path in records[-1].overwritten)

    def is_compared(self, key: Key, entry: ObjectRecord) -> bool:
        """Return whether a difference in the state of an object matters."""
        return key not in self.ignored and (entry.kind != "tensor" or key in self.changing_tensors)

    def random_sources(self) -> list[str]:
        """Return the names of the global random states and of the script's generators from which training draws."""
        marks: dict[str, set[str]] = {}
        for record in self.rank0:
            for entry in record.objects:
                if entry.kind == "generator":
                    marks.setdefault(entry.name or entry.type, set()).add(entry.digest)
        return sorted(self.random_in_use() | {name for name, found in marks.items() if len(found) > 1})

    def find_resumed_step(self, record: StepRecord, history: Mapping[str, int]) -> int | None:
        """Return the step after which a group resumed, by its first record; None if no earlier step had its weights.

        Args:
            record: the first of a group.
            history: maps the hash of weights that the disturbed job itself has had to the number of steps before.
                They differ from those of this run by rounding after a change of the world size.
        """
        if record.step is not None:
            return record.step - 1
        same = [each for each in self.rank0 if each.weights == record.weights]
        best = [each for each in same if each.inputs == record.inputs] or same
        return best[-1].ordinal - 1 if best else history.get(record.weights)


def find_nondeterminism(reference: Reference, ranks: Mapping[int, RankRecords]) -> Difference | None:
    """Compare with a second undisturbed run; return the first difference in what it computes."""
    for step, rank, record in sorted_by_step(ranks, 0):
        expected = reference.at(rank, step)
        if expected is None:
            continue
        for name, what in (("inputs", "the inputs of the model"), ("weights", "the weights"), ("losses", "the loss")):
            if getattr(expected, name) != getattr(record, name):
                return Difference("not deterministic", step, detail=what)
    return None


def find_ignored(reference: Reference, ranks: Mapping[int, RankRecords]) -> frozenset[str | Key]:
    """Return the global random states, modules and tensors in which a second undisturbed run differs."""
    found: set[str | Key] = set()
    for step, rank, record in sorted_by_step(ranks, 0):
        if (expected := reference.at(rank, step)) is not None:
            found |= {name for name in record.random if expected.random.get(name) != record.random[name]}
            now = record.objects_by_key()
            found |= {
                key
                for key, entry in expected.objects_by_key().items()
                if entry.kind in {"module", "tensor"} and key in now and now[key].digest != entry.digest
            }
    return frozenset(found)


def sorted_by_step(ranks: Mapping[int, RankRecords], offset: int) -> list[tuple[int, int, StepRecord]]:
    """Return all records as (step, rank, record), sorted; `offset` is added to the processes' own step numbers."""
    return sorted(
        ((record.ordinal + offset, rank, record) for rank, records in ranks.items() for record in records),
        key=lambda each: each[:2],
    )
