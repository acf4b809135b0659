"""The incident log: incidents are opened with the group that they lead to, and completed from its members' reports.

The downtime of an incident lasts from the fault to the first step of the slowest rank, plus the time for replayed
steps. If a group ends before that first step, all of its time is downtime.
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
    """Open the incident of a group that is to be written. `stamp` adds the wall clock times.

    Args:
        group: the group that is to be written.
        view: a view in which the previous group is the current one.
        reports: exit reports of the previous group, including a hang.
        seen: the observations of the leader.
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
    """Set the time of writing. For the first incident of a run it is also the time when the run began."""
    return msgspec.structs.replace(incident, at=wall, began_at=incident.began_at or wall)


def sum_up(result: Result, view: ClusterView, wall: float) -> Result:
    """Add to a result the time, and a summary of what the run's incidents cost."""
    last = _last(view)
    if last is None or last.run != result.run:
        return msgspec.structs.replace(result, at=wall)
    text = summary(
        last.totals,
        training_since(last),
        wall,
        has_failed=result.state == "failed",
        commits=view.group is not None and highest_step(view.group.value, view.exits) > 0,
    )
    return msgspec.structs.replace(result, at=wall, summary=text)


def _last(view: ClusterView) -> Incident | None:
    """The newest incident, completed as far as possible if it led to the current group."""
    incident = view.incident.value if view.incident is not None else None
    group = view.group.value if view.group is not None else None
    if incident is None or group is None or incident.group != group.number:
        return incident
    return (
        complete(incident, group, view.resume.value if view.resume is not None else None, view.transitions) or incident
    )


def _trained_at(last: Incident | None, view: ClusterView, seen: Observations) -> float:
    """Until when downtime belongs to the last incident, on the leader's clock.

    -inf: the leader did not see the group appear.
    """
    if last is None or view.group is None or last.group != view.group.value.number:
        return float("-inf")
    return seen.not_before + last.phases.after_s


def _fault_at(view: ClusterView, seen: Observations, now: float) -> float:
    """When the current incident began, on the leader's clock."""
    if view.group is None or not view.group.value.members:
        return seen.group_since  # no node has trained since then
    if seen.fault_at is not None:
        return seen.fault_at
    stopped_at = seen.handoff_progress.fulfilled_since
    return now if stopped_at is None else stopped_at


def _so_far(last: Incident, view: ClusterView, ran_s: float) -> Totals:
    """The totals of the run until now. `ran_s`: how long the current group existed until the fault."""
    group = view.group.value if view.group is not None else None
    if group is None or last.group != group.number:
        return last.totals
    totals = last.totals
    if last.phases.is_complete or not group.members or not can_hand_off(group, view):
        return totals
    return msgspec.structs.replace(totals, downtime_s=totals.downtime_s + max(0.0, ran_s - last.phases.after_s))


def complete(
    incident: Incident, group: Group, resume: RestorePoint | None, transitions: Sequence[TransitionReport]
) -> Incident | None:
    """Add the reports of the members to the incident that led to this group. None: there is nothing to add (yet)."""
    by_member = {report.identity: report for report in transitions}
    reports = [by_member[member.identity] for member in group.members if member.identity in by_member]
    if not reports or len(reports) < len(group.members) or incident.phases.is_complete:
        return None
    begun = resume.copy.step if resume is not None and resume.group == group.number and resume.copy is not None else 0
    reached = max(report.before for report in reports)
    phases = _phases(incident.phases, reports)
    completed = msgspec.structs.replace(
        incident,
        ended=with_late(incident.ended, reports),
        phases=phases,
        step=begun,
        replayed_steps=max(0, reached - begun) if phases.is_complete else 0,
        step_s=max((report.step_s for report in reports), default=0.0) or incident.step_s,
    )
    return None if completed == incident else completed


def _phases(before: Phases, reports: Sequence[TransitionReport]) -> Phases:
    """Add the phases after the write of the group. Each one ends when the slowest rank has finished it."""
    stopped = max(report.stopped_s for report in reports)
    if any(report.stepped_s is None for report in reports):
        return msgspec.structs.replace(before, stop_s=stopped)
    ends = [stopped]
    for name in ("entered_s", "joined_s", "loaded_s", "stepped_s"):
        ends.append(max(ends[-1], *(getattr(report, name) for report in reports)))
    start, join, load, first_step = (end - begin for begin, end in pairwise(ends))
    return msgspec.structs.replace(
        before, stop_s=stopped, start_s=start, join_s=join, load_s=load, first_step_s=first_step
    )
