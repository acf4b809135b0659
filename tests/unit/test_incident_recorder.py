"""What a recorder writes and announces, turn by turn, as a leader or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from nodes import ME, NODE, POLICY
from reasons import FINISHED, LOST, failed, lost
from statuses import statuses

from agent.core import effects as fx
from agent.core.events import Outcome
from agent.core.failures import ExitReport, Failure
from agent.core.incident import (
    GroupChange,
    Incident,
    IncidentWrite,
    Phases,
    RankStall,
    StallReport,
    Totals,
    TransitionReport,
)
from agent.core.member_status import MemberStatus
from agent.core.model import CachedRecords, Group, Leader, Member, Result, Spec
from agent.core.observations import Observations
from agent.core.reasons import Hang, NodesThere, Requested
from agent.core.records import Stored
from agent.core.saved_states import RestorePoint, StateId
from agent.core.state import AgentState, Leaving
from agent.core.view import Backlog, ClusterView
from agent.observe.goodput import run_statistics, summary
from agent.observe.incident_log import open_from_records
from agent.observe.incident_recorder import Recorder, note_answer, observe_turn, summarize

BROKE = failed("a", 0, exit_code=1)
BY = {"node_id": "a", "incarnation": "i1"}
MEMBER = Member(**BY, address="h", nproc=1, port=1, link=2)
SPEC = Spec(run="r", np_min=1, np_max=1, secret="s", changed_by="test", changed_at=0.0)
LEADER = Stored(Leader(node_id="a", incarnation="i1"), 5, 5)
FIRST = Incident(
    run="r",
    group=1,
    cause="start",
    reason=NodesThere(nodes=1, np="1", is_all=True),
    at=100.0,
    began_at=100.0,
    members=(),
    phases=Phases(first_step_s=1.0),
    step_s=0.5,
)


def group(number: int, **fields: Any) -> Group:  # noqa: ANN401 - of a record
    told = {"cause": "failed", "reason": BROKE, "members": (MEMBER,)} | fields
    return Group(run="r", number=number, restarts=0, step=0, reached=1, **told)


def change(number: int, **fields: Any) -> GroupChange:  # noqa: ANN401 - of a record
    members = ({"node_id": "a", "nproc": 1},) if fields.pop("has_members", True) else ()
    told = {"cause": "failed", "reason": BROKE, "at": 100.0 + 10 * number, "members": members} | fields
    return msgspec.convert({"run": "r", "group": number, **told}, GroupChange)


def moved(
    number: int, *, stepped_s: float | None = 4.0, before: int | None = 7, before_group: int = 1, after: int = 5
) -> TransitionReport:
    times = dict.fromkeys(("entered_s", "joined_s", "set_up_s", "loaded_s"), None if stepped_s is None else 1.0)
    first_step = None if stepped_s is None else after + 1
    return TransitionReport(
        group=number,
        **BY,
        stopped_s=0.5,
        stepped_s=stepped_s,
        first_step=first_step,
        before=before,
        before_group=before_group if before is not None else 0,
        **times,
    )


def exited(number: int, code: int = 1) -> ExitReport:
    failure = Failure(rank=0, local_rank=0, exit_code=code, signal=None, is_peer_lost=False, tail="", at=1.0)
    return ExitReport(group=number, **BY, step=7, failure=failure, step_s=2.0)


def stored(incident: Incident, revision: int = 7) -> Stored[Incident]:
    return Stored(incident, revision, revision)


def begun(number: int, step: int) -> Stored[RestorePoint]:
    copy = StateId(run="r", group=number - 1, step=step)
    return Stored(RestorePoint(group=number, copy=copy, lineage=(), checkpoint=None), 8, 8)


def shown(
    current: Group,
    *,
    revision: int = 20,
    changes: Iterable[GroupChange] = (),
    incidents: Iterable[Stored[Incident]] = (),
    told: Iterable[MemberStatus] = (),
    **fields: Any,  # noqa: ANN401 - of a view
) -> ClusterView:
    by_number = {each.value.group: each for each in incidents}
    told = tuple(told)
    backlog = Backlog(
        changes=tuple(changes),
        statuses=tuple(each for each in told if each.group != current.number),
        incidents=tuple(by_number.values()),
    )
    here = tuple(each for each in told if each.group == current.number)
    parts = {"spec": Stored(SPEC, 1, 1), "leader": LEADER} | fields
    return ClusterView(
        revision,
        is_whole=True,
        group=Stored(current, 6, 6),
        incident=by_number.get(current.number),
        backlog=backlog,
        statuses=here,
        **parts,
    )


def leads(view: ClusterView, **fields: Any) -> AgentState:  # noqa: ANN401 - of a state
    group = view.group.value if view.group is not None else None
    return AgentState(ME, POLICY, view=view, cached=CachedRecords(spec=SPEC, group=group), **fields)


def written(recorder: Recorder, state: AgentState, now: float = 0.0) -> list[tuple[Incident, int]]:
    _, _, write = observe_turn(recorder, state, now)
    assert write is None or write.leader_revision == 5
    return list(write.incidents) if write is not None else []


def as_written(state: AgentState) -> Recorder:
    """A recorder that has written what is due."""
    recorder, _, write = observe_turn(Recorder(), state, 0.0)
    assert write is not None
    return recorder


FAILED = shown(group(1, cause="start"), incidents=[stored(FIRST)], told=statuses(exited(1)))
SEEN = Observations(group=1, group_since=10.0, not_before=10.0, fault_at=20.0, broken_since=20.5)
FORMED = shown(group(2), changes=[change(2)], incidents=[stored(FIRST)], told=statuses(exited(1)))


def test_the_leader_that_wrote_a_group_opens_its_incident() -> None:
    """With what it saw as it decided, as soon as the group is there; while the group is on its way nothing is due."""
    pending = fx.WriteGroup(group(2), change(2), None, 6, 1, 5)
    recorder, _, write = observe_turn(Recorder(), leads(FAILED, seen=SEEN, pending=pending), 21.0)
    assert write is None
    ((incident, revision),) = written(recorder, leads(FORMED, seen=replace(SEEN, group=2)), 30.0)
    assert (incident.group, incident.at, incident.cause, incident.reason, revision) == (
        2,
        120.0,
        "failed",
        BROKE,
        0,
    )
    assert (incident.phases.detect_s, incident.phases.agree_s) == (0.5, 0.5)
    assert [(each.node_id, each.failure.exit_code) for each in incident.ended] == [("a", 1)]
    assert (incident.step_s, incident.began_at, incident.before) == (2.0, 101.0, Totals())


def test_another_leader_opens_it_from_the_records() -> None:
    """When the fault was seen is not known then."""
    ((incident, revision),) = written(Recorder(), leads(FORMED))
    assert (incident.group, incident.at, revision) == (2, 120.0, 0)
    assert incident.phases == Phases()
    assert [each.failure.exit_code for each in incident.ended] == [1]


def test_a_draft_of_another_write_is_not_used() -> None:
    """Of two tries the one is decisive that has landed."""
    pending = fx.WriteGroup(group(2), change(2, at=119.0), None, 6, 1, 5)
    recorder, _, _ = observe_turn(Recorder(), leads(FAILED, seen=SEEN, pending=pending), 21.0)
    ((incident, _),) = written(recorder, leads(FORMED))
    assert (incident.at, incident.phases) == (120.0, Phases())


def test_a_hang_is_known_from_the_records() -> None:
    rank = RankStall(rank=0, step=7, doing="sleeps", where="", stack="")
    stall = StallReport(group=1, **BY, stage="certain", for_s=60.0, limit_s=30.0, ranks=(rank,))
    first = msgspec.structs.replace(FIRST, members=change(1).members)
    incident = open_from_records(change(2), first, statuses(stall))
    assert [each.failure.hang for each in incident.ended] == [Hang(doing="sleeps", step=7, for_s=60)]
    without_members = open_from_records(change(2), None, statuses(stall, exited(1)))
    assert [each.failure.exit_code for each in without_members.ended] == [1]


def test_what_was_before_an_incident_may_be_lost() -> None:
    incident = open_from_records(change(2), None, ())
    assert (incident.is_first_start, incident.began_at, incident.totals.is_at_least) == (False, 0.0, True)
    assert summary(incident.totals, None, 1000.0).startswith("1 incident cost at least 0.00 s; replayed")
    assert run_statistics([incident], 1000.0, has_ended=True).is_at_least


def test_times_of_two_leaders_are_not_compared() -> None:
    """Their clocks may be an hour apart: of a group without a first step only what was measured is downtime."""
    last = msgspec.structs.replace(FIRST, group=2, at=105.0, members=change(1).members, phases=Phases(stop_s=1.0))
    assert open_from_records(change(3, at=3705.0), last, ()).before.downtime_s == 1.0


def test_an_incident_is_completed_once_all_have_reported() -> None:
    opened = msgspec.structs.replace(FIRST, group=2, at=120.0, members=change(2).members, phases=Phases(detect_s=1.0))
    view = shown(group(2), incidents=[stored(opened)], told=statuses(moved(2)), restore_point=begun(2, 5))
    ((incident, revision),) = written(Recorder(), leads(view))
    assert (incident.phases.is_complete, incident.replayed_steps, incident.step, revision) == (True, 2, 5, 7)
    assert written(Recorder(), leads(shown(group(2), incidents=[stored(incident)], told=statuses(moved(2))))) == []


def test_incidents_of_groups_that_are_over_are_written_in_their_order() -> None:
    """Two leaders in a row died; of the group between them all had reported, and its restore point is overwritten."""
    told = statuses(exited(1), moved(2, before=9), exited(2, code=3))
    changes = [change(2), change(3, cause="lost", reason=lost("b"))]
    view = shown(group(3), changes=changes, incidents=[stored(FIRST)], told=told, restore_point=begun(3, 8))
    (second, _), (third, _) = written(Recorder(), leads(view))
    assert (second.group, second.phases.is_complete, second.step, second.replayed_steps) == (2, True, 5, 4)
    assert (third.group, third.cause, third.before) == (3, "lost", second.totals)
    assert [each.failure.exit_code for each in third.ended] == [3]


def test_steps_that_nobody_is_left_to_count_are_not_known() -> None:
    """All nodes that had trained are gone at once: the members of the next group have had no workers before."""
    view = shown(group(2), changes=[change(2)], incidents=[stored(FIRST)], told=statuses(moved(2, before=None)))
    ((incident, _),) = written(Recorder(), leads(view))
    assert (incident.step, incident.replayed_steps, incident.is_at_least) == (5, 0, True)
    assert incident.totals.is_at_least


def test_a_node_that_missed_the_last_group_does_not_know_how_far_it_came() -> None:
    last = msgspec.structs.replace(complete_one(), trained_before=1, reached=9)
    told = statuses(moved(3, before=9, before_group=1, after=20))
    view = shown(group(3), changes=[change(3)], incidents=[stored(last)], told=told)
    ((incident, _),) = written(Recorder(), leads(view))
    assert (incident.trained_before, incident.step, incident.is_at_least) == (2, 20, True)


def test_what_members_reported_as_they_ended_is_known_without_them() -> None:
    told = statuses(moved(2, before=None, after=5))
    view = shown(group(2), changes=[change(2, last_reached=8)], incidents=[stored(FIRST)], told=told)
    ((incident, _),) = written(Recorder(), leads(view))
    assert (incident.reached, incident.replayed_steps, incident.is_at_least) == (8, 3, False)


def test_an_incident_of_the_last_group_that_etcd_has_lost_is_written_again_with_the_next() -> None:
    incident = complete_one()
    recorder, _, _ = observe_turn(Recorder(), leads(shown(group(2), incidents=[stored(incident)])), 0.0)
    due = written(recorder, leads(shown(group(3), revision=3, changes=[change(3)])))
    assert [each.group for each, _ in due] == [2, 3]
    assert due[0][0] == incident
    assert due[1][0].before == incident.totals


@pytest.mark.parametrize(
    "fields",
    [
        {"is_store_lost": True},
        {"settled_revision": 21},
        {"pending": fx.Refresh()},
        {"has_left": True, "leaving": Leaving(0, "")},
    ],
    ids=["etcd is away", "the view is old", "the core writes", "it has left"],
)
def test_nothing_is_written_now(fields: dict[str, Any]) -> None:
    assert written(Recorder(), leads(FORMED, **fields)) == []


def test_an_agent_that_leaves_still_writes_what_is_due() -> None:
    """Before it gives up its lease: the runtime carries out the recorder's write first."""
    assert written(Recorder(), leads(FORMED, pending=fx.Deregister(), leaving=Leaving(0, "")))


def test_the_leader_that_ends_the_job_writes_what_is_due() -> None:
    """A leader that came into office only now has no later turn: all agents leave with the result."""
    result = Result(run="r", group=2, succeeded=True, exit_code=0, reason=FINISHED, at=201.0)
    assert written(Recorder(), leads(FORMED, pending=fx.WriteResult(result, 2, 5)))


def test_only_the_leader_writes() -> None:
    other = replace(FORMED, leader=Stored(Leader(node_id="b", incarnation="i2"), 5, 5))
    assert written(Recorder(), leads(other)) == []
    assert written(Recorder(), leads(replace(FORMED, is_whole=False))) == []
    node = msgspec.structs.replace(NODE, cached=CachedRecords(spec=SPEC, group=group(4)))
    assert written(Recorder(), leads(replace(FORMED, nodes=(Stored(node, 1, 1),)))) == [], "etcd has lost data"


def test_one_write_is_under_way_at_a_time() -> None:
    assert written(as_written(leads(FORMED)), leads(replace(FORMED, revision=30))) == []


def test_a_write_that_was_refused_is_derived_again_from_a_later_view() -> None:
    state = leads(FORMED)
    refused = note_answer(as_written(state), Outcome.REFUSED, 25, 1.0)
    assert written(refused, state, 100.0) == []
    assert written(refused, leads(replace(FORMED, revision=25)), 1.0)


def test_a_write_without_an_answer_is_derived_again_after_a_moment() -> None:
    state = leads(FORMED)
    unanswered = note_answer(as_written(state), Outcome.UNKNOWN, 0, 1.0)
    assert written(unanswered, state, 1.4) == []
    assert written(unanswered, state, 1.5)


def test_what_was_written_need_not_be_seen_to_be_completed() -> None:
    """The next write compares the revision of the last one, also if the view does not show it yet."""
    state = leads(FORMED)
    done = note_answer(as_written(state), Outcome.DONE, 25, 1.0)
    assert written(done, state, 2.0) == []
    reported = shown(
        group(2),
        revision=21,
        changes=[change(2)],
        incidents=[stored(FIRST)],
        told=statuses(moved(2)),
        restore_point=begun(2, 5),
    )
    ((incident, revision),) = written(done, leads(reported), 2.0)
    assert (incident.phases.is_complete, revision) == (True, 25)


def test_a_completed_incident_is_announced_once_and_the_group_before_it() -> None:
    view = shown(
        group(2), changes=[change(2)], incidents=[stored(FIRST)], told=statuses(moved(2)), restore_point=begun(2, 5)
    )
    recorder, sentences, write = observe_turn(Recorder(), leads(view), 0.0)
    assert "group 2: 1 rank on a; rank 0 on a exited with code 1" in sentences
    assert write is not None
    recorder, sentences, _ = observe_turn(note_answer(recorder, Outcome.DONE, 25, 1.0), leads(view), 1.0)
    assert [each.startswith("group 2 after 4.0 s: rank 0 on a exited with code 1") for each in sentences] == [True]
    assert observe_turn(recorder, leads(view), 2.0)[1] == ()


def complete_one() -> Incident:
    return msgspec.structs.replace(
        FIRST,
        group=2,
        cause="failed",
        reason=BROKE,
        at=120.0,
        members=change(2).members,
        phases=Phases(detect_s=3.0, first_step_s=1.0),
    )


def test_an_incident_that_etcd_has_lost_is_written_again_as_it_was() -> None:
    incident = complete_one()
    recorder, _, _ = observe_turn(Recorder(), leads(shown(group(2), incidents=[stored(incident)])), 0.0)
    lost = leads(shown(group(2), revision=3))
    assert written(recorder, lost) == [(incident, 0)]
    other = leads(shown(group(2, reason=LOST), revision=3))
    ((rewritten, _),) = written(recorder, other)
    assert (rewritten.reason, rewritten.phases) == (LOST, Phases())


def test_an_incident_that_nobody_remembers_says_what_the_group_says() -> None:
    state = leads(shown(group(2)), seen=Observations(group=2, group_since=50.0, not_before=40.0))
    ((incident, _),) = written(Recorder(), state)
    assert incident.at == state.wall(40.0)
    assert incident.cause == "failed"
    assert written(Recorder(), leads(shown(group(2, members=())))) == [], "so a job begins that was started over"


def test_an_old_backup_brings_back_an_incident_that_this_leader_knows_better() -> None:
    incident = complete_one()
    recorder, _, _ = observe_turn(Recorder(), leads(shown(group(2), incidents=[stored(incident)])), 0.0)
    assert written(recorder, leads(shown(group(2), revision=3, changes=[change(2)]))) == [(incident, 0)]


def test_a_write_after_etcd_lost_its_history_forgets_the_revisions_from_before() -> None:
    done = note_answer(as_written(leads(FORMED)), Outcome.DONE, 25, 1.0)
    ((_, revision),) = written(done, leads(replace(FORMED, revision=3)), 2.0)
    assert revision == 0


def test_a_write_after_an_outage_forgets_the_revisions_from_before() -> None:
    """Another history may come back whose revision is not lower."""
    done = note_answer(as_written(leads(FORMED)), Outcome.DONE, 25, 1.0)
    away, _, _ = observe_turn(done, leads(FORMED, is_store_lost=True), 2.0)
    ((_, revision),) = written(away, leads(replace(FORMED, revision=22)), 3.0)
    assert revision == 0


def test_a_result_says_what_the_incidents_cost() -> None:
    """Including the last one, which may not be written yet."""
    result = Result(run="r", group=2, succeeded=True, exit_code=0, reason=FINISHED, at=201.0)
    view = shown(
        group(2),
        changes=[change(2)],
        incidents=[stored(FIRST)],
        told=statuses(moved(2), exited(2, code=0)),
        restore_point=begun(2, 5),
    )
    told = summarize(Recorder(), leads(view), result)
    assert told == msgspec.structs.replace(result, summary="1 incident cost 5.0 s; goodput 95.0 %; 2 replayed steps")
    assert summarize(Recorder(), leads(view), msgspec.structs.replace(result, run="other")).summary == ""
    assert summarize(Recorder(), AgentState(ME, POLICY), result) == result


def test_of_a_job_whose_ranks_were_ended_before_they_saved_the_lost_steps_are_not_known() -> None:
    """One agent saved its newest snapshot, and nobody has counted the steps after it."""
    stop = Requested(what="stop", by="me")
    result = Result(run="r", group=3, succeeded=False, exit_code=0, reason=stop, at=201.0)
    for last, is_known in ((group(3), True), (group(3, members=()), False)):
        ended = msgspec.structs.replace(FIRST, group=3, at=120.0)
        view = shown(last, incidents=[stored(ended)], restore_point=begun(2, 5))
        assert ("not known" not in summarize(Recorder(), leads(view), result).summary) is is_known


def test_the_result_of_a_job_that_failed_has_no_goodput() -> None:
    """Unlike that of one that was stopped."""
    done = msgspec.structs.replace(FIRST, group=2, at=120.0)
    view = shown(group(2), incidents=[stored(done)])
    stopped = Result(run="r", group=2, succeeded=False, exit_code=0, reason=FINISHED, at=201.0)
    assert "goodput" in summarize(Recorder(), leads(view), stopped).summary
    assert "goodput" not in summarize(Recorder(), leads(view), msgspec.structs.replace(stopped, exit_code=1)).summary


def test_a_long_backlog_is_written_in_parts() -> None:
    """Etcd limits how much there is in one transaction."""
    changes = [change(number) for number in range(2, 20)]
    due = written(Recorder(), leads(shown(group(19), changes=changes)))
    assert [incident.group for incident, _ in due] == list(range(2, 10))
    assert isinstance(observe_turn(Recorder(), leads(shown(group(19), changes=changes)), 0.0)[2], IncidentWrite)
