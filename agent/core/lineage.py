"""Lineage: which copy of the training state is used when the history has forked.

A group that was cut off may come back with step 105 while its successor resumed from step 100 and continued. Neither
step numbers nor group numbers show ancestry. So the `restore_point` record of each group names the copy that the group
begins from, and the *lineage*: the cuts back to the committed checkpoint. A cut is the copy of an earlier group that
its successor began from. A copy is on the lineage if its group has a cut there and the copy is not newer than this cut.
All copies of the group that the record belongs to are on the lineage.

A copy is eligible only if the present nodes hold the parts of all its ranks. The newest eligible copy is used. The
committed checkpoint is always eligible. To begin from an older copy would be a rollback, which needs a record of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from agent.core.reasons import CommitRefused
from agent.core.saved_states import Checkpoint, Replica, RestorePoint, StateId


def age(copy: StateId, run: str) -> tuple[bool, int, int, int]:
    """Sort key for copies on one lineage, oldest first. Copies of another run were adopted, so they are the oldest."""
    return copy.run == run, copy.group, copy.step, copy.save


def is_on_lineage(copy: StateId, restore_point: RestorePoint | None, run: str) -> bool:
    """Whether the copy belongs to the history of the group of this record and its successors."""
    if restore_point is None:
        return False
    if copy.run == run and copy.group == restore_point.group:
        return True
    cuts = (cut for cut in restore_point.lineage if (cut.run, cut.group) == (copy.run, copy.group))
    return any(age(copy, run) <= age(cut, run) for cut in cuts)


def as_begun(last: RestorePoint | None, checkpoint: Checkpoint | None) -> RestorePoint | None:
    """The restore point that the last group really began from: another one than in its record if it rolled back."""
    if last is None or checkpoint is None or not checkpoint.is_rollback or checkpoint == last.checkpoint:
        return last
    return msgspec.structs.replace(last, copy=checkpoint.copy, lineage=(checkpoint.copy,), checkpoint=checkpoint)


def choose(
    held: Iterable[Sequence[Replica]], last: RestorePoint | None, checkpoint: Checkpoint | None, run: str
) -> StateId | None:
    """The newest copy that the next group can begin from. None: there is none.

    Args:
        held: the inventory of each present member.
        last: the newest `restore_point` record. Its group is the last one in which a rank can have made a step.
        checkpoint: the committed checkpoint.
        run: the run of the job.
    """
    candidates = [copy for copy in _complete(held) if is_on_lineage(copy, last, run)]
    if checkpoint is not None:
        candidates.append(checkpoint.copy)
    return max(candidates, key=lambda copy: age(copy, run), default=None)


def follow(
    number: int, copy: StateId | None, last: RestorePoint | None, checkpoint: Checkpoint | None, run: str
) -> RestorePoint:
    """Return the `restore_point` record of a group that begins from this copy."""
    cuts: list[StateId] = []
    if copy is not None:
        older = last.lineage if last is not None else ()
        cuts = [cut for cut in older if age(cut, run)[:2] < age(copy, run)[:2]]
        cuts.append(copy)
    if checkpoint is not None:  # no group begins before it
        cuts = [cut for cut in cuts if age(cut, run) >= age(checkpoint.copy, run)]
    return RestorePoint(group=number, copy=copy, lineage=tuple(cuts), checkpoint=checkpoint)


def refusal(
    asked: Checkpoint, committed: Checkpoint | None, restore_point: RestorePoint, run: str
) -> CommitRefused | None:
    """Why a checkpoint must not be committed. None: it may be."""
    copy = asked.copy
    if committed is None:
        is_adopted = copy.run != run and restore_point.copy is None
        return None if is_adopted or is_on_lineage(copy, restore_point, run) else _refused("history", copy)
    if asked.is_rollback:
        return None if age(copy, run) < age(committed.copy, run) else _refused("not older", copy)
    if not is_on_lineage(copy, restore_point, run):
        return _refused("fork", copy)
    if age(copy, run) <= age(committed.copy, run):
        return _refused("committed", committed.copy)
    return None


def _complete(held: Iterable[Sequence[Replica]]) -> list[StateId]:
    """Copies of which the common part and the parts of all ranks are held."""
    pieces: dict[StateId, list[Replica]] = {}
    for each in (one for node in held for one in node):
        pieces.setdefault(each.copy, []).append(each)
    return [copy for copy, found in pieces.items() if _is_complete(found)]


def _is_complete(found: Sequence[Replica]) -> bool:
    ranks = {rank for each in found for rank in each.parts}
    return any(each.has_common for each in found) and ranks >= set(range(found[0].world_size))


def _refused(why: Literal["history", "fork", "not older", "committed"], copy: StateId) -> CommitRefused:
    return CommitRefused(why=why, group=copy.group, step=copy.step, save=copy.save)
