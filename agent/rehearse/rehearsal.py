"""The rehearsal: a script undisturbed, then with a worker kill, a node kill and a resize, each compared with the first.

Each run ends as soon as enough steps were compared, and not with the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from agent.rehearse.faults import DisturbedRun, RehearsalFault, Rehearsed, TornFile
from agent.rehearse.records import Rank, StepRecord, cut
from agent.rehearse.reference import Difference, Reference, find_unsteady
from agent.rehearse.stage import FIRST_STEP_S, NO_END, STEPS_S, ScriptEnded, Stage, TooLate
from agent.rehearse.step_gate import StepGate

_UNDISTURBED_S = 20.0
"""For how long steps of the undisturbed run are collected at most."""
_ENOUGH_STEPS = 60
_ENOUGH_EPOCHS = 3
_MAX_RESTARTS = 4


class NeverCommits(Exception):  # noqa: N818 - says what is the case
    """The script does not call `state.commit()`."""


class Rehearsal:
    """Runs the jobs of one rehearsal.

    Args:
        server: endpoint of an etcd.
        directory: an empty one for all that the jobs leave.
        command: script and arguments.
        np: number of nodes, of one rank each.
        steps: of the undisturbed run; None: found out.
        say: told what happens.
    """

    def __init__(
        self,
        server: str,
        directory: Path,
        command: Sequence[str],
        np: int,
        steps: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._stage = partial(Stage, server, command=command, np=np)
        self._directory = directory
        self._np = np
        self._steps = steps
        self._say = say

    def run(self) -> Rehearsed:
        """Do all of it.

        Raises:
            ScriptEnded: the script fails undisturbed, or ends without an optimizer step.
            TooLate: it takes no step for a long time.
            NeverCommits: it has a State that is never told of a step.
        """
        self._say(f"undisturbed, {self._np} rank{'s' if self._np > 1 else ''} …")
        reference = Reference(self._undisturbed("undisturbed", self._steps))
        if reference.has_state and _is_never_committed(reference.main[0]):
            raise NeverCommits
        with self._stage(self._directory / "disturbed", max_restarts=_MAX_RESTARTS, gate=StepGate(0, 0, 1)) as stage:
            rehearsed = DisturbedRun(stage, reference, self._np, self._say).run()
        if rehearsed.unsteady is None and any(map(_is_unexplained, rehearsed.differences)):
            self._say("undisturbed once more, to see whether the script repeats itself …")
            last = max(each.step for each in rehearsed.differences)
            again = self._undisturbed("again", min(last + 1, reference.last))
            rehearsed = replace(rehearsed, unsteady=find_unsteady(reference, again))
        at_risk = sorted(rehearsed.read & reference.overwritten)
        return replace(rehearsed, torn=self._tear(at_risk[0], reference)) if at_risk else rehearsed

    def _tear(self, path: str, reference: Reference) -> TornFile | None:
        """Kill the rank that overwrites a file, when it is empty; None if it came to no overwriting."""
        self._say(f"worker killed as it overwrites {path} …")
        gate = StepGate(0, 0, NO_END, torn=path)
        with self._stage(self._directory / "torn", max_restarts=1, gate=gate) as stage:
            try:
                group = stage.wait_for_group(0, self._np, 1, FIRST_STEP_S)
                stage.wait(lambda: stage.has_torn() or None, STEPS_S, f"overwriting of {path}")
                step = len(stage.ranks(group)[0]) + 1
            except (ScriptEnded, TooLate):
                return None
            fault = RehearsalFault(f"worker killed as it overwrites {path}", step)
            history = {line.weights: line.count - 1 for line in stage.ranks(group)[0]}
            try:
                after = stage.wait_for_group(group, self._np, 1, FIRST_STEP_S)
            except (ScriptEnded, TooLate) as failure:
                return TornFile(path, replace(fault, failure=str(failure)))
            return TornFile(path, replace(fault, resumed=reference.find_resumed(stage.ranks(after)[0][0], history)))

    def _undisturbed(self, name: str, steps: int | None) -> dict[int, Rank]:
        gate = StepGate(0, 0, steps or NO_END)
        with self._stage(self._directory / name, max_restarts=0, gate=gate) as stage:
            group = 1
            try:
                group = stage.wait_for_group(0, self._np, 1, FIRST_STEP_S)
                until = time.monotonic() + _UNDISTURBED_S
                if steps is not None:
                    stage.wait_for_steps(group, steps, max(_UNDISTURBED_S, STEPS_S))
                else:
                    stage.wait(
                        lambda: _is_enough(stage, group) or time.monotonic() > until or None, STEPS_S, "steps", 0.3
                    )
            except ScriptEnded as end:
                if end.code != 0 or not stage.ranks(group):
                    raise
            finally:
                if errors := stage.recorder_errors():
                    self._say(f"the recorder failed at times, so something may go unseen: {errors.splitlines()[-1]}")
            return cut(stage.ranks(group))


def _is_never_committed(first: StepRecord) -> bool:
    """Whether all optimizer steps came to be one, as no commit ended it."""
    return not first.late.is_end and bool(first.late.losses or first.late.inputs)


def _is_unexplained(difference: Difference) -> bool:
    """Whether a script that does not repeat itself would look the same."""
    return difference.seen is None and difference.kind in {"loss", "data position", "random state"}


def _is_enough(stage: Stage, group: int) -> bool:
    """Whether there are epochs to be hit in, and with a State a checkpoint to resume from and steps after it."""
    reference = Reference(cut(stage.ranks(group)))
    if reference.last < _ENOUGH_STEPS:
        return False
    epochs = {reference.epoch_of(line.ordinal) for line in reference.main}
    if epochs == {None}:
        return reference.last >= 2 * _ENOUGH_STEPS
    saved = stage.newest_checkpoint() if reference.has_state else 0
    return len(epochs) > _ENOUGH_EPOCHS and saved is not None
