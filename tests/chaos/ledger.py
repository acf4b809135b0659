"""What the ranks of a job wrote of their steps, read from outside, and the rules that it has to keep."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from chaos.training import GLOBAL_BATCH, SAMPLES

STEPS_PER_EPOCH = -(-SAMPLES // GLOBAL_BATCH)
_NAME = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Line:
    """A rank is about to commit a step, or has."""

    t: float
    """Seconds of the machine's boot-time clock, which containers share."""
    group: int
    rank: int
    host: str
    pid: int
    world: int
    step: int
    epoch: int = -1
    samples: tuple[int, ...] = ()
    """None: it is committed."""

    @property
    def is_committed(self) -> bool:
        """Whether it is the second line of its step."""
        return self.epoch < 0


class Ledger:
    """Follows the ranks' files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}
        self.lines: list[Line] = []
        """In the order in which they were seen: of one rank, that of time."""
        self.newest_group = 0
        """Of those that have committed a step."""
        self.newest_step = 0
        """That was committed, or about to be."""

    def follow(self) -> Sequence[Line]:
        """Read on; return what is new."""
        known = len(self.lines)
        with os.scandir(self._directory) as entries:
            # What is put there for a rank may be gone by now.
            ranks = [each for each in entries if _NAME.fullmatch(each.name)]
            grown = [each.name for each in ranks if self._read.get(each.name, 0) < each.stat().st_size]
        for name in grown:
            self.lines += self._new_of(name)
        new = self.lines[known:]
        self.newest_group = max([self.newest_group, *(line.group for line in new if line.is_committed)])
        self.newest_step = max([self.newest_step, *(line.step for line in new)])
        return new

    def _new_of(self, name: str) -> Iterator[Line]:
        group, rank = map(int, name.split("."))
        with (self._directory / name).open("rb") as file:
            file.seek(self._read.get(name, 0))
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        for line in whole.splitlines():
            told = json.loads(line)
            yield Line(**{**told, "samples": tuple(told.get("samples", ()))}, group=group, rank=rank)

    def pids(self) -> dict[int, tuple[str, int]]:
        """Host and process of each rank of the newest group."""
        return {line.rank: (line.host, line.pid) for line in self.lines if line.group == self.newest_group}

    def longest_pause_s(self, since: float, until: float) -> float:
        """Between two commits, of whatever rank and group, in that time."""
        moments = sorted(line.t for line in self.lines if line.is_committed and since <= line.t <= until)
        return max((later - earlier for earlier, later in pairwise([since, *moments, until])), default=0.0)


@dataclass(frozen=True)
class Span:
    """The steps of one group."""

    group: int
    first: int
    """First step that it took."""
    last: int
    """Last step that any of its ranks committed; first - 1: none was."""
    reached: int
    """Last step that any of its ranks was about to commit. Its end can be later than the rank's last word."""
    began: float
    ended: float


def spans(lines: Sequence[Line]) -> list[Span]:
    """Of all groups, in the order of their numbers."""
    by_group: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        by_group[line.group].append(line)
    found = []
    for group, mine in sorted(by_group.items()):
        first = min(line.step for line in mine)
        last = max((line.step for line in mine if line.is_committed), default=first - 1)
        reached = max(line.step for line in mine)
        found.append(Span(group, first, last, reached, min(line.t for line in mine), max(line.t for line in mine)))
    return found


def first_step_after(lines: Sequence[Line], group: int) -> int:
    """With which the next group began that took any."""
    return next(span.first for span in spans(lines) if span.group > group)


def lost_steps(lines: Sequence[Line]) -> dict[int, int]:
    """Steps committed by the groups before that each group had to do again."""
    lost, furthest = {}, 0
    for span in spans(lines):
        lost[span.group] = max(0, furthest - span.first + 1)
        furthest = span.last
    return lost


def lost_after(lines: Sequence[Line], group: int) -> int:
    """Those of all groups after this one."""
    return sum(lost for number, lost in lost_steps(lines).items() if number > group)


def replayed_steps(lines: Sequence[Line]) -> dict[int, int]:
    """Steps that each group repeated of those whose commit a rank of the groups before had at least begun."""
    replayed, reached = {}, 0
    for span in spans(lines):
        replayed[span.group] = max(0, reached - span.first + 1)
        reached = span.reached
    return replayed


def faults_in(lines: Sequence[Line], steps: int) -> list[str]:
    """What breaks the rules; empty if nothing does. `steps` is the number that the result is said to be of."""
    return [*_wrong_ranks(lines), *_wrong_order(lines), *_wrong_steps(lines, steps)]


def _wrong_ranks(lines: Sequence[Line]) -> Iterator[str]:
    """Each rank of a group is one process, all agree on the size of the world, and no rank is missing."""
    who: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
    worlds: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        who[line.group, line.rank].add((line.host, line.pid))
        worlds[line.group].add(line.world)
    for (group, rank), processes in who.items():
        if len(processes) > 1:
            yield f"rank {rank} of group {group} was {sorted(processes)}"
    for group, sizes in worlds.items():
        if len(sizes) > 1:
            yield f"group {group} was of {sorted(sizes)} ranks"


def _wrong_order(lines: Sequence[Line]) -> Iterator[str]:
    """A later group begins later, at a step that the ones before it have reached, and leaves none out."""
    reached, began = 0, 0.0
    for span in spans(lines):
        if span.began < began:
            yield f"group {span.group} took a step before the one ahead of it"
        if span.first > reached + 1:
            yield f"group {span.group} began with step {span.first}, and only {reached} were done"
        reached, began = span.reached, span.began
    newest: dict[str, int] = defaultdict(int)
    for line in sorted(lines, key=lambda line: line.t):
        if line.group < newest[line.host]:
            yield f"{line.host} took a step of group {line.group} after one of group {newest[line.host]}"
        newest[line.host] = max(newest[line.host], line.group)
    for (group, rank), mine in _by_rank(lines).items():
        steps = [line.step for line in mine if line.is_committed]
        if steps != list(range(steps[0], steps[0] + len(steps))) if steps else False:
            yield f"rank {rank} of group {group} committed {steps[:3]}..., not one step after the other"


def _by_rank(lines: Sequence[Line]) -> dict[tuple[int, int], list[Line]]:
    found: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in lines:
        found[line.group, line.rank].append(line)
    return found


def _wrong_steps(lines: Sequence[Line], steps: int) -> Iterator[str]:
    """The steps that made the result took each sample once an epoch: of each, those of the last group that took it."""
    made: dict[int, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if not line.is_committed:
            made[line.step][line.group].append(line)
    missing = set(range(1, steps + 1)) - made.keys()
    if missing:
        yield f"steps {sorted(missing)[:5]} are in no ledger"
    epochs: dict[int, Counter[int]] = defaultdict(Counter)
    for step in sorted(made.keys() - missing):
        if step > steps:
            yield f"step {step} was taken, and the result is of {steps}"
            continue
        taken = made[step][max(made[step])]
        if len(taken) != taken[0].world:
            yield f"step {step} has {len(taken)} of {taken[0].world} ranks in the ledger"
        for line in taken:
            epochs[line.epoch].update(line.samples)
    for epoch, samples in epochs.items():
        if epoch < steps // STEPS_PER_EPOCH and samples != Counter(range(SAMPLES)):
            yield f"epoch {epoch} did not take each sample once: {_unequal(samples)}"


def _unequal(samples: Counter[int]) -> str:
    left_out = [index for index in range(SAMPLES) if not samples[index]]
    twice = [index for index, count in samples.items() if count > 1]
    return f"{left_out[:5]} left out, {twice[:5]} more than once"
