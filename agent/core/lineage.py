"""Which copy of the training's state wins when history has forked.

A group that was cut off may come back with step 105 while its successor resumed from step 100 and trained on.
Comparing steps, or groups, is not ancestry. So each group's `resume` record names the copy that it begins from, and
the *lineage*: the cuts back to the committed checkpoint. A copy is on the lineage if its group began from there and
it is no newer than the cut made in that group. Of the group that the record belongs to, every copy is.

A copy is eligible only if the parts of all ranks of its world are held by somebody present. Among those the newest
wins. The committed checkpoint is always eligible: going below it would be a rollback, which needs a record of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from agent.core.model import Checkpoint, Replica, RestorePoint, StateId


def age(copy: StateId, run: str) -> tuple[bool, int, int, int]:
    """Orders copies that are on one lineage, oldest first. Those of another run were adopted, before all of ours."""
    return copy.run == run, copy.group, copy.step, copy.save


def is_on_lineage(copy: StateId, resume: RestorePoint | None, run: str) -> bool:
    """Whether the copy belongs to the history that the record's group, and what follows it, is made of."""
    if resume is None:
        return False
    if copy.run == run and copy.group == resume.group:
        return True
    cuts = (cut for cut in resume.lineage if (cut.run, cut.group) == (copy.run, copy.group))
    return any(age(copy, run) <= age(cut, run) for cut in cuts)


def as_begun(last: RestorePoint | None, checkpoint: Checkpoint | None) -> RestorePoint | None:
    """The last group's record as it really began: if that needed a rollback, not where it was told to."""
    if last is None or checkpoint is None or not checkpoint.is_rollback or checkpoint == last.checkpoint:
        return last
    return msgspec.structs.replace(last, copy=checkpoint.copy, lineage=(checkpoint.copy,), checkpoint=checkpoint)


def choose(
    held: Iterable[Sequence[Replica]], last: RestorePoint | None, checkpoint: Checkpoint | None, run: str
) -> StateId | None:
    """The newest copy that the next group can begin from; None: there is none.

    Args:
        held: what each member present holds.
        last: the newest `resume` record; its group is the last in which a rank can have taken a step.
        checkpoint: the committed one.
        run: the job's run.
    """
    candidates = [copy for copy in _complete(held) if is_on_lineage(copy, last, run)]
    if checkpoint is not None:
        candidates.append(checkpoint.copy)
    return max(candidates, key=lambda copy: age(copy, run), default=None)


def follow(
    number: int, copy: StateId | None, last: RestorePoint | None, checkpoint: Checkpoint | None, run: str
) -> RestorePoint:
    """The record of a group that begins from this copy."""
    cuts: list[StateId] = []
    if copy is not None:
        older = last.lineage if last is not None else ()
        cuts = [cut for cut in older if age(cut, run)[:2] < age(copy, run)[:2]]
        cuts.append(copy)
    if checkpoint is not None:  # nothing goes back behind it
        cuts = [cut for cut in cuts if age(cut, run) >= age(checkpoint.copy, run)]
    return RestorePoint(group=number, copy=copy, lineage=tuple(cuts), checkpoint=checkpoint)


def may_commit(asked: Checkpoint, committed: Checkpoint | None, resume: RestorePoint, run: str) -> str:
    """Why a checkpoint must not be committed now; empty if it may."""
    copy = asked.copy
    if committed is None:
        is_adopted = copy.run != run and resume.copy is None
        return "" if is_adopted or is_on_lineage(copy, resume, run) else f"{_name(copy)} is not of this job's history"
    if asked.is_rollback:
        return "" if age(copy, run) < age(committed.copy, run) else f"{_name(copy)} is not older than what it replaces"
    if not is_on_lineage(copy, resume, run):
        return f"{_name(copy)} is not of this job's history: it goes on from another copy"
    if age(copy, run) <= age(committed.copy, run):
        return f"{_name(committed.copy)} is committed already"
    return ""


def _complete(held: Iterable[Sequence[Replica]]) -> list[StateId]:
    """Copies of which somebody has the common part, and all ranks' own parts are there."""
    pieces: dict[StateId, list[Replica]] = {}
    for each in (one for node in held for one in node):
        pieces.setdefault(each.copy, []).append(each)
    return [copy for copy, found in pieces.items() if _is_complete(found)]


def _is_complete(found: Sequence[Replica]) -> bool:
    ranks = {rank for each in found for rank in each.parts}
    return any(each.has_common for each in found) and ranks >= set(range(found[0].world_size))


def _name(copy: StateId) -> str:
    save = f", save {copy.save}," if copy.save else ""
    return f"step {copy.step}{save} of group {copy.group}"
