"""The disturbed run of a rehearsal: one fault after the other, each compared with the undisturbed run.

The first comes where it can show something: in the second epoch, not at an epoch's edge, and where a checkpoint has
been made. What is found after one fault would be found after the next ones too, so those are left out then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from agent.rehearse.comparison import RunComparison, compare, compare_resized
from agent.rehearse.records import Rank, cut
from agent.rehearse.reference import Difference, Reference, find_ignored, find_unsteady
from agent.rehearse.stage import FIRST_STEP_S, STEPS_S, ScriptEnded, Stage, TooLate

_RECOVERY_S = 60.0
_LATEST = 0.75
"""Part of the undisturbed steps after which the first fault leaves too few for the rest."""


@dataclass(frozen=True)
class RehearsalFault:
    """One thing that was done to the job, and what came of it."""

    name: str
    step: int
    """The step at work then."""
    resumed: int | None = None
    """Steps that were not lost; None if the weights it went on with are none of the undisturbed run's."""
    comparison: RunComparison | None = None
    failure: str = ""
    """The script's last words if it could not go on."""

    @property
    def lost(self) -> int:
        """Steps that are to be done again."""
        return self.step - 1 - (self.resumed or 0)


@dataclass(frozen=True)
class TornFile:
    """A kill while the script overwrote, in place, a file that it goes on from."""

    path: str
    fault: RehearsalFault

    @property
    def is_lost(self) -> bool:
        """Whether there was nothing to go on from."""
        return bool(self.fault.failure) or not self.fault.resumed


@dataclass(frozen=True)
class Rehearsed:
    """All that a rehearsal found out."""

    reference: Reference
    faults: tuple[RehearsalFault, ...]
    unsteady: Difference | None
    """Where two undisturbed runs differ already."""
    newest_checkpoint: int | None
    """A State's, when the first fault came."""
    read: frozenset[str] = frozenset()
    """Files in the working directory that restarted ranks read before their first step."""
    torn: TornFile | None = None
    """What came of a kill in the middle of a write; None if no such file is overwritten in place."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What the first fault that brought anything to light did."""
        found = (fault.comparison.differences for fault in self.faults if fault.comparison)
        return next((each for each in found if each), ())


class DisturbedRun:
    """The run with the faults."""

    def __init__(self, stage: Stage, reference: Reference, np: int, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._reference = reference
        self._np = np
        self._say = say
        self._window = max(3, min(20, reference.last // 10))
        self._group = 0
        self._step = 0
        """Where the job is held."""
        self._resumed = 0
        """Steps done before the present group."""
        self._faults: list[RehearsalFault] = []
        self._read: set[str] = set()
        self._history: dict[str, int] = {}
        """Steps done before each of the weights that the job has had."""

    def run(self) -> Rehearsed:
        """Do one thing after the other to the job, until something is found."""
        reference, unsteady, saved = self._reference, None, None
        try:
            before = self._go_to_first_fault()
            unsteady = find_unsteady(reference, before)
            reference.ignored = find_ignored(reference, before)
            saved = self._stage.newest_checkpoint()
            if unsteady is None:
                self._break()
        except (ScriptEnded, TooLate) as failure:
            self._note_failure(failure)
        return Rehearsed(reference, tuple(self._faults), unsteady, saved, frozenset(self._read))

    def _go_to_first_fault(self) -> dict[int, Rank]:
        stage, reference = self._stage, self._reference
        self._group = stage.wait_for_group(0, self._np, 1, FIRST_STEP_S)
        step, stride = first_target(reference), max(1, reference.last // 30)
        while True:
            stage.hold(self._group, step, others=1)
            ranks = stage.wait_for_steps(self._group, step, STEPS_S)
            self._step = step
            saved = stage.newest_checkpoint()
            is_good = not reference.has_state or (saved is not None and is_telling(reference, saved))
            if is_good or step + stride > _LATEST * reference.last:
                return ranks
            step += stride

    def _break(self) -> None:
        np, other = self._np, self._np - 1 if self._np > 1 else 2
        self._suffer("worker killed", self._stage.kill_worker)
        if not self._has_found():
            self._suffer("node lost and replaced", self._stage.lose_node)
        for there, back in ((np, other), (other, np)):
            if not self._has_found():
                self._resize(there, back)

    def _has_found(self) -> bool:
        if not self._reference.has_state:
            return False  # such a script wants to know what each of them costs
        return any(fault.comparison and fault.comparison.differences for fault in self._faults)

    def _suffer(self, name: str, do: Callable[[], None]) -> None:
        self._say(f"{name} at step {self._step} …")
        self._faults.append(RehearsalFault(name, self._step))
        do()
        group = self._stage.wait_for_group(self._group, self._np, 1, _RECOVERY_S)
        resumed, ranks = self._go_on(group)
        if resumed is not None:
            comparison = self._compare(ranks, resumed)
            if comparison.differences and comparison.loss_from is None:
                comparison = self._compare(self._go_to_end(), resumed)
            self._faults[-1] = replace(self._faults[-1], resumed=resumed, comparison=comparison)

    def _compare(self, ranks: dict[int, Rank], resumed: int) -> RunComparison:
        return compare(self._reference, ranks, resumed, is_first_fault=len(self._faults) == 1)

    def _go_to_end(self) -> dict[int, Rank]:
        """As far as can be compared: the loss may show it later, a schedule's at its next change."""
        count = self._reference.last - self._resumed
        self._stage.hold(self._group, count, others=1)
        with suppress(ScriptEnded, TooLate):
            self._stage.wait_for_steps(self._group, count, _RECOVERY_S)
        return cut(self._stage.ranks(self._group))

    def _resize(self, before: int, after: int) -> None:
        self._say(f"resize {before} -> {after} from step {self._step} on …")
        self._faults.append(RehearsalFault(f"resize {before} -> {after}", self._step))
        if after > self._np:
            self._stage.add_node()
        self._stage.scale(after, self._group, others=1)
        old, began_at = self._group, self._resumed
        group = self._stage.wait_for_group(old, after, 1, _RECOVERY_S)
        self._step = began_at + len(self._stage.ranks(old)[0])  # it went on until the change came
        self._faults[-1] = replace(self._faults[-1], step=self._step)
        resumed, ranks = self._go_on(group)
        if resumed is not None:
            comparison = compare_resized(self._reference, ranks, resumed)
            at = max(self._faults[-1].step, resumed + 1)  # a handoff ends after a step
            self._faults[-1] = replace(self._faults[-1], step=at, resumed=resumed, comparison=comparison)

    def _go_on(self, group: int) -> tuple[int | None, dict[int, Rank]]:
        """Let the new group come as far as the old one and a little further; return where it began, and its lines."""
        stage, reference = self._stage, self._reference
        self._remember()
        firsts = [lines[0] for lines in stage.ranks(group).values()]
        self._read.update(path for line in firsts for path in line.read)
        resumed = reference.find_resumed(firsts[0], self._history)
        count = self._window
        if resumed:
            count += max(0, min(self._step, reference.last) - 1 - resumed)
        stage.hold(group, count, others=1)
        try:
            ranks = stage.wait_for_steps(group, count, STEPS_S)
        except ScriptEnded as end:
            if end.code:
                raise
            ranks = cut(stage.ranks(group))
        self._group, self._resumed = group, resumed or 0
        self._step = self._resumed + len(ranks[0])
        return resumed, ranks

    def _remember(self) -> None:
        """Keep what weights the group had that is over now."""
        lines = self._stage.ranks(self._group)[0]
        self._history |= {line.weights: self._resumed + line.count - 1 for line in lines}

    def _note_failure(self, failure: Exception) -> None:
        if not self._faults:
            raise failure
        if isinstance(failure, ScriptEnded) and failure.code == 0:
            self._faults.pop()  # the training was over before it came to that
            return
        self._faults[-1] = replace(self._faults[-1], failure=str(failure))


def first_target(reference: Reference) -> int:
    """The step for the first fault: a third into the second epoch, if there is one."""
    starts: dict[int | None, int] = {}
    for line in reference.main:
        starts.setdefault(reference.epoch_of(line.ordinal), line.ordinal)
    begun = sorted(starts.values())
    by_epoch = begun[1] + (begun[1] - begun[0]) // 3 if len(begun) > 1 else reference.last
    return max(2, by_epoch if by_epoch <= _LATEST * reference.last else int(0.4 * reference.last))


def is_telling(reference: Reference, saved: int) -> bool:
    """Whether a restart from there shows a lost data position and a lost epoch."""
    before, after = reference.epoch_of(saved), reference.epoch_of(saved + 1)
    is_first = after == reference.epoch_of(reference.main[0].ordinal)
    has_epochs = len({reference.epoch_of(line.ordinal) for line in reference.main}) > 1
    return before == after and not (has_epochs and is_first)
