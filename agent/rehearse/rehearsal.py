"""The rehearsal: an undisturbed run of a script, and a run with a worker kill, a node kill and resizes to compare.

Each run ends as soon as enough steps were compared, not at the end of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from agent.rehearse.faults import DisturbedRun, OverwriteKill, RehearsalFault, RehearsalResult
from agent.rehearse.job import FIRST_STEP_S, NO_LIMIT, STEPS_S, RehearsedJob, ScriptEnded, WaitTimeout
from agent.rehearse.records import RankRecords, StepRecord, trim_to_common
from agent.rehearse.reference import Difference, Reference, find_nondeterminism
from agent.rehearse.step_gate import StepGate

_UNDISTURBED_S = 20.0
"""Maximum time of the undisturbed run."""
_ENOUGH_STEPS = 60
_ENOUGH_EPOCHS = 3
_MAX_RESTARTS = 4


class NeverCommits(Exception):  # noqa: N818 - the name says what happened
    """The script does not call `state.commit()`."""


class Rehearsal:
    """Runs the jobs of one rehearsal.

    Args:
        server: endpoint of an etcd.
        directory: an empty directory for all files of the jobs.
        command: script and arguments.
        np: number of nodes, of one rank each.
        steps: number of steps of the undisturbed run; None: chosen by the script's epochs.
        announce: prints a line of progress.
    """

    def __init__(
        self,
        server: str,
        directory: Path,
        command: Sequence[str],
        np: int,
        steps: int | None,
        announce: Callable[[str], None],
    ) -> None:
        self._new_job = partial(RehearsedJob, server, command=command, np=np)
        self._directory = directory
        self._np = np
        self._steps = steps
        self._announce = announce

    def run(self) -> RehearsalResult:
        """Run all jobs of the rehearsal and return the findings.

        Raises:
            ScriptEnded: the script fails undisturbed, or ends without an optimizer step.
            WaitTimeout: the script makes no step for a long time.
            NeverCommits: the script has a State and never calls `commit()`.
        """
        self._announce(f"undisturbed, {self._np} rank{'s' if self._np > 1 else ''} …")
        reference = Reference(self._run_undisturbed("undisturbed", self._steps))
        if reference.has_state and _is_never_committed(reference.rank0[0]):
            raise NeverCommits
        with self._new_job(self._directory / "disturbed", max_restarts=_MAX_RESTARTS, gate=StepGate(0, 0, 1)) as job:
            rehearsed = DisturbedRun(job, reference, self._np, self._announce).run()
        if rehearsed.nondeterminism is None and any(map(_is_unexplained, rehearsed.differences)):
            self._announce("undisturbed once more, to see whether the script is deterministic …")
            last = max(each.step for each in rehearsed.differences)
            second_run = self._run_undisturbed("second_run", min(last + 1, reference.last))
            rehearsed = replace(rehearsed, nondeterminism=find_nondeterminism(reference, second_run))
        at_risk = sorted(rehearsed.read & reference.overwritten)
        return replace(rehearsed, overwrite_kill=self._kill_in_write(at_risk[0], reference)) if at_risk else rehearsed

    def _kill_in_write(self, path: str, reference: Reference) -> OverwriteKill | None:
        """Kill a rank while it overwrites a file; None if the file is not overwritten."""
        self._announce(f"worker killed as it overwrites {path} …")
        gate = StepGate(0, 0, NO_LIMIT, kill_on_write=path)
        with self._new_job(self._directory / "kill-in-write", max_restarts=1, gate=gate) as job:
            try:
                group = job.wait_for_group(0, self._np, 1, FIRST_STEP_S)
                job.wait(lambda: job.was_killed_in_write() or None, STEPS_S, f"overwriting of {path}")
                step = len(job.ranks(group)[0]) + 1
            except (ScriptEnded, WaitTimeout):
                return None
            fault = RehearsalFault(f"worker killed as it overwrites {path}", step)
            history = {record.weights: record.count - 1 for record in job.ranks(group)[0]}
            try:
                after = job.wait_for_group(group, self._np, 1, FIRST_STEP_S)
            except (ScriptEnded, WaitTimeout) as failure:
                return OverwriteKill(path, replace(fault, failure=str(failure)))
            return OverwriteKill(
                path, replace(fault, resumed=reference.find_resumed_step(job.ranks(after)[0][0], history))
            )

    def _run_undisturbed(self, name: str, steps: int | None) -> dict[int, RankRecords]:
        gate = StepGate(0, 0, steps or NO_LIMIT)
        with self._new_job(self._directory / name, max_restarts=0, gate=gate) as job:
            group = 1
            try:
                group = job.wait_for_group(0, self._np, 1, FIRST_STEP_S)
                until = time.monotonic() + _UNDISTURBED_S
                if steps is not None:
                    job.wait_for_steps(group, steps, max(_UNDISTURBED_S, STEPS_S))
                else:
                    job.wait(
                        lambda: _has_enough_steps(job, group) or time.monotonic() > until or None, STEPS_S, "steps", 0.3
                    )
            except ScriptEnded as end:
                if end.code != 0 or not job.ranks(group):
                    raise
            finally:
                if errors := job.recorder_errors():
                    self._announce(
                        f"the recorder had errors, so problems may be missed; the last error: {errors.splitlines()[-1]}"
                    )
            return trim_to_common(job.ranks(group))


def _is_never_committed(first: StepRecord) -> bool:
    """Return whether all optimizer steps were recorded as one step, because no commit ended it."""
    return not first.late.is_complete and bool(first.late.losses or first.late.inputs)


def _is_unexplained(difference: Difference) -> bool:
    """Return whether a script that is not deterministic would show the same difference."""
    return difference.object is None and difference.kind in {"loss", "data position", "random state"}


def _has_enough_steps(job: RehearsedJob, group: int) -> bool:
    """Return whether there are enough steps and epochs to inject faults and, with a State, a checkpoint."""
    reference = Reference(trim_to_common(job.ranks(group)))
    if reference.last < _ENOUGH_STEPS:
        return False
    epochs = {reference.epoch_of(record.ordinal) for record in reference.rank0}
    if epochs == {None}:
        return reference.last >= 2 * _ENOUGH_STEPS
    saved = job.newest_checkpoint() if reference.has_state else 0
    return len(epochs) > _ENOUGH_EPOCHS and saved is not None
