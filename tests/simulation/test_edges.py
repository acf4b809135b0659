"""What the core answers in cases that no scenario of the simulation reaches, because it cannot rule them out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest
from reasons import FINISHED, LOST
from simulation.agent import Agent
from simulation.cluster import POLICY, Cluster

from agent.core import cached_records, fence, lineage, neighbours
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.apply_event import leave_as_asked
from agent.core.budget import agent_exit_code
from agent.core.failures import Clock, ExitReport, Failure
from agent.core.incident import (
    GroupChange,
    Incident,
    Phases,
    Totals,
    TransitionReport,
    WorkerEnd,
    members_of,
)
from agent.core.lifecycle import step
from agent.core.local_workers import LocalWorkers, exit_report
from agent.core.model import CachedRecords, Group, LinkState, Member, Result, Spec, Suspicion
from agent.core.observations import Observations
from agent.core.planner import plan
from agent.core.reasons import CommitRefused
from agent.core.records import Identity, Stored
from agent.core.saved_states import Checkpoint, Replica, RestorePoint, StateId
from agent.core.transitions import WorkerObservations
from agent.core.view import ClusterView
from agent.observe.incident_log import complete, draft, open_incident, with_late
from agent.observe.messages import how_it_ended

COPY = StateId(run="r", group=2, step=3)
ASKED = ev.PublishAsked(2, Checkpoint(copy=COPY, name="n", private=".n", manifest_sha256="", kept=(), superseded=()))
SPEC = Spec(run="r", np_min=1, np_max=1, secret="s", changed_by="test", changed_at=0.0)


A = Member(node_id="a", incarnation="1", address="10.0.0.1", nproc=1, port=1, link=2)


def view_of_group(number: int, *, begun: int, members: tuple[Member, ...] = (A,)) -> ClusterView:
    restore_point = RestorePoint(group=begun, copy=None, lineage=(), checkpoint=None)
    group = Group(run="r", number=number, members=members, cause="wait", reason=LOST, restarts=0, step=0, reached=0)
    return ClusterView(
        9, is_whole=True, spec=Stored(SPEC, 1, 1), group=Stored(group, 2, 2), restore_point=Stored(restore_point, 3, 3)
    )


def test_the_fence_knows_nothing_before_it_sees_the_group_and_its_beginning() -> None:
    assert fence.settle(ASKED, ClusterView(9, is_whole=True), "r") is None
    assert fence.settle(ASKED, view_of_group(1, begun=1), "r") is None
    assert fence.settle(ASKED, view_of_group(2, begun=1), "r") is None
    assert isinstance(fence.settle(ASKED, view_of_group(2, begun=2), "r"), fx.WriteCheckpoint)


def test_the_fence_refuses_by_a_view_that_includes_the_next_group() -> None:
    """It has our own commit too, if that landed: it was made before."""
    assert isinstance(fence.settle(ASKED, view_of_group(3, begun=2), "r"), fx.AnswerPublish)


def test_what_a_group_made_may_be_committed_after_it_was_replaced_by_nobody() -> None:
    made = msgspec.structs.replace(ASKED.checkpoint, copy=StateId(run="r", group=1, step=3))
    asked = ev.PublishAsked(2, made)
    assert fence.settle(asked, view_of_group(2, begun=1), "r") is None, "its successor may begin from another state"
    assert isinstance(fence.settle(asked, view_of_group(2, begun=1, members=()), "r"), fx.WriteCheckpoint)
    refused = fence.settle(asked, view_of_group(3, begun=1, members=()), "r")
    assert not isinstance(refused, fx.WriteCheckpoint), "somebody was here since"


def test_a_lineage_has_one_cut_in_a_group_and_knows_groups_apart() -> None:
    """What was made after the cut, or beside it in a group that was cut off, is of another history."""
    cut, after = (StateId(run="r", group=2, step=step) for step in (10, 12))
    last = RestorePoint(group=3, copy=after, lineage=(after,), checkpoint=None)
    following = lineage.follow(4, cut, last, None, "r")
    assert following.lineage == (cut,)
    assert lineage.is_on_lineage(cut, following, "r")
    assert not lineage.is_on_lineage(after, following, "r")
    assert not lineage.is_on_lineage(StateId(run="r", group=3, step=1), following, "r"), "of a group that left no cut"


def test_two_saves_of_one_step_are_two_copies_and_the_later_one_is_newer() -> None:
    """The first may not be committed after the second, nor the other way round be refused."""
    begun = RestorePoint(group=2, copy=None, lineage=(), checkpoint=None)
    first, second = (
        msgspec.structs.replace(ASKED.checkpoint, copy=StateId(run="r", group=2, step=3, save=save)) for save in (0, 1)
    )
    assert not lineage.refusal(second, first, begun, "r")
    assert lineage.refusal(first, second, begun, "r") == CommitRefused(why="committed", group=2, step=3, save=1)
    following = lineage.follow(3, first.copy, begun, None, "r")
    assert not lineage.is_on_lineage(second.copy, following, "r"), "it goes on without what that save had"


def test_the_first_commit_may_adopt_what_another_run_has_saved() -> None:
    """Unless the group began from a copy of its own run."""
    adopted = msgspec.structs.replace(ASKED.checkpoint, copy=StateId(run="old", group=9, step=3))
    own = msgspec.structs.replace(adopted, copy=StateId(run="r", group=1, step=3))
    fresh = RestorePoint(group=2, copy=None, lineage=(), checkpoint=None)
    assert not lineage.refusal(adopted, None, fresh, "r")
    assert lineage.refusal(own, None, fresh, "r"), "its group is none of this history"
    assert lineage.refusal(adopted, None, msgspec.structs.replace(fresh, copy=COPY, lineage=(COPY,)), "r")


def test_nothing_is_on_a_lineage_that_has_not_begun() -> None:
    assert not lineage.is_on_lineage(COPY, None, "r")


def test_reports_about_an_older_group_do_not_count_for_this_one() -> None:
    workers = LocalWorkers(group=2)
    assert workers.apply_event(ev.WorkersGone(1), 0.0) is workers


def test_what_an_agent_kills_is_no_failure() -> None:
    workers = LocalWorkers(group=2, count=2, is_alive=True, is_killed=True)
    assert not workers.apply_event(ev.WorkerExited(2, 1, None, 9, "", 0, 0.0), 0.0).failures
    assert workers.apply_event(ev.WorkerExited(2, 1, 1, None, "its own", 0, 0.0), 0.0).failures


def test_a_checkpoint_that_cannot_be_read_is_no_broken_connection() -> None:
    """Although the server that has it may refuse connections."""
    workers = LocalWorkers(group=2, count=2, is_alive=True, cause_until=1.0)
    away = ev.WorkerExited(2, 0, 1, None, "Connection refused", 0, 0.0)
    assert workers.apply_event(away, 0.0).awaits_cause(0.0)
    unreadable = workers.apply_event(replace(away, unreadable="/ckpt: Connection refused"), 0.0)
    assert not unreadable.awaits_cause(0.0)
    told = exit_report(unreadable, Identity("a", "i"), 0.0, (), 0.0)
    assert told is not None
    assert told.failure is not None
    assert (told.failure.unreadable, told.failure.is_peer_lost) == ("/ckpt: Connection refused", False)


def test_nothing_is_planned_once_the_job_has_ended_or_when_nobody_knows_it() -> None:
    result = Result(run="r", group=1, succeeded=True, exit_code=0, reason=FINISHED)
    ended = ClusterView(9, is_whole=True, result=Stored(result, 1, 1))
    for view in (ended, ClusterView(9, is_whole=True)):
        assert plan(view, Observations(), POLICY, 0.0).action is None


def test_a_signal_is_named_and_makes_the_exit_code() -> None:
    failure = Failure(rank=1, local_rank=0, exit_code=None, signal=9, is_peer_lost=False, tail="", at=0.0)
    report = ExitReport(group=1, node_id="b", incarnation="i", step=0, failure=failure)
    assert agent_exit_code(failure) == 137
    assert how_it_ended(report.node_id, failure) == "rank 1 on b was killed by SIGKILL"


def test_an_agent_whose_place_is_held_by_its_own_earlier_life_takes_it_over() -> None:
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: agent.state.registered is not None)
    earlier = agent.state.node
    state = replace(agent.state, life=2, pending=fx.Register(earlier))
    holder = fx.NodeIdHolder(earlier, lease_id=1, is_alive=True)
    state, _ = step(state, ev.WriteAnswered(fx.Register(earlier), ev.Outcome.REFUSED, holder=holder), agent.clock())
    assert state.holder is not None
    assert state.holder.is_alive is False, "its process lives, and it does not"
    assert state.leaving is None


def test_only_a_refused_takeover_forgets_who_holds_the_node_id() -> None:
    """What else is refused does not begin the wait for that agent's lease anew."""
    state = Cluster(0, np=(1, 1)).start("a").state
    holder = fx.NodeIdHolder(state.node, lease_id=1, is_alive=None)
    for effect, kept in ((fx.CreateSpec(SPEC), holder), (fx.TakeOver(holder), None)):
        waits = replace(state, pending=effect, holder=holder)
        assert step(waits, ev.WriteAnswered(effect, ev.Outcome.REFUSED), 0.0)[0].holder == kept


def test_a_write_that_is_done_ends_the_trouble_with_writes_and_a_read_does_not() -> None:
    """Reading may work where writing does not."""
    state = Cluster(0, np=(1, 1)).start("a").state
    for effect, trouble in ((fx.CreateSpec(SPEC), ""), (fx.Refresh(), "no space")):
        troubled = replace(state, pending=effect, trouble="no space")
        assert step(troubled, ev.WriteAnswered(effect, ev.Outcome.DONE, revision=1), 0.0)[0].trouble == trouble


def test_the_holder_of_a_node_id_found_during_an_outage_is_not_final() -> None:
    """It may have renewed the lease of one that is dead, as it started."""
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: agent.state.registered is not None)
    holder = fx.NodeIdHolder(agent.state.node, lease_id=1, is_alive=None)
    waits = replace(agent.state, pending=fx.Register(agent.state.node), holder=holder, held_since=0.0)
    refused = ev.WriteAnswered(fx.Register(agent.state.node), ev.Outcome.REFUSED, holder=holder)
    assert step(waits, refused, agent.clock())[0].leaving is not None
    assert step(replace(waits, is_store_lost=True), refused, agent.clock())[0].leaving is None
    another = replace(refused, holder=replace(holder, lease_id=2))
    assert step(waits, another, agent.clock())[0].leaving is None, "it has just come"


def test_a_link_that_is_reported_again_keeps_its_downtime() -> None:
    """Else an agent that is cut off would put off its end with each order to its links."""
    up, silent = (ev.LinkChanged(Identity("b", "i"), state, "") for state in (LinkState.UP, LinkState.SILENT))
    links = neighbours.note_link(neighbours.note_link((), up, 1.0, 0.5), silent, 2.0, 0.5)
    again = neighbours.note_link(links, silent, 7.0, 0.5)
    assert neighbours.isolate_at(again, 3.0, 4.0) == neighbours.isolate_at(links, 3.0, 4.0) == 6.0


def test_from_outside_links_go_to_both_ends_of_the_group_and_to_members_that_are_silent() -> None:
    names = ("a", "b", "c")
    members = tuple(Member(node_id=name, incarnation="i", address="h", nproc=1, port=1, link=2) for name in names)
    shown = view_of_group(1, begun=1).group
    assert shown is not None
    group = msgspec.structs.replace(shown.value, members=members)

    def linked(*links: ev.LinkChanged) -> list[str]:
        noted: neighbours.Links = ()
        for link in links:
            noted = neighbours.note_link(noted, link, 1.0, 0.5)
        return [member.node_id for member in neighbours.peers(group, Identity("x", "i"), noted, None)]

    middle = Identity("b", "i")
    assert linked() == linked(ev.LinkChanged(middle, LinkState.UP, "")) == ["a", "c"]
    assert linked(ev.LinkChanged(middle, LinkState.SILENT, "")) == ["a", "b", "c"]


def test_clocks_are_reported_for_members_only() -> None:
    """Nor is that of one forgotten that was lost with the last group: it may have failed first."""
    cluster = Cluster(0, np=(2, 2))
    agent, other = cluster.start("a"), cluster.start("b")

    def compared() -> list[Identity]:
        return [clock.who for clock in agent.state.observed.clocks]

    def has_met(whom: Agent) -> bool:
        return cluster.is_begun and whom.state.identity in compared()

    for number in range(3):
        cluster.run_until(partial(has_met, other))
        cluster.kill(other)
        cluster.run_until(lambda: agent.state.group is not None and not agent.state.group.members)
        assert compared() == [other.state.identity]
        other = cluster.start(f"c{number}")


def test_a_second_signal_hurries_a_leaving_agent() -> None:
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: cluster.is_begun)
    for _ in range(2):
        agent.put(ev.StopAsked(2))
    assert agent.state.leaving is not None
    assert agent.state.leaving.is_hurried


def test_an_answer_from_before_etcd_lost_its_history_is_not_believed() -> None:
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: cluster.is_begun)
    state = replace(agent.state, pending=fx.Refresh(), must_refresh=False)
    state, _ = step(state, ev.ViewChanged(ClusterView(1, is_whole=True)), agent.clock())
    state, effects = step(state, ev.WriteAnswered(fx.Refresh(), ev.Outcome.DONE, revision=99), agent.clock())
    assert fx.Refresh() in effects
    assert state.settled_revision < 99


def test_a_follower_notices_by_what_it_wrote_that_etcd_has_lost_its_history() -> None:
    """Nothing that it is shown is older, and nothing failed: it read before the loss, and wrote, and read after it."""
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: agent.state.registered is not None)
    assert agent.state.view is not None
    view = replace(agent.state.view, is_whole=False)
    state = replace(agent.state, view=view, pending=None, settled_revision=view.revision + 9, must_refresh=False)
    _, effects = step(state, ev.ViewChanged(replace(view, revision=view.revision + 1)), agent.clock())
    assert fx.Refresh() in effects


def test_a_newcomer_withdraws_its_suspicion_before_it_reports_that_it_reaches_the_group() -> None:
    """Else it may be a member by the time, and its suspicion cost the suspected member its place."""
    cluster = Cluster(0, np=(1, 1))
    cluster.start("a")
    cluster.run_until(lambda: cluster.is_begun)
    agent = cluster.start("b")
    cluster.run_until(lambda: agent.state.registered is not None and agent.state.pending is None and agent.state.links)
    state, view = agent.state, agent.state.view
    assert view is not None
    (link,), registered = state.links, state.registered
    assert registered is not None
    outside = msgspec.structs.replace(registered.value, reachable_group=0)
    mine = state.identity
    suspicion = Suspicion(
        node_id=link.who.node_id,
        incarnation=link.who.incarnation,
        is_lost=True,
        why="it was closed",
        by_node_id=mine.node_id,
        by_incarnation=mine.incarnation,
    )
    state = replace(
        state,
        view=replace(view, suspects=(Stored(suspicion, 1, 1, 1),), nodes=(replace(registered, value=outside),)),
        links=(replace(link, state=LinkState.UP),),
        reachable_group=0,
        must_refresh=False,
    )
    state, effects = step(state, ev.Ticked(), agent.clock())
    assert state.node.reachable_group == view.group.value.number if view.group is not None else 0
    assert fx.ClearSuspicion(suspicion) in effects
    assert not any(isinstance(effect, fx.UpdateNode) for effect in effects)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_write_with_a_lower_revision_than_the_view_shows_that_etcd_has_lost_its_history(*, is_whole: bool) -> None:
    """It is in no view. Without another read the same would be decided, and written, again and again."""
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: cluster.is_begun)
    assert agent.state.view is not None
    write = fx.UpdateNode(agent.state.node, 1)
    view = replace(agent.state.view, is_whole=is_whole)
    for behind, is_read in ((0, False), (1, True)):
        state = replace(agent.state, view=view, pending=write, pending_after=view.revision, must_refresh=False)
        answer = ev.WriteAnswered(write, ev.Outcome.DONE, revision=view.revision - behind)
        state, effects = step(state, answer, agent.clock())
        assert (fx.Refresh() in effects) is is_read


def test_an_answer_that_was_under_way_in_an_outage_is_not_believed() -> None:
    """Etcd may have come back with another history, whose revision is not lower."""
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: agent.state.registered is not None)
    state = replace(agent.state, pending=fx.Refresh(), must_refresh=False)
    state, _ = step(state, ev.StoreLost(), agent.clock())
    state, _ = step(state, ev.ViewChanged(ClusterView(90, is_whole=True)), agent.clock())
    state, effects = step(state, ev.WriteAnswered(fx.Refresh(), ev.Outcome.DONE, revision=99), agent.clock())
    assert fx.Refresh() in effects
    assert state.settled_revision < 99


def test_a_rollback_cuts_the_lineage_where_the_group_really_began() -> None:
    last = RestorePoint(group=3, copy=COPY, lineage=(COPY,), checkpoint=None)
    older = msgspec.structs.replace(COPY, step=1)
    rollback = msgspec.structs.replace(ASKED.checkpoint, copy=older, is_rollback=True)
    begun = lineage.as_begun(last, rollback)
    assert not lineage.is_on_lineage(COPY, begun, "r")
    assert lineage.is_on_lineage(older, begun, "r")


def test_of_two_runs_that_nodes_remember_the_one_that_got_further_is_restored() -> None:
    cluster = Cluster(0, np=(1, 1))
    node = cluster.start("a").state.node
    far = CachedRecords(spec=SPEC, group=view_of_group(3, begun=3).group.value)
    for known in ((far, CachedRecords(spec=msgspec.structs.replace(SPEC, run="other"), group=None)), (far, far)):
        nodes = tuple(Stored(msgspec.structs.replace(node, cached=each), 1, 1) for each in known)
        lost = cached_records.lost_data(ClusterView(9, is_whole=True, nodes=nodes))
        assert lost == far


def test_what_an_old_backup_was_given_since_is_not_written_over() -> None:
    """A commit that was under way when etcd came back as it was lands, and nobody has seen it before."""
    restore_point = RestorePoint(group=2, copy=None, lineage=(), checkpoint=None)
    first = msgspec.structs.replace(ASKED.checkpoint, number=1)
    second = msgspec.structs.replace(first, number=2)
    node = Cluster(0, np=(1, 1)).start("a").state.node
    told = CachedRecords(
        spec=SPEC, group=view_of_group(2, begun=2).group.value, restore_point=restore_point, checkpoint=first
    )
    nodes = (Stored(msgspec.structs.replace(node, cached=told), 1, 1),)
    shown = replace(view_of_group(1, begun=1), nodes=nodes, checkpoint=Stored(second, 4, 4))
    lost = cached_records.lost_data(shown)
    assert lost is not None
    assert (lost.number, lost.checkpoint) == (2, second)


def test_what_was_restored_is_not_restored_again() -> None:
    """A node goes on telling what it knows until it has seen that etcd shows it again."""
    shown = view_of_group(2, begun=2)
    assert shown.group is not None
    assert shown.restore_point is not None
    told = CachedRecords(spec=SPEC, group=shown.group.value, restore_point=shown.restore_point.value)
    node = msgspec.structs.replace(Cluster(0, np=(1, 1)).start("a").state.node, cached=told)
    nodes = (Stored(node, 1, 1),)
    assert cached_records.lost_data(replace(view_of_group(1, begun=1), nodes=nodes)) == told
    assert cached_records.lost_data(replace(shown, nodes=nodes)) is None


def change(number: int) -> GroupChange:
    return GroupChange(run="r", group=number, cause="lost", reason=LOST, at=20.0, members=())


def view_of_restored_group() -> ClusterView:
    """Group 3, whose only member writes again what etcd has lost."""
    shown = view_of_group(3, begun=3)
    assert shown.group is not None
    node = msgspec.structs.replace(Cluster(0, np=(1, 1)).start("a").state.node, restoring_group=3)
    group = msgspec.structs.replace(shown.group.value, members=(node.member,))
    return replace(shown, group=Stored(group, 2, 2), nodes=(Stored(node, 1, 1),))


def test_what_a_run_has_lost_is_carried_on_from_an_incident_that_an_old_backup_brought_back() -> None:
    """The group that it made is not the one that was lost: nothing is added to it."""
    shown = view_of_restored_group()
    phases = Phases(detect_s=1.0, agree_s=1.0, stop_s=5.0)
    old = Incident(run="r", group=2, cause="lost", reason=LOST, at=9.0, began_at=1.0, members=(), phases=phases)
    following = change(4)
    assert open_incident(draft(following, shown, Observations(), 20.0), old).before == old.totals
    came = Observations(group=3, group_since=100.0, not_before=100.0, fault_at=101.0, broken_since=101.0)
    opened = open_incident(draft(following, shown, came, 112.0), old)
    assert opened.phases.agree_s == 11.0, "from the fault on, which is no older group's"
    another = open_incident(draft(msgspec.structs.replace(following, run="s"), shown, came, 112.0), old)
    assert (another.before, another.began_at) == (Totals(), another.at), "of another run nothing"


def test_all_of_a_group_that_made_no_step_is_downtime() -> None:
    """Beyond the phases that are known of its incident."""
    shown = view_of_restored_group()
    phases = Phases(detect_s=1.0, agree_s=1.0, stop_s=5.0)
    last = Incident(run="r", group=3, cause="lost", reason=LOST, at=9.0, began_at=1.0, members=(), phases=phases)
    came = Observations(group=3, group_since=100.0, not_before=100.0, fault_at=130.0, broken_since=130.0)
    assert open_incident(draft(change(4), shown, came, 131.0), last).before.downtime_s == 2.0 + 30.0


def test_what_passed_before_a_groups_first_step_is_lost_once() -> None:
    """A rank that hangs there may make its step when the next group is about to be written."""
    shown = view_of_group(2, begun=2)
    assert shown.group is not None
    member = Member(node_id="a", incarnation="i", address="h", nproc=1, port=1, link=2)
    group = msgspec.structs.replace(shown.group.value, members=(member,))
    made = Incident(run="r", group=2, cause="lost", reason=LOST, at=9.0, began_at=1.0, members=(), phases=Phases())
    times = {"entered_s": 0.5, "joined_s": 1.0, "set_up_s": 1.5, "loaded_s": 2.0, "stepped_s": 11.0}
    told = TransitionReport(group=2, node_id="a", incarnation="i", stopped_s=0.0, **times)
    completed = complete(msgspec.structs.replace(made, members=members_of(group)), (told,))
    view = replace(shown, group=Stored(group, 2, 2))
    came = Observations(group=2, group_since=100.0, not_before=100.0, fault_at=101.0, broken_since=110.0)
    opened = open_incident(draft(change(3), view, came, 112.0), completed)
    assert opened.before.downtime_s == 11.0
    assert opened.phases.total_s == 1.0
    newcomer = replace(came, not_before=float("-inf"))
    assert open_incident(draft(change(3), view, newcomer, 112.0), completed).phases.total_s == 11.0


def test_another_agent_under_the_first_ones_node_id_does_not_count_with_its_clock() -> None:
    """It came in the place of one that is gone; its node may be another, and its clock an hour ahead."""
    first = Failure(rank=0, local_rank=0, exit_code=7, signal=None, is_peer_lost=False, tail="", at=100.0)
    late = msgspec.structs.replace(first, rank=1, at=100.5)
    clocks = (Clock(who=Identity("a", "i2"), ahead_s=3600.0, error_s=0.01),)
    told = TransitionReport(group=3, node_id="b", incarnation="i", stopped_s=0.0, ended=(late,), clocks=clocks)
    newcomer = TransitionReport(group=3, node_id="a", incarnation="i2", stopped_s=0.0)
    ended = (WorkerEnd(node_id="a", failure=first),)
    assert with_late(ended, (newcomer, told))[1].error_s is None
    same = msgspec.structs.replace(newcomer, ended=(first,))
    assert with_late(ended, (same, told))[1] == WorkerEnd(node_id="b", failure=late, after_s=3600.5, error_s=0.01)


def test_clocks_are_compared_by_the_report_of_either_node() -> None:
    """Each tells of its neighbours; of two that are far apart only one may have told of the other."""
    first = Failure(rank=0, local_rank=0, exit_code=7, signal=None, is_peer_lost=False, tail="", at=100.0)
    late = msgspec.structs.replace(first, rank=1, at=3700.5)
    clocks = (Clock(who=Identity("b", "i"), ahead_s=3600.0, error_s=0.01),)
    mine = TransitionReport(group=3, node_id="a", incarnation="i", stopped_s=0.0, ended=(first,), clocks=clocks)
    told = TransitionReport(group=3, node_id="b", incarnation="i", stopped_s=0.0, ended=(late,))
    ended = (WorkerEnd(node_id="a", failure=first),)
    assert with_late(ended, (mine, told))[1] == WorkerEnd(node_id="b", failure=late, after_s=0.5, error_s=0.01)


def test_of_a_clock_the_last_comparison_is_kept() -> None:
    """Comparisons are made all the time: what is told of them must not grow."""
    neighbour = Identity("b", "i")
    observed = WorkerObservations()
    for ahead_s in (1.0, 2.0):
        observed = observed.note(ev.ClockCompared(neighbour, ahead_s, 0.1))
    assert observed.clocks == (Clock(who=neighbour, ahead_s=2.0, error_s=0.1),)


def test_a_lineage_names_nothing_from_before_the_checkpoint() -> None:
    """Nothing goes back behind it, and the record would grow with every group."""
    old, committed, cut, newest = (StateId(run="r", group=group, step=10 * group) for group in (1, 2, 3, 4))
    checkpoint = msgspec.structs.replace(ASKED.checkpoint, copy=committed)
    last = RestorePoint(group=4, copy=cut, lineage=(old, committed, cut), checkpoint=None)
    assert lineage.follow(5, newest, last, checkpoint, "r").lineage == (committed, cut, newest)


def test_a_step_takes_as_long_as_on_the_slowest_node() -> None:
    shown = view_of_group(2, begun=2)
    assert shown.group is not None
    members = tuple(Member(node_id=name, incarnation="i", address="h", nproc=1, port=1, link=2) for name in ("a", "b"))
    group = msgspec.structs.replace(shown.group.value, members=members)
    members = members_of(group)
    made = Incident(run="r", group=2, cause="lost", reason=LOST, at=9.0, began_at=1.0, members=members, phases=Phases())
    told = tuple(
        TransitionReport(group=2, node_id=name, incarnation="i", stopped_s=0.0, step_s=step_s)
        for name, step_s in (("a", 1.0), ("b", 3.0))
    )
    assert complete(made, told).step_s == 3.0


def test_an_agent_that_an_operator_drained_was_not_preempted() -> None:
    """Its exit code is 0; that of one which a signal has asked to leave is the job's for preemption."""
    cluster = Cluster(0, np=(1, 1), policy=replace(POLICY, preempted_code=75))
    state = cluster.start("a").state
    drained = msgspec.structs.replace(SPEC, drained=(state.identity,))
    assert leave_as_asked(replace(state, cached=CachedRecords(spec=drained, group=None))).code == 0
    assert leave_as_asked(replace(state, cached=CachedRecords(spec=SPEC, group=None))).code == 75


def test_a_copy_is_begun_from_only_if_all_of_it_is_held() -> None:
    """All ranks' own parts, and once what is equal on all; different nodes may hold them."""
    last = RestorePoint(group=2, copy=None, lineage=(), checkpoint=None)
    first = Replica(copy=COPY, world_size=2, has_common=False, parts=(0,))
    second = msgspec.structs.replace(first, parts=(1,))
    whole = msgspec.structs.replace(second, has_common=True)
    assert lineage.choose([[first], [whole]], last, None, "r") == COPY
    assert lineage.choose([[first], [second]], last, None, "r") is None, "nobody has what is equal on all"
    assert lineage.choose([[whole]], last, None, "r") is None, "a rank's own part is lost"


def test_clocks_are_compared_over_others_and_the_errors_add_up() -> None:
    first = Failure(rank=0, local_rank=0, exit_code=7, signal=None, is_peer_lost=False, tail="", at=100.0)
    late = msgspec.structs.replace(first, rank=2, at=131.0)

    def transition(name: str, *ended: Failure, beside: str = "", error_s: float = 0.0) -> TransitionReport:
        clocks = (Clock(who=Identity(beside, "i"), ahead_s=15.0, error_s=error_s),) if beside else ()
        return TransitionReport(group=3, node_id=name, incarnation="i", stopped_s=0.0, ended=ended, clocks=clocks)

    transitions = (
        transition("a", first, beside="b", error_s=0.25),
        transition("b", beside="c", error_s=0.5),
        transition("c", late),
    )
    ended = (WorkerEnd(node_id="a", failure=first),)
    assert with_late(ended, transitions)[1] == WorkerEnd(node_id="c", failure=late, after_s=1.0, error_s=0.75)


def test_of_workers_that_ended_later_only_the_last_words_are_kept() -> None:
    """Where nobody reported an end before, the first of them is the one that they are compared with."""
    traceback = "Traceback: " + "x" * 5000
    first = Failure(
        rank=0, local_rank=0, exit_code=7, signal=None, is_peer_lost=False, tail=traceback, traceback=traceback, at=1.0
    )
    later = msgspec.structs.replace(first, rank=1, local_rank=1, at=2.0)
    told = TransitionReport(group=3, node_id="a", incarnation="i", stopped_s=0.0, ended=(first, later))
    ended = with_late((), (told,))
    assert ended[0].failure == first
    assert (ended[1].after_s, ended[1].error_s) == (1.0, 0.0), "by one clock"
    assert ended[1].failure.traceback == ""
    assert len(ended[1].failure.tail) < len(traceback)


def test_a_report_that_is_written_again_is_the_same() -> None:
    """The first try may land late, after the second."""
    cluster = Cluster(0, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: cluster.training_nodes == ["a"])
    cluster.fail_worker(agent)
    cluster.run_until(lambda: isinstance(agent.state.pending, fx.WriteStatus) and agent.state.pending.status.exit)
    asked = agent.state.pending
    assert isinstance(asked, fx.WriteStatus)
    unanswered = ev.WriteAnswered(asked, ev.Outcome.UNKNOWN, reason="lost")
    state, _ = step(agent.state, unanswered, agent.clock())
    assert state.workers.report == asked.status.exit
