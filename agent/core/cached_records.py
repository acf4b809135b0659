"""What agents remember of a job, so that etcd may lose its data (wiped, or restored from an old backup).

Each agent keeps the newest spec, group, resume record and checkpoint that it has seen. When etcd shows less than that,
data was lost. The agent then says what it knows in its own node record, and its workers go on by what it remembers,
not by what etcd shows. The leader waits for one lease length, so that all who know something can say so, takes the
newest of each, and writes them in one transaction: the running group as it was if all of its members are back, else
the one that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from agent.core.model import CachedRecords, Checkpoint, ClusterView, Group, Record, RestorePoint, Stored

R = TypeVar("R", bound=Record)


def has_lost_data(known: CachedRecords | None, view: ClusterView) -> bool:
    """Whether etcd shows less than was seen before. A job that was started over has a higher group number."""
    if known is None:
        return False
    if view.spec is None or _number(view.group) < known.number:
        return True
    if view.spec.value.run != known.spec.run:
        return False
    shown = (view.spec.value.revision, _resume_number(_value(view.resume)), _count(_value(view.checkpoint)))
    return any(a < b for a, b in zip(shown, _rank(known), strict=True))


def remember(known: CachedRecords | None, view: ClusterView) -> CachedRecords | None:
    """What is known once this view has been seen."""
    shown = _shown(view)
    return known if not shown or has_lost_data(known, view) else shown[0]


def lost_data(view: ClusterView) -> CachedRecords | None:
    """The newest of what the nodes remember; None if etcd shows all of it (again)."""
    told = [node.value.known for node in view.nodes if node.value.known is not None]
    if not told:
        return None
    last = max(told, key=lambda known: known.number)
    told += _shown(view)  # a write that was under way may have landed in what an old backup brought back
    same_run = [known for known in told if known.spec.run == last.spec.run]
    known = CachedRecords(
        spec=max((known.spec for known in same_run), key=lambda spec: spec.revision),
        group=max(same_run, key=lambda known: known.number).group,
        resume=_newest((known.resume for known in same_run), _resume_number),
        checkpoint=_newest((known.checkpoint for known in same_run), _count),
    )
    # Nodes go on telling for a moment after it was written: writing again could change a record under its number.
    return known if has_lost_data(known, view) else None


def _shown(view: ClusterView) -> list[CachedRecords]:
    """What a view shows: one, or nothing, if the records are not of one run.

    A follower may see one of two records that were written together before the other.
    """
    if view.spec is None or (view.group is not None and view.group.value.run != view.spec.value.run):
        return []
    shown = CachedRecords(
        spec=view.spec.value,
        group=_value(view.group),
        resume=_value(view.resume),
        checkpoint=_value(view.checkpoint),
    )
    return [shown]


def _rank(known: CachedRecords) -> tuple[int, int, int]:
    return known.spec.revision, _resume_number(known.resume), _count(known.checkpoint)


def _number(group: Stored[Group] | None) -> int:
    return group.value.number if group is not None else 0


def _resume_number(resume: RestorePoint | None) -> int:
    return resume.group if resume is not None else 0


def _count(checkpoint: Checkpoint | None) -> int:
    return checkpoint.number if checkpoint is not None else 0


def _value(stored: Stored[R] | None) -> R | None:
    return stored.value if stored is not None else None


def _newest(records: Iterable[R | None], order: Callable[[R], int]) -> R | None:
    return max((record for record in records if record is not None), key=order, default=None)
