"""The disturbed run of a rehearsal: one fault after the other, each compared with the undisturbed run.

The first fault is injected where it can reveal most: in the second epoch, not at an epoch's edge, and after a
checkpoint. If a problem is found, the following faults are left out, because they would show the same problem.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from agent.rehearse.comparison import RunComparison, compare, compare_resized
from agent.rehearse.job import FIRST_STEP_S, STEPS_S, RehearsedJob, ScriptEnded, WaitTimeout
from agent.rehearse.records import RankRecords, trim_to_common
from agent.rehearse.reference import Difference, Reference, find_ignored, find_nondeterminism

_RECOVERY_S = 60.0
_LATEST_FAULT = 0.75
"""Fraction of the undisturbed steps; a later first fault would leave too few steps for the other faults."""


@dataclass(frozen=True)
class RehearsalFault:
    """A fault and its outcome."""

    name: str
    step: int
    """The step that it interrupted."""
    resumed: int | None = None
    """The step after which the job resumed; None if its weights are not those of any earlier step."""
    comparison: RunComparison | None = None
    failure: str = ""
    """The script's last output if it could not continue; empty if it could."""

    @property
    def replayed_steps(self) -> int:
        """Number of steps that are replayed."""
        return self.step - 1 - (self.resumed or 0)


@dataclass(frozen=True)
class OverwriteKill:
    """A kill while the script overwrote, in place, the file from which it resumes."""

    path: str
    fault: RehearsalFault

    @property
    def is_lost(self) -> bool:
        """Whether nothing was left to resume from."""
        return bool(self.fault.failure) or not self.fault.resumed


@dataclass(frozen=True)
class RehearsalResult:
    """All findings of a rehearsal."""

    reference: Reference
    faults: tuple[RehearsalFault, ...]
    nondeterminism: Difference | None
    """The first difference between two undisturbed runs; None if there is none."""
    newest_checkpoint: int | None
    """Step of the newest checkpoint of a State at the first fault."""
    read: frozenset[str] = frozenset()
    """Files in the working directory that restarted ranks had read before their first step."""
    overwrite_kill: OverwriteKill | None = None
    """The outcome of a kill in the middle of a write; None if no file in `read` is overwritten in place."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences after the first fault that caused any."""
        found = (fault.comparison.differences for fault in self.faults if fault.comparison)
        return next((each for each in found if each), ())


class DisturbedRun:
    """The run into which faults are injected.

    Args:
        job: the started job.
        reference: the undisturbed run.
        np: number of nodes, of one rank each.
        announce: prints a line of progress.
    """

    def __init__(self, job: RehearsedJob, reference: Reference, np: int, announce: Callable[[str], None]) -> None:
        self._job = job
        self._reference = reference
        self._np = np
        self._announce = announce
        self._compared_steps = max(3, min(20, reference.last // 10))
        self._group = 0
        self._step = 0
        """The step at which the job is held."""
        self._resumed = 0
        """Steps before the current group."""
        self._faults: list[RehearsalFault] = []
        self._read: set[str] = set()
        self._history: dict[str, int] = {}
        """Maps the hash of weights that the job has had to the number of steps before."""

    def run(self) -> RehearsalResult:
        """Inject one fault after the other until a difference is found."""
        reference, nondeterminism, saved = self._reference, None, None
        try:
            before = self._run_to_first_fault()
            nondeterminism = find_nondeterminism(reference, before)
            reference.ignored = find_ignored(reference, before)
            saved = self._job.newest_checkpoint()
            if nondeterminism is None:
                self._inject_faults()
        except (ScriptEnded, WaitTimeout) as failure:
            self._note_failure(failure)
        return RehearsalResult(reference, tuple(self._faults), nondeterminism, saved, frozenset(self._read))

    def _run_to_first_fault(self) -> dict[int, RankRecords]:
        job, reference = self._job, self._reference
        self._group = job.wait_for_group(0, self._np, 1, FIRST_STEP_S)
        step, stride = first_fault_step(reference), max(1, reference.last // 30)
        while True:
            job.hold(self._group, step, others=1)
            ranks = job.wait_for_steps(self._group, step, STEPS_S)
            self._step = step
            saved = job.newest_checkpoint()
            is_good = not reference.has_state or (saved is not None and reveals_lost_position(reference, saved))
            if is_good or step + stride > _LATEST_FAULT * reference.last:
                return ranks
            step += stride

    def _inject_faults(self) -> None:
        np, other = self._np, self._np - 1 if self._np > 1 else 2
        self._inject("worker killed", self._job.kill_worker)
        if not self._has_found_difference():
            self._inject("node lost and replaced", self._job.replace_node)
        for there, back in ((np, other), (other, np)):
            if not self._has_found_difference():
                self._resize(there, back)

    def _has_found_difference(self) -> bool:
        if not self._reference.has_state:
            return False  # for such a script the report has the cost of each fault
        return any(fault.comparison and fault.comparison.differences for fault in self._faults)

    def _inject(self, name: str, do: Callable[[], None]) -> None:
        self._announce(f"{name} at step {self._step} …")
        self._faults.append(RehearsalFault(name, self._step))
        do()
        group = self._job.wait_for_group(self._group, self._np, 1, _RECOVERY_S)
        resumed, ranks = self._follow_next_group(group)
        if resumed is not None:
            comparison = self._compare(ranks, resumed)
            if comparison.differences and comparison.loss_from is None:
                comparison = self._compare(self._run_to_end(), resumed)
            self._faults[-1] = replace(self._faults[-1], resumed=resumed, comparison=comparison)

    def _compare(self, ranks: dict[int, RankRecords], resumed: int) -> RunComparison:
        return compare(self._reference, ranks, resumed, is_first_fault=len(self._faults) == 1)

    def _run_to_end(self) -> dict[int, RankRecords]:
        """Continue as far as can be compared: the loss may show a schedule's difference only at its next change."""
        count = self._reference.last - self._resumed
        self._job.hold(self._group, count, others=1)
        with suppress(ScriptEnded, WaitTimeout):
            self._job.wait_for_steps(self._group, count, _RECOVERY_S)
        return trim_to_common(self._job.ranks(self._group))

    def _resize(self, before: int, after: int) -> None:
        self._announce(f"resize {before} -> {after} from step {self._step} on …")
        self._faults.append(RehearsalFault(f"resize {before} -> {after}", self._step))
        if after > self._np:
            self._job.add_node()
        self._job.scale(after, self._group, others=1)
        old, began_at = self._group, self._resumed
        group = self._job.wait_for_group(old, after, 1, _RECOVERY_S)
        self._step = began_at + len(self._job.ranks(old)[0])  # it continued until the change
        self._faults[-1] = replace(self._faults[-1], step=self._step)
        resumed, ranks = self._follow_next_group(group)
        if resumed is not None:
            comparison = compare_resized(self._reference, ranks, resumed)
            at = max(self._faults[-1].step, resumed + 1)  # a handoff is after a step
            self._faults[-1] = replace(self._faults[-1], step=at, resumed=resumed, comparison=comparison)

    def _follow_next_group(self, group: int) -> tuple[int | None, dict[int, RankRecords]]:
        """Let the new group run past the last step of the old one.

        Returns:
            The step after which it resumed (None: unknown), and its records.
        """
        job, reference = self._job, self._reference
        self._remember_weights()
        firsts = [records[0] for records in job.ranks(group).values()]
        self._read.update(path for record in firsts for path in record.read)
        resumed = reference.find_resumed_step(firsts[0], self._history)
        count = self._compared_steps
        if resumed:
            count += max(0, min(self._step, reference.last) - 1 - resumed)
        job.hold(group, count, others=1)
        try:
            ranks = job.wait_for_steps(group, count, STEPS_S)
        except ScriptEnded as end:
            if end.code:
                raise
            ranks = trim_to_common(job.ranks(group))
        self._group, self._resumed = group, resumed or 0
        self._step = self._resumed + len(ranks[0])
        return resumed, ranks

    def _remember_weights(self) -> None:
        """Remember the weights that the previous group had."""
        records = self._job.ranks(self._group)[0]
        self._history |= {record.weights: self._resumed + record.count - 1 for record in records}

    def _note_failure(self, failure: Exception) -> None:
        if not self._faults:
            raise failure
        if isinstance(failure, ScriptEnded) and failure.code == 0:
            self._faults.pop()  # the training was complete before this fault
            return
        self._faults[-1] = replace(self._faults[-1], failure=str(failure))


def first_fault_step(reference: Reference) -> int:
    """Return the step for the first fault: a third into the second epoch, if there is one."""
    starts: dict[int | None, int] = {}
    for record in reference.rank0:
        starts.setdefault(reference.epoch_of(record.ordinal), record.ordinal)
    begun = sorted(starts.values())
    by_epoch = begun[1] + (begun[1] - begun[0]) // 3 if len(begun) > 1 else reference.last
    return max(2, by_epoch if by_epoch <= _LATEST_FAULT * reference.last else int(0.4 * reference.last))


def reveals_lost_position(reference: Reference, saved: int) -> bool:
    """Return whether a restart from the checkpoint of step `saved` would show a lost data position and epoch."""
    before, after = reference.epoch_of(saved), reference.epoch_of(saved + 1)
    is_first = after == reference.epoch_of(reference.rank0[0].ordinal)
    has_epochs = len({reference.epoch_of(record.ordinal) for record in reference.rank0}) > 1
    return before == after and not (has_epochs and is_first)
