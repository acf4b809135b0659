"""The recorder: what an agent announces and writes down about its job, derived from its state after each turn.

It decides nothing, and no decision rests on what it writes. The leader's recorder writes the incident of each group:
it opens the incident once the group is in etcd, and completes it from the status records of the members. What it needs
outlives every leader: the `GroupChange` that was written with the group, and the status records of the group before,
which are deleted with the write of the incident. So a new leader finds which incidents are missing or incomplete, of
the current group and of earlier ones, and writes them.

A write compares the leadership and the revision of each incident. If it is refused, or not answered, what is due is
derived again from a later view. All functions are pure; the runtime carries out the writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agent.core import effects as fx
from agent.core.cached_records import lost_data
from agent.core.events import Outcome
from agent.core.incident import GroupChange, Incident, IncidentWrite, TransitionReport, members_of
from agent.core.model import Group, Result
from agent.core.planner import accuse, as_cached
from agent.core.reasons import NotRetried
from agent.core.records import Stored
from agent.core.state import AgentState
from agent.core.view import ClusterView
from agent.observe.announcements import Announced, announce
from agent.observe.incident_log import Draft, complete, draft, open_from_records, open_incident, sum_up

_RETRY_S = 0.5
_KEPT = 8
"""Drafts, and incidents, that are kept in memory."""
_MOST = 8
"""Incidents in one write. etcd limits the operations of a transaction."""


@dataclass(frozen=True)
class Recorder:
    """What a recorder remembers from one turn to the next."""

    announced: Announced = field(default_factory=Announced)
    drafts: tuple[Draft, ...] = ()
    """Of the last groups that this agent wrote, or tried to write."""
    drafted: fx.StoreEffect | None = None
    """The write that the last draft is about."""
    known: tuple[Incident, ...] = ()
    """The newest version of the last incidents, by number, in case etcd loses them."""
    ahead: tuple[Stored[Incident], ...] = ()
    """Incidents that this agent has written since the present view was read."""
    view: ClusterView | None = None
    """The last one. If the next one is older, etcd has lost its history."""
    writing: IncidentWrite | None = None
    """The write that has no answer yet."""
    written_from: ClusterView | None = None
    """The view that the last write was derived from."""
    done_with: ClusterView | None = None
    """A view from which no write is derived (again): nothing is due by it, or what is due was refused."""
    retry_at: float = 0.0
    completed: tuple[Incident, ...] = ()
    """Incidents that were completed since the last turn."""


def observe_turn(
    recorder: Recorder, state: AgentState, now: float
) -> tuple[Recorder, tuple[str, ...], IncidentWrite | None]:
    """Look at the state of an agent after a turn, before its effects are carried out.

    Returns:
        The recorder after it, the sentences to print, and the write to carry out, if one is due. Its answer goes to
        `note_answer`.
    """
    recorder = _remember(_keep_draft(recorder, state, now), state)
    announced, sentences = announce(recorder.announced, state, recorder.completed, now=now)
    recorder = replace(recorder, announced=announced, completed=())
    view = state.view
    if view is None or view.leader is None or not _may_write(recorder, state, view, now):
        return recorder, sentences, None
    write = _due_write(_entries(recorder, state, view), view.leader.create_revision)
    if write is None:
        return replace(recorder, done_with=view), sentences, None
    return replace(recorder, writing=write, written_from=view), sentences, write


def note_answer(recorder: Recorder, outcome: Outcome, revision: int, now: float) -> Recorder:
    """Note how the last write ended. `revision`: of the write, if it was done."""
    write, recorder = recorder.writing, replace(recorder, writing=None)
    if outcome is Outcome.REFUSED:
        return replace(recorder, done_with=recorder.written_from, ahead=())
    if write is None or outcome is Outcome.UNKNOWN:
        return replace(recorder, retry_at=now + _RETRY_S, ahead=())
    written = tuple(Stored(incident, 0, revision) for incident, _ in write.incidents)
    incidents = tuple(each.value for each in written)
    return replace(
        recorder,
        written_from=None,
        ahead=(*recorder.ahead, *written),
        known=_newest((*recorder.known, *incidents)),
        completed=(*recorder.completed, *(each for each in incidents if each.phases.is_complete)),
    )


def summarize(recorder: Recorder, state: AgentState, result: Result) -> Result:
    """Add to a result that is to be written what the run's incidents cost, without the failure that ends the job."""
    view = state.view
    if view is None:
        return result
    incidents = (*(each.incident for each in _entries(recorder, state, view)), *recorder.known)
    before = (each for each in incidents if not isinstance(each.reason, NotRetried))
    return sum_up(result, max(before, key=lambda each: each.group, default=None), view)


# What is remembered


def _keep_draft(recorder: Recorder, state: AgentState, now: float) -> Recorder:
    """Keep what this agent sees as it writes a group."""
    write, view = state.pending, state.view
    if not isinstance(write, fx.WriteGroup) or write is recorder.drafted or write.change is None or view is None:
        return recorder
    cached = lost_data(view)
    as_decided = accuse(view, state.seen, now) if cached is None else as_cached(cached, view)
    made = draft(write.change, as_decided, state.seen, now)
    return replace(recorder, drafted=write, drafts=(*recorder.drafts, made)[-_KEPT:])


def _remember(recorder: Recorder, state: AgentState) -> Recorder:
    """Forget what a new view shows, and remember the incidents that it has."""
    view, last = state.view, recorder.view
    if state.is_store_lost and recorder.ahead:  # perhaps another history comes back, with other revisions
        recorder = replace(recorder, ahead=())
    if view is None or view is last:
        return recorder
    is_older = last is not None and view.revision < last.revision
    ahead = () if is_older else tuple(each for each in recorder.ahead if each.mod_revision > view.revision)
    shown = (each.value for each in _shown(view).values())
    return replace(recorder, ahead=ahead, view=view, known=_newest((*recorder.known, *shown)))


def _newest(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    by_number = {incident.group: incident for incident in incidents}
    return tuple(by_number[number] for number in sorted(by_number)[-_KEPT:])


# What is due


@dataclass(frozen=True)
class _Entry:
    """An incident as it should be in etcd."""

    incident: Incident
    stored: Stored[Incident] | None
    """As it is there."""


def _may_write(recorder: Recorder, state: AgentState, view: ClusterView, now: float) -> bool:
    if view is recorder.done_with or recorder.writing is not None or now < recorder.retry_at:
        return False
    if not (state.is_leader and view.is_whole) or state.is_store_lost or state.has_left:
        return False
    # A write would delay the one of the core that is under way. An agent that leaves has no later turn for it, and
    # after the job's result perhaps no agent has.
    is_last = state.leaving is not None or isinstance(state.pending, fx.WriteResult)
    return view.includes(state.settled_revision) and (state.pending is None or is_last)


def _due_write(entries: list[_Entry], leader_revision: int) -> IncidentWrite | None:
    due = [each for each in entries if each.stored is None or each.incident != each.stored.value]
    if not due:
        return None
    incidents = tuple((each.incident, each.stored.mod_revision if each.stored is not None else 0) for each in due)
    return IncidentWrite(incidents[:_MOST], leader_revision)


def _entries(recorder: Recorder, state: AgentState, view: ClusterView) -> list[_Entry]:
    """Return the incidents of the current group and of those before it that may not be written, by number."""
    group = view.group.value if view.group is not None else None
    if group is None or lost_data(view) is not None:
        return []
    changes = {change.group: change for change in view.backlog.changes if change.group <= group.number}
    stored = _shown(view) | {each.value.group: each for each in recorder.ahead}
    entries: list[_Entry] = []
    for number in sorted({group.number, *changes, *(each - 1 for each in changes)}):
        there = stored.get(number)
        incident = there.value if there is not None else None
        if incident is None:
            last = _last_before(number, entries, recorder, stored)
            incident = _opened(number, changes.get(number), last, recorder, state, view)
        if incident is not None:
            incident = complete(incident, _transitions(number, view))
            entries.append(_Entry(incident, there))
    return entries


def _shown(view: ClusterView) -> dict[int, Stored[Incident]]:
    shown = (*view.backlog.incidents, *((view.incident,) if view.incident is not None else ()))
    return {each.value.group: each for each in shown}


def _last_before(
    number: int, entries: list[_Entry], recorder: Recorder, stored: dict[int, Stored[Incident]]
) -> Incident | None:
    """The incident before this one; it has the totals up to there."""
    found = (*(each.incident for each in entries), *(each.value for each in stored.values()), *recorder.known)
    return max((each for each in found if each.group < number), key=lambda each: each.group, default=None)


def _opened(
    number: int,
    change: GroupChange | None,
    last: Incident | None,
    recorder: Recorder,
    state: AgentState,
    view: ClusterView,
) -> Incident | None:
    """Return an incident that etcd does not have, or has lost. None: there is none, or nothing is known of it."""
    group = view.group.value if view.group is not None else None
    known = next((each for each in recorder.known if each.group == number), None)
    if change is not None:
        if known is not None and known.at == change.at:
            return known
    elif group is None or group.number != number:
        return known
    else:
        change = _change_of(group, state)
        if known is not None and _is_about(known, change):
            return known
        if not group.members:  # a job that was started over begins with such a group, which is no incident
            return None
    drafted = next((each for each in recorder.drafts if each.change == change), None)
    if drafted is not None:
        return open_incident(drafted, last)
    statuses = tuple(each for each in view.backlog.statuses if each.group == number - 1)
    return open_from_records(change, last, statuses)


def _change_of(group: Group, state: AgentState) -> GroupChange:
    """What is known of the change to the current group if its record is lost."""
    return GroupChange(
        run=group.run,
        group=group.number,
        cause=group.cause,
        reason=group.reason,
        at=state.wall(state.seen.came_at),
        members=members_of(group),
    )


def _is_about(incident: Incident, change: GroupChange) -> bool:
    """Whether they are about the same group, and not about two of different histories under one number."""
    return (incident.run, incident.cause, incident.reason, incident.members) == (
        change.run,
        change.cause,
        change.reason,
        change.members,
    )


def _transitions(number: int, view: ClusterView) -> tuple[TransitionReport, ...]:
    """How members moved into the group of this number."""
    if view.group is not None and view.group.value.number == number:
        return view.transitions
    statuses = (each for each in view.backlog.statuses if each.group == number)
    return tuple(each.transition for each in statuses if each.transition is not None)
