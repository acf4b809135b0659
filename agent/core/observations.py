"""Observations: when a leader first saw the facts that it decides from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from agent.core.cached_records import lost_data
from agent.core.handoff import HandoffProgress, note
from agent.core.hangs import is_due, standing
from agent.core.model import Member, Suspicion
from agent.core.reachability import among_members, partitioned
from agent.core.records import Identity
from agent.core.view import ClusterView


@dataclass(frozen=True)
class Restart:
    """The first view of an agent, if another one had registered under its node id."""

    revision: int
    at: float
    """When it came."""


@dataclass(frozen=True)
class Outage:
    """The end of a time in which etcd may have renewed no lease, so that leases of nodes that live have ended."""

    ended_at: float
    revision: int
    """Of the view at that time."""


@dataclass(frozen=True)
class Observations:
    """When this leader first saw each fact, on its own monotonic clock.

    A new leader has no observations of its predecessor. That only delays its decisions.
    """

    nodes: Mapping[Identity, float] = field(default_factory=dict)
    """Each node that is present, and when it was first seen."""
    group: int | None = None
    """Number of the current group, which agents note also while they do not lead. 0: there is none. None: no view yet.
    """
    group_since: float = 0.0
    """When this leader first saw the current group."""
    waits_since: float | None = None
    """Since when missing nodes could have arrived. Time while the job is paused or etcd is away does not count."""
    not_before: float = float("-inf")
    """When the group appeared, if this agent saw it appear. -inf: the group was in its first view."""
    reported_since: float | None = None
    """Since when there has been an exit report of the group."""
    stalled_since: float | None = None
    """When the hang was confirmed: from then on the group is to be ended. None: no hang."""
    broken_since: float | None = None
    """Since when the group has had a fault: a failure, a lost member, or a hang that is to end it."""
    fault_at: float | None = None
    """When that fault happened, as far as the reports tell, but not before the group appeared."""
    silent_since: tuple[tuple[Identity, float], ...] = ()
    """Each member that another member suspects, and since when it has not answered."""
    partitioned_since: float | None = None
    """Since when there have been members that do not reach each other."""
    still_since: float | None = None
    """Since when the group has made no step, if a node has reported a stall."""
    grows_since: float | None = None
    """Since when there have been enough nodes for a larger group."""
    data_lost_since: float | None = None
    """Since when a node has published cached records, because etcd has lost data."""
    came_since_outage: frozenset[Identity] = frozenset()
    """Each node that has registered since the last outage, whether it is still there or not."""
    outage: Outage | None = None
    """The last outage of etcd, or what may have been one. None: there was none."""
    gone_since: Mapping[Identity, float] = field(default_factory=dict)
    """Each member of the group that is not there, and when this was first seen."""
    restart: Restart | None = None
    """None: this agent is the first one under its node id, as far as it knows."""
    read_at: float | None = None
    """When the last complete read that the view includes was requested."""
    handoff_progress: HandoffProgress = field(default_factory=HandoffProgress)
    """The newest handoff request of this group."""

    @property
    def came_at(self) -> float:
        """When the group appeared, maybe before this agent led. If that was not seen: when the group was first seen."""
        return self.group_since if self.not_before == float("-inf") else self.not_before

    def last_arrival(self, members: Sequence[Member]) -> float:
        """When the last of these members was first seen."""
        return max(self.nodes[member.identity] for member in members)


def follow(seen: Observations, view: ClusterView, now: float) -> Observations:
    """Note when the group appeared. An agent that does not lead needs nothing else of a view in case it leads later."""
    number = _number(view)
    return Observations(group=number, not_before=_not_before(seen, number, now), outage=seen.outage)


def observe(seen: Observations, view: ClusterView, now: float, *, is_back: bool = False) -> Observations:
    """Note what is new in a view. `is_back`: there was no view for a while before this one."""
    here = view.present.keys()
    new = here - seen.nodes.keys()
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
        nodes=seen.nodes if seen.nodes.keys() == here else {who: seen.nodes.get(who, now) for who in here},
        data_lost_since=(seen.data_lost_since or now) if has_lost else None,
        outage=seen.outage,
        gone_since={who: seen.gone_since.get(who, now) for who in _members(view) - here},
        came_since_outage=seen.came_since_outage | _since_outage(seen, view, new) if new else seen.came_since_outage,
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
        partitioned_since=_since(seen.partitioned_since, now - _for_s(suspects), holds=bool(partitioned(view))),
        still_since=_since(before.still_since, now - _still_s(view), holds=_still_s(view) > 0.0),
        grows_since=_since(seen.grows_since, now, holds=view.order.can_grow),
        handoff_progress=note(
            HandoffProgress() if is_new else seen.handoff_progress, view, now, is_back=is_back or is_first
        ),
    )


def _since_outage(seen: Observations, view: ClusterView, new: AbstractSet[Identity]) -> AbstractSet[Identity]:
    """Those of these nodes that have registered since the last outage."""
    if seen.outage is None:
        return new
    return {who for who in new if view.present[who].create_revision > seen.outage.revision}


def _members(view: ClusterView) -> AbstractSet[Identity]:
    return view.group.value.node_ranks.keys() if view.group is not None else frozenset()


def _number(view: ClusterView) -> int:
    return view.group.value.number if view.group is not None else 0


def _not_before(seen: Observations, number: int, now: float) -> float:
    """When the group of this number appeared. -inf: that was not seen."""
    if number == seen.group:
        return seen.not_before
    return float("-inf") if seen.group is None else now


def _since(before: float | None, now: float, *, holds: bool) -> float | None:
    """Since when a condition has held. None: it does not hold."""
    if not holds:
        return None
    return now if before is None else before


def _for_s(suspects: list[Suspicion]) -> float:
    """The longest time without an answer in these reports."""
    return max((each.for_s for each in suspects), default=0.0)


def _still_s(view: ClusterView) -> float:
    """For how long ranks had made no step when that was reported. 0: they make steps."""
    return max((stall.for_s for stall in standing(view.stalls)), default=0.0)


def _fault_at(before: Observations, view: ClusterView, silent: dict[Identity, float], now: float) -> float | None:
    """When the fault of the current group happened. None: it has no fault."""
    group = view.group.value if view.group is not None else None
    lost = set[Identity]()
    if group is not None:
        gone = group.node_ranks.keys() - view.present.keys()
        unfit = {node.identity for node in view.unfit if node.identity in group.node_ranks}
        lost = (gone | unfit) - {report.identity for report in view.exits}
    failed = [report for report in view.exits if report.failure is not None]
    if not (lost or failed or is_due(view.stalls)):
        return None
    times = [now if before.fault_at is None else before.fault_at]
    times += [now - report.after_s for report in failed]
    if is_due(view.stalls) and before.stalled_since is None:
        times.append(now - max(stall.for_s for stall in standing(view.stalls)))
    if before.fault_at is None and before.not_before > float("-inf"):  # otherwise it may be older than the group
        times += [silent[who] for who in lost if who in silent]
    return min(times)
