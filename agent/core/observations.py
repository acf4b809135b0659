"""When a leader first saw what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agent.core.cached_records import lost_data
from agent.core.handoff import HandoffProgress, note
from agent.core.hangs import is_due, standing
from agent.core.model import ClusterView, Identity, Member, Suspicion
from agent.core.rank_order import can_grow
from agent.core.reachability import among_members, parted


@dataclass(frozen=True)
class Observations:
    """When this leader first saw what it sees, on its own monotonic clock. Lost with the leader; that only delays."""

    nodes: tuple[tuple[Identity, float], ...] = ()
    group: int | None = None
    """The number of the current one, seen also by one that does not lead; 0: there is none. None: nothing was seen."""
    group_since: float = 0.0
    waits_since: float | None = None
    """Since when nodes could have come that are waited for: not while the job is paused, or etcd away."""
    not_before: float = float("-inf")
    """The group was not there before, if it was seen to come."""
    reported_since: float | None = None
    stalled_since: float | None = None
    """Since when the group has stood still for too long."""
    broken_since: float | None = None
    """Since when something is wrong with the group: a failure, a lost member, or that."""
    fault_at: float | None = None
    """When that happened, by what was told of it; not before the group."""
    silent_since: tuple[tuple[Identity, float], ...] = ()
    """Since when a member that another one suspects has not been heard."""
    parted_since: float | None = None
    """Since when members have not heard each other."""
    still_since: float | None = None
    """Since when the group has made no step, if that is suspicious."""
    grows_since: float | None = None
    """Since when there have been nodes for a larger group."""
    known_since: float | None = None
    """Since when a node has been telling of lost data."""
    ever: tuple[Identity, ...] = ()
    """All who were seen, in the order of their first view."""
    outage_ended_at: float | None = None
    read_at: float | None = None
    """When the last reading of everything was asked for that the view includes."""
    wish: HandoffProgress = field(default_factory=HandoffProgress)
    """For a handoff of this group."""

    @property
    def came_at(self) -> float:
        """When the group was seen to come, maybe before this one led; else when it was seen first."""
        return self.group_since if self.not_before == float("-inf") else self.not_before

    def last_arrival(self, members: Sequence[Member]) -> float:
        """When the youngest of these was first seen."""
        since = dict(self.nodes)
        return max(since[member.identity] for member in members)


def follow(seen: Observations, view: ClusterView, now: float) -> Observations:
    """Note what one that does not lead must know of a view, should it lead later: when the group came."""
    number = _number(view)
    return Observations(group=number, not_before=_not_before(seen, number, now))


def observe(seen: Observations, view: ClusterView, now: float, *, is_back: bool = False) -> Observations:
    """Note what is new in a view; `is_back`: nothing could be seen for a while before it."""
    since = dict(seen.nodes)
    here = [node.value.identity for node in view.nodes]
    has_lost = lost_data(view) is not None
    number = _number(view)
    is_first = not seen.nodes
    is_new = number != seen.group or is_first
    is_paused = view.spec is not None and bool(view.spec.value.paused_by)
    was_silent = dict(seen.silent_since)
    suspects = among_members(view)
    silent = {each.identity: was_silent.get(each.identity, now - each.for_s) for each in suspects}
    not_before = _not_before(seen, number, now)
    before = replace(seen, stalled_since=None, still_since=None, broken_since=None, fault_at=None) if is_new else seen
    before = replace(before, not_before=not_before)
    fault_at = _fault_at(before, view, silent, now)
    return Observations(
        nodes=tuple((who, since.get(who, now)) for who in here),
        known_since=(seen.known_since or now) if has_lost else None,
        ever=tuple(dict.fromkeys((*seen.ever, *here))),
        read_at=seen.read_at,
        group=number,
        group_since=now if is_new else seen.group_since,
        waits_since=_since(None if is_new or is_back else seen.waits_since, now, holds=not is_paused),
        not_before=not_before,
        reported_since=None if not view.exits else (None if is_new else seen.reported_since) or now,
        stalled_since=_since(before.stalled_since, now, holds=is_due(view.stalls)),
        broken_since=_since(before.broken_since, now, holds=fault_at is not None),
        fault_at=None if fault_at is None else max(fault_at, not_before),
        silent_since=tuple(silent.items()),
        parted_since=_since(seen.parted_since, now - _for_s(suspects), holds=bool(parted(view))),
        still_since=_since(before.still_since, now - _still_s(view), holds=_still_s(view) > 0.0),
        grows_since=_since(seen.grows_since, now, holds=can_grow(view)),
        wish=note(HandoffProgress() if is_new else seen.wish, view, now, is_back=is_back or is_first),
    )


def _number(view: ClusterView) -> int:
    return view.group.value.number if view.group is not None else 0


def _not_before(seen: Observations, number: int, now: float) -> float:
    """When the group of this number was seen to come."""
    if number == seen.group:
        return seen.not_before
    return float("-inf") if seen.group is None else now


def _since(before: float | None, now: float, *, holds: bool) -> float | None:
    """Since when something holds."""
    if not holds:
        return None
    return now if before is None else before


def _for_s(suspects: list[Suspicion]) -> float:
    """How long one of these had not been heard when that was told."""
    return max((each.for_s for each in suspects), default=0.0)


def _still_s(view: ClusterView) -> float:
    """For how long ranks had made no step when that was told; 0: they make steps."""
    return max((stall.for_s for stall in standing(view.stalls)), default=0.0)


def _fault_at(before: Observations, view: ClusterView, silent: dict[Identity, float], now: float) -> float | None:
    """When what is wrong with the current group happened; None: nothing is."""
    group = view.group.value if view.group is not None else None
    here = {node.value.identity for node in view.nodes if not node.value.unfit}
    reported = {report.identity for report in view.exits}
    lost = [m.identity for m in group.members if m.identity not in here | reported] if group is not None else []
    failed = [report for report in view.exits if report.failure is not None]
    if not (lost or failed or is_due(view.stalls)):
        return None
    times = [now if before.fault_at is None else before.fault_at]
    times += [now - report.after_s for report in failed]
    if is_due(view.stalls) and before.stalled_since is None:
        times.append(now - max(stall.for_s for stall in standing(view.stalls)))
    if before.fault_at is None and before.not_before > float("-inf"):  # else they may have been silent before the group
        times += [silent[who] for who in lost if who in silent]
    return min(times)
