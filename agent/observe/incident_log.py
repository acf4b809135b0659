"""The incident log: incidents are opened from what is known of a change of group, and completed from members' reports.

The downtime of an incident lasts from the fault to the first step of the slowest rank, plus the time for replayed
steps. If a group ends before that first step, all of its time is downtime.

All functions are pure. `incident_recorder.py` decides when each incident is opened and completed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from agent.core.budget import highest_step
from agent.core.causes import ReferenceOffset, Reporter, compare_clocks, in_short, order_of
from agent.core.failures import ExitReport, Failure
from agent.core.handoff import can_hand_off
from agent.core.hangs import is_due
from agent.core.incident import GroupChange, Incident, Phases, Totals, TransitionReport, WorkerEnd
from agent.core.member_status import MemberStatus
from agent.core.model import Group, Member, Result
from agent.core.observations import Observations
from agent.core.planner import accuse
from agent.core.reasons import Requested
from agent.core.records import Identity, Stored
from agent.core.view import ClusterView
from agent.observe.goodput import summary, training_since

_MAX_OTHERS = 64
"""Number of failures that are kept in addition to the first."""


@dataclass(frozen=True)
class Draft:
    """What the leader that wrote a group saw of the fault before it. Times are on its monotonic clock."""

    change: GroupChange
    last: int
    """Number of the group before. 0: there was none."""
    ended: tuple[WorkerEnd, ...]
    """How workers of that group failed."""
    step_s: float | None
    """The usual time of a step in that group. None: nothing was reported."""
    fault_at: float
    """When the fault happened, or the change was decided."""
    broken_since: float | None
    """Since when the fault was known. None: the change was planned."""
    not_before: float
    """When the group before appeared. -inf: the leader did not see that."""
    group_since: float
    """When the leader first saw the group before."""
    decided_at: float
    commits: bool
    """Whether the script of the group before commits steps, so that its first step would have been seen."""
    has_trained: bool
    """A member of the group before has reported the first step of its ranks."""


def draft(change: GroupChange, view: ClusterView, seen: Observations, now: float) -> Draft:
    """Keep what the incident of a group needs of the moment at which the group is written.

    Args:
        change: of the group that is to be written.
        view: the view that this was decided from: the previous group is the current one, a hang is an exit report.
        seen: the observations of the leader.
        now: monotonic, in seconds.
    """
    group = view.group.value if view.group is not None else None
    return Draft(
        change=change,
        last=group.number if group is not None else 0,
        ended=in_order(view.exits),
        step_s=max((report.step_s for report in view.exits), default=None),
        fault_at=_fault_at(view, seen, now),
        broken_since=seen.broken_since,
        not_before=seen.not_before,
        group_since=seen.group_since,
        decided_at=now,
        commits=group is not None and bool(group.members) and (can_hand_off(group, view) or _has_committed(view)),
        has_trained=_has_trained(view.transitions),
    )


def _fault_at(view: ClusterView, seen: Observations, now: float) -> float:
    """When the current incident began, on the leader's clock."""
    if view.group is None or not view.group.value.members:
        return seen.group_since  # no node has trained since then
    if seen.fault_at is not None:
        return seen.fault_at
    stopped_at = seen.handoff_progress.fulfilled_since
    return now if stopped_at is None else stopped_at


def open_incident(drafted: Draft, last: Incident | None) -> Incident:
    """Open the incident of a group that this leader has written.

    Args:
        drafted: what this leader saw.
        last: the incident before, completed as far as possible.
    """
    is_of_last_group = last is not None and last.group == drafted.last
    trained_at = drafted.not_before + last.phases.after_s if last is not None and is_of_last_group else -math.inf
    fault_at = min(max(drafted.fault_at, trained_at), drafted.decided_at)
    known_at = fault_at if drafted.broken_since is None else max(fault_at, drafted.broken_since)
    ran_s = fault_at - drafted.group_since if is_of_last_group and drafted.commits else None
    incident = _opened(drafted.change, last, drafted.ended, drafted.step_s, ran_s, has_trained=drafted.has_trained)
    phases = Phases(detect_s=known_at - fault_at, agree_s=drafted.decided_at - known_at)
    return msgspec.structs.replace(incident, phases=phases)


def open_from_records(change: GroupChange, last: Incident | None, statuses: Sequence[MemberStatus]) -> Incident:
    """Open the incident of a group that another leader wrote.

    When the fault happened, and when it was detected, is not known then: these times are not counted as downtime. The
    times at which the two groups were written would not do, since two leaders may have written them, by two clocks.

    Args:
        change: of the group.
        last: the incident before, completed as far as possible.
        statuses: what members of the group before reported about it.
    """
    before = last if last is not None and last.group == change.group - 1 else None
    reports = _exits(before, statuses)
    step_s = max((report.step_s for report in reports), default=None)
    told = (each.transition for each in statuses if each.transition is not None)
    return _opened(change, last, in_order(reports), step_s, ran_s=None, has_trained=_has_trained(told))


def _exits(before: Incident | None, statuses: Sequence[MemberStatus]) -> tuple[ExitReport, ...]:
    """The exit reports of a group that is over, including a hang and an early end. `before`: its incident."""
    exits = tuple(each.exit for each in statuses if each.exit is not None)
    if before is None:  # a hang and an early end are found by the ranks of the members
        return exits
    incarnations = {each.node_id: each.incarnation for each in statuses}
    members = [
        Member(
            node_id=each.node_id,
            incarnation=incarnations.get(each.node_id, ""),
            address="",
            nproc=each.nproc,
            port=0,
            link=0,
        )
        for each in before.members
    ]
    group = Group(
        run=before.run,
        number=before.group,
        members=tuple(members),
        cause=before.cause,
        reason=before.reason,
        restarts=0,
        step=0,
        reached=0,
    )
    view = ClusterView(0, is_whole=True, group=Stored(group, 0, 0), statuses=tuple(statuses))
    seen = Observations(stalled_since=-math.inf if is_due(view.stalls) else None)
    return accuse(view, seen, math.inf).exits


def _has_trained(transitions: Iterable[TransitionReport]) -> bool:
    """Whether a member has reported the first step of its ranks."""
    return any(each.first_step is not None for each in transitions)


def _opened(
    change: GroupChange,
    last: Incident | None,
    ended: tuple[WorkerEnd, ...],
    step_s: float | None,
    ran_s: float | None,
    *,
    has_trained: bool,
) -> Incident:
    """An incident without phases.

    Args:
        change: of the group.
        last: the incident before.
        ended: the workers of the group before that failed.
        step_s: the usual time of a step. None: not known.
        ran_s: how long the group before existed until the fault. None: not known, or the script commits no steps.
        has_trained: a member of the group before has reported the first step of its ranks.
    """
    is_same_run = last is not None and last.run == change.run
    trained_before, reached = 0, None
    began_at, before = change.at, Totals()
    if last is not None and is_same_run:
        trained_before, reached = _how_far(change, last, has_trained=has_trained)
        began_at, before = training_since(last), _so_far(last, ran_s)
    elif last is None and change.cause != "start":  # etcd has lost the incidents before
        began_at, before = 0.0, Totals(is_at_least=True)
    return Incident(
        run=change.run,
        group=change.group,
        cause=change.cause,
        reason=change.reason,
        at=change.at,
        began_at=began_at,
        members=change.members,
        ended=ended,
        phases=Phases(),
        trained_before=trained_before,
        reached=reached,
        step_s=step_s if step_s is not None else last.step_s if last is not None else 0.0,
        before=before,
    )


def _how_far(change: GroupChange, last: Incident, *, has_trained: bool) -> tuple[int, int | None]:
    """The last group before this change that made a step, and its highest one, as far as known. `last`: of this run."""
    if change.last_reached is not None:
        return change.group - 1, change.last_reached
    if has_trained:
        return change.group - 1, None
    return (last.group, None) if last.phases.is_complete else (last.trained_before, last.reached)


def _so_far(last: Incident, ran_s: float | None) -> Totals:
    """The totals of the run until now. Time without a first step is downtime."""
    if last.phases.is_complete or ran_s is None:
        return last.totals
    lost_s = max(0.0, ran_s - last.phases.after_s)
    return msgspec.structs.replace(
        last.totals, downtime_s=last.totals.downtime_s + lost_s, is_at_least=last.before.is_at_least
    )


def complete(incident: Incident, transitions: Sequence[TransitionReport]) -> Incident:
    """Add the reports of the members to the incident that led to their group, once all have reported.

    Args:
        incident: as it is known so far.
        transitions: the reports of its members about the group.
    """
    if incident.phases.is_complete or len(transitions) < len(incident.members):
        return incident
    by_node = {report.node_id: report for report in transitions}
    reports = [by_node[member.node_id] for member in incident.members if member.node_id in by_node]
    if not reports or len(reports) < len(incident.members):
        return incident
    told = [(report.before_group, report.before) for report in reports if report.before is not None]
    if incident.reached is not None:
        told.append((incident.trained_before, incident.reached))
    group, reached = max(told, default=(0, None))
    if group < incident.trained_before:
        reached = None
    first_step = max((report.first_step or 0) for report in reports)
    step = max(0, first_step - 1)
    phases = _phases(incident.phases, reports)
    return msgspec.structs.replace(
        incident,
        ended=with_late(incident.ended, reports),
        phases=phases,
        step=step,
        reached=reached,
        replayed_steps=max(0, reached - step) if phases.is_complete and reached is not None else 0,
        step_s=max((report.step_s for report in reports), default=0.0) or incident.step_s,
    )


def _phases(before: Phases, reports: Sequence[TransitionReport]) -> Phases:
    """Add the phases after the write of the group. Each one ends when the slowest rank has finished it."""
    stopped = max(report.stopped_s for report in reports)
    names = ("entered_s", "joined_s", "set_up_s", "loaded_s", "stepped_s")
    times = [[getattr(report, name) for report in reports] for name in names]
    if any(None in each for each in times):
        return msgspec.structs.replace(before, stop_s=stopped)
    ends = [stopped]
    for name, each in zip(names, times, strict=True):
        # All join at one moment. Whose node tells an earlier one has set up before, while the others waited for it.
        ends.append(max(ends[-1], min(each) if name == "joined_s" else max(each)))
    start, join, set_up, load, first_step = (end - begin for begin, end in pairwise(ends))
    return msgspec.structs.replace(
        before, stop_s=stopped, start_s=start, join_s=join, set_up_s=set_up, load_s=load, first_step_s=first_step
    )


def sum_up(result: Result, last: Incident | None, view: ClusterView) -> Result:
    """Add to a result a summary of what the run's incidents cost. `last`: the newest incident."""
    if last is None or last.run != result.run:
        return result
    totals = last.totals
    if _has_ended_ranks(result, view):  # the steps after the snapshot are counted by nobody
        totals = msgspec.structs.replace(totals, is_at_least=True)
    text = summary(
        totals,
        training_since(last) or None,
        result.at,
        has_failed=result.state == "failed",
        commits=_has_committed(view),
        resumed_after=last.step if last.is_first_start else 0,
    )
    return msgspec.structs.replace(result, summary=text)


def _has_ended_ranks(result: Result, view: ClusterView) -> bool:
    """Whether the job was stopped without a common last step of its ranks, so that steps may be made again."""
    is_stopped = isinstance(result.reason, Requested) and result.reason.what == "stop"
    return is_stopped and view.group is not None and not view.group.value.members


def _has_committed(view: ClusterView) -> bool:
    """Whether the script has committed a step. The last group may have begun at one without making another."""
    begun = view.restore_point.value.copy if view.restore_point is not None else None
    return (
        begun is not None
        or view.checkpoint is not None
        or (view.group is not None and highest_step(view.group.value, view.exits) > 0)
    )


# The order of failures


def in_order(reports: Sequence[ExitReport]) -> tuple[WorkerEnd, ...]:
    """How workers of a group failed: causes before consequences, each in the order of time."""
    ahead = compare_clocks(reports)
    failures = [(report, report.failure) for report in reports if report.failure is not None]
    failures.sort(key=lambda each: order_of(each[0], each[1], ahead))
    return tuple(_ended(each, failures[0], ahead) for each in failures[: _MAX_OTHERS + 1])


def with_late(ended: tuple[WorkerEnd, ...], transitions: Sequence[TransitionReport]) -> tuple[WorkerEnd, ...]:
    """Add the failures that came too late for an exit report: the transition reports of the next group have them."""
    known = {(each.node_id, each.failure.rank) for each in ended}
    late = [
        (report, failure)
        for report in transitions
        for failure in report.ended
        if (report.node_id, failure.rank) not in known
    ]
    ahead = compare_clocks(transitions)
    late.sort(key=lambda each: order_of(each[0], each[1], ahead))
    first = next((report for report in transitions if ended and _has_reported(report, ended[0])), None)
    if first is not None:
        added = [_ended(each, (first, ended[0].failure), ahead) for each in late]
    else:  # the agent that reported the first failure is gone, or there was no report
        added = [_ended(each, late[0], ahead) for each in late]
        added = [msgspec.structs.replace(each, error_s=None) for each in added] if ended else added
    return (*ended, *added)[: _MAX_OTHERS + 1]


def _has_reported(report: TransitionReport, ended: WorkerEnd) -> bool:
    """Whether this agent reported that failure. Another agent with the same node id may have another clock."""
    has_rank = ended.failure.rank in {failure.rank for failure in report.ended}
    return report.node_id == ended.node_id and (has_rank or bool(ended.failure.hang))


def _ended(
    each: tuple[Reporter, Failure], first: tuple[Reporter, Failure], ahead: dict[Identity, ReferenceOffset]
) -> WorkerEnd:
    (report, failure), (first_report, earliest) = each, first
    after_s, error_s = failure.at - earliest.at, None
    mine, its = ahead.get(report.identity), ahead.get(first_report.identity)
    if earliest.hang:  # a hang has no time of its own
        after_s = 0.0
    elif report.identity == first_report.identity:  # the same clock
        error_s = 0.0
    elif mine is not None and its is not None:
        after_s, error_s = after_s - mine.ahead_s + its.ahead_s, mine.error_s + its.error_s
    if failure is not earliest:
        failure = in_short(failure)
    return WorkerEnd(node_id=report.node_id, failure=failure, after_s=after_s, error_s=error_s)
