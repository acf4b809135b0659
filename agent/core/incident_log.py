"""Incidents: drafted with the group that they made, and completed from what its members tell.

What is lost to one lasts from the fault to the first step of the slowest rank; the steps done again come on top. A
group that never came so far was lost as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from agent.core.budget import highest_step
from agent.core.causes import in_order, with_late
from agent.core.handoff import can_hand_off
from agent.core.incident import Incident, IncidentMember, Phases, Totals, TransitionReport
from agent.core.model import ClusterView, ExitReport, Group, RestorePoint, Result
from agent.core.observations import Observations
from agent.core.totals import summary, training_since


def open_incident(
    group: Group, view: ClusterView, reports: Sequence[ExitReport], seen: Observations, now: float
) -> Incident:
    """What is known as the group is written. `at` and `began_at` are left to who knows the wall clock.

    Args:
        group: that is to be written.
        view: in which it follows the one before.
        reports: of the one before, hangs included.
        seen: when the leader saw what.
        now: monotonic, in seconds.
    """
    ended = in_order(reports)
    last = _last(view)
    fault_at = min(max(_fault_at(view, seen, now), _trained_at(last, view, seen)), now)
    known_at = fault_at if seen.broken_since is None else max(fault_at, seen.broken_since)
    phases = Phases(detect_s=known_at - fault_at, agree_s=now - known_at)
    is_same_run = last is not None and last.run == group.run
    return Incident(
        run=group.run,
        group=group.number,
        cause=group.cause,
        reason=group.reason,
        began_at=training_since(last) if last is not None and is_same_run else 0.0,
        members=tuple(IncidentMember(node_id=member.node_id, nproc=member.nproc) for member in group.members),
        ended=ended,
        phases=phases,
        step_s=max((report.step_s for report in reports), default=last.step_s if last is not None else 0.0),
        before=_so_far(last, view, fault_at - seen.group_since) if last is not None and is_same_run else Totals(),
    )


def stamp(incident: Incident, wall: float) -> Incident:
    """With the time at which it is written; that of a run's first incident is when the run began."""
    return msgspec.structs.replace(incident, at=wall, began_at=incident.began_at or wall)


def sum_up(result: Result, view: ClusterView, wall: float) -> Result:
    """A result with what the run's incidents have cost."""
    last = _last(view)
    if last is None or last.run != result.run:
        return msgspec.structs.replace(result, at=wall)
    told = summary(
        last.totals,
        training_since(last),
        wall,
        has_failed=result.state == "failed",
        commits=view.group is not None and highest_step(view.group.value, view.exits) > 0,
    )
    return msgspec.structs.replace(result, at=wall, summary=told)


def _last(view: ClusterView) -> Incident | None:
    """The one that made the current group, with all that is known of it by now."""
    incident = view.incident.value if view.incident is not None else None
    group = view.group.value if view.group is not None else None
    if incident is None or group is None or incident.group != group.number:
        return incident
    return (
        complete(incident, group, view.resume.value if view.resume is not None else None, view.transitions) or incident
    )


def _trained_at(last: Incident | None, view: ClusterView, seen: Observations) -> float:
    """Until when all that was lost is counted to the last incident, on the leader's clock, if it saw the group come."""
    if last is None or view.group is None or last.group != view.group.value.number:
        return float("-inf")
    return seen.not_before + last.phases.after_s


def _fault_at(view: ClusterView, seen: Observations, now: float) -> float:
    """When it happened, on the leader's clock."""
    if view.group is None or not view.group.value.members:
        return seen.group_since  # since then nobody has trained
    if seen.fault_at is not None:
        return seen.fault_at
    stopped_at = seen.wish.fulfilled_since
    return now if stopped_at is None else stopped_at


def _so_far(last: Incident, view: ClusterView, ran_s: float) -> Totals:
    """What the run has lost by now."""
    group = view.group.value if view.group is not None else None
    if group is None or last.group != group.number:
        return last.totals
    totals = last.totals
    if last.phases.is_complete or not group.members or not can_hand_off(group, view):
        return totals
    return msgspec.structs.replace(totals, lost_s=totals.lost_s + max(0.0, ran_s - last.phases.after_s))


def complete(
    incident: Incident, group: Group, resume: RestorePoint | None, accounts: Sequence[TransitionReport]
) -> Incident | None:
    """What is known by now of the incident that made this group; None: no more than it says."""
    by = {account.identity: account for account in accounts}
    told = [by[member.identity] for member in group.members if member.identity in by]
    if not told or len(told) < len(group.members) or incident.phases.is_complete:
        return None
    begun = resume.copy.step if resume is not None and resume.group == group.number and resume.copy is not None else 0
    reached = max(account.before for account in told)
    phases = _phases(incident.phases, told)
    known = msgspec.structs.replace(
        incident,
        ended=with_late(incident.ended, told),
        phases=phases,
        step=begun,
        redone=max(0, reached - begun) if phases.is_complete else 0,
        step_s=max((account.step_s for account in told), default=0.0) or incident.step_s,
    )
    return None if known == incident else known


def _phases(known: Phases, told: Sequence[TransitionReport]) -> Phases:
    """Each phase lasts from the moment that the last rank ended the one before."""
    stopped = max(account.stopped_s for account in told)
    if any(account.stepped_s is None for account in told):
        return msgspec.structs.replace(known, stop_s=stopped)
    ends = [stopped]
    for name in ("entered_s", "joined_s", "loaded_s", "stepped_s"):
        ends.append(max(ends[-1], *(getattr(account, name) for account in told)))
    start, join, load, first_step = (after - before for before, after in pairwise(ends))
    return msgspec.structs.replace(
        known, stop_s=stopped, start_s=start, join_s=join, load_s=load, first_step_s=first_step
    )
