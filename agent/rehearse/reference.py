"""The undisturbed run of a script, which all others are compared with, and whether the script repeats itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from agent.rehearse.records import Key, Rank, SeenObject, StepRecord


@dataclass(frozen=True)
class Difference:
    """Something that a restart did not bring back."""

    kind: str
    """model, random state, data position, epoch, loss (nothing explains it), or as in `SeenObject`."""
    step: int
    """The first step at which it shows."""
    seen: SeenObject | None = None
    """The object, if it is one."""
    detail: str = ""
    """What more there is to say."""


@dataclass
class Reference:
    """The undisturbed run.

    Args:
        ranks: its lines by rank.
    """

    ranks: Mapping[int, Rank]
    ignored: frozenset[str | Key] = field(default=frozenset())
    """Global random states, modules and tensors that differ between two undisturbed runs.

    Nothing hangs on them, or it would have shown.
    """

    def __post_init__(self) -> None:
        self._by_step = {rank: {line.ordinal: line for line in lines} for rank, lines in self.ranks.items()}
        self.last = min(lines[-1].ordinal for lines in self.ranks.values())
        self.has_state = self.main[0].step is not None

    @property
    def main(self) -> Rank:
        """Rank 0's lines."""
        return self.ranks[0]

    def at(self, rank: int, step: int) -> StepRecord | None:
        """One step of one rank."""
        return self._by_step.get(rank, {}).get(step)

    def all_at(self, step: int) -> list[StepRecord]:
        """One step of all ranks."""
        return [line for rank in self.ranks if (line := self.at(rank, step)) is not None]

    def epoch_of(self, step: int) -> int | None:
        """The epoch of a step, by the State's count or else the script's own."""
        line = self.at(0, step)
        if line is None:
            return None
        counts_epochs = any(each.state_epoch for each in self.main)
        return line.state_epoch if counts_epochs else line.epoch

    def random_in_use(self) -> frozenset[str]:
        """Global random states that training draws from."""
        used = {
            name
            for lines in self.ranks.values()
            for before, after in pairwise(lines)
            for name in after.random
            if before.random.get(name) != after.random[name]
        }
        return frozenset(used) - self.ignored

    @cached_property
    def changing(self) -> frozenset[Key]:
        """The variables whose tensors training changes in place."""
        return frozenset(
            key
            for lines in self.ranks.values()
            for before, after in pairwise([line.keyed() for line in lines])
            for key, seen in after.items()
            if seen.is_old and key in before and before[key].mark != seen.mark
        )

    @property
    def overwritten(self) -> frozenset[str]:
        """Files in the working directory that the script overwrote in place."""
        return frozenset(path for lines in self.ranks.values() for path in lines[-1].overwritten)

    def is_watched(self, key: Key, seen: SeenObject) -> bool:
        """Whether it counts that an object has another state."""
        return key not in self.ignored and (seen.kind != "tensor" or key in self.changing)

    def what_is_drawn(self) -> list[str]:
        """What training draws random numbers from: global random states, and the script's own generators."""
        marks: dict[str, set[str]] = {}
        for line in self.main:
            for seen in line.objects:
                if seen.kind == "generator":
                    marks.setdefault(seen.name or seen.type, set()).add(seen.mark)
        return sorted(self.random_in_use() | {name for name, found in marks.items() if len(found) > 1})

    def find_resumed(self, line: StepRecord, history: Mapping[str, int]) -> int | None:
        """After how many steps a group went on, by its first line; None if nobody ever had its weights.

        Args:
            line: the first of a group.
            history: for weights that the disturbed job itself has had, the steps before. They differ from this run's
                by rounding once the world has changed.
        """
        if line.step is not None:
            return line.step - 1
        same = [each for each in self.main if each.weights == line.weights]
        best = [each for each in same if each.inputs == line.inputs] or same
        return best[-1].ordinal - 1 if best else history.get(line.weights)


def find_unsteady(reference: Reference, ranks: Mapping[int, Rank]) -> Difference | None:
    """Compare a second undisturbed run; return the first difference in what it computes."""
    for step, rank, line in in_order(ranks, 0):
        known = reference.at(rank, step)
        if known is None:
            continue
        for name, what in (("inputs", "the inputs of the model"), ("weights", "the weights"), ("losses", "the loss")):
            if getattr(known, name) != getattr(line, name):
                return Difference("not deterministic", step, detail=what)
    return None


def find_ignored(reference: Reference, ranks: Mapping[int, Rank]) -> frozenset[str | Key]:
    """Global random states, modules and tensors in which a second undisturbed run differs."""
    found: set[str | Key] = set()
    for step, rank, line in in_order(ranks, 0):
        if (known := reference.at(rank, step)) is not None:
            found |= {name for name in line.random if known.random.get(name) != line.random[name]}
            now = line.keyed()
            found |= {
                key
                for key, seen in known.keyed().items()
                if seen.kind in {"module", "tensor"} and key in now and now[key].mark != seen.mark
            }
    return frozenset(found)


def in_order(ranks: Mapping[int, Rank], offset: int) -> list[tuple[int, int, StepRecord]]:
    """All lines as (step, rank, line); `offset` is what the processes do not know of the step's number."""
    return sorted(
        ((line.ordinal + offset, rank, line) for rank, lines in ranks.items() for line in lines),
        key=lambda each: each[:2],
    )
