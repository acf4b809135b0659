"""The records that agents cache, so that a job survives when etcd loses its data.

Etcd may be wiped, or restored from an old backup. Each agent keeps the newest spec, group, restore point and checkpoint
that it has seen. If etcd shows less than that, data was lost. The agent then publishes its cached records in its own
node record, and its workers follow the cached records, not those in etcd. The leader waits for one lease length, so
that all agents can publish theirs, takes the newest of each, and writes them in one transaction: the running group as
it was if all of its members are back, else the group that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from agent.core.model import CachedRecords, Group
from agent.core.records import Record, Stored
from agent.core.saved_states import Checkpoint, RestorePoint
from agent.core.view import ClusterView

R = TypeVar("R", bound=Record)


def has_lost_data(cached: CachedRecords | None, view: ClusterView) -> bool:
    """Whether etcd shows less than was seen before. After a fresh start the group number is higher, so not then."""
    if cached is None:
        return False
    if view.spec is None or _number(view.group) < cached.number:
        return True
    if view.spec.value.run != cached.spec.run:
        return False
    shown = (
        view.spec.value.revision,
        _restore_point_number(_value(view.restore_point)),
        _count(_value(view.checkpoint)),
    )
    return any(a < b for a, b in zip(shown, _rank(cached), strict=True))


def remember(cached: CachedRecords | None, view: ClusterView) -> CachedRecords | None:
    """The cached records after this view."""
    shown = _shown(view)
    return cached if not shown or has_lost_data(cached, view) else shown[0]


def lost_data(view: ClusterView) -> CachedRecords | None:
    """The newest of the records that nodes have cached. None: etcd shows all of them (again)."""
    published = [*view.cached]
    if not published:
        return None
    last = max(published, key=lambda cached: cached.number)
    published += _shown(view)  # a write that was under way may have landed in what an old backup brought back
    same_run = [cached for cached in published if cached.spec.run == last.spec.run]
    cached = CachedRecords(
        spec=max((cached.spec for cached in same_run), key=lambda spec: spec.revision),
        group=max(same_run, key=lambda cached: cached.number).group,
        restore_point=_newest((cached.restore_point for cached in same_run), _restore_point_number),
        checkpoint=_newest((cached.checkpoint for cached in same_run), _count),
    )
    # Nodes publish their records for a moment after these were restored: to restore again could change a record under
    # its number.
    return cached if has_lost_data(cached, view) else None


def _shown(view: ClusterView) -> list[CachedRecords]:
    """The records in a view: one entry, or none if there is no spec."""
    if view.spec is None:
        return []
    shown = CachedRecords(
        spec=view.spec.value,
        group=_value(view.group),
        restore_point=_value(view.restore_point),
        checkpoint=_value(view.checkpoint),
    )
    return [shown]


def _rank(cached: CachedRecords) -> tuple[int, int, int]:
    return cached.spec.revision, _restore_point_number(cached.restore_point), _count(cached.checkpoint)


def _number(group: Stored[Group] | None) -> int:
    return group.value.number if group is not None else 0


def _restore_point_number(restore_point: RestorePoint | None) -> int:
    return restore_point.group if restore_point is not None else 0


def _count(checkpoint: Checkpoint | None) -> int:
    return checkpoint.number if checkpoint is not None else 0


def _value(stored: Stored[R] | None) -> R | None:
    return stored.value if stored is not None else None


def _newest(records: Iterable[R | None], order: Callable[[R], int]) -> R | None:
    return max((record for record in records if record is not None), key=order, default=None)
