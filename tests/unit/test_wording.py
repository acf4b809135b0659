"""Sentences for people, each where it is made: golden transcripts hold none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import pytest
from nodes import ME, NODE, POLICY
from reasons import FINISHED, LOST
from statuses import Part, first_steps, statuses

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.failures import ExitReport, Failure
from agent.core.fence import settle
from agent.core.incident import Incident, IncidentMember, Phases, RankStall, StallReport, TransitionReport
from agent.core.lifecycle import step
from agent.core.local_workers import LocalWorkers, Reached
from agent.core.model import CachedRecords, Group, HandoffRequest, Leader, Node, Result, Spec, Suspicion
from agent.core.observations import Observations, Outage, observe
from agent.core.planner import plan
from agent.core.policy import Policy
from agent.core.proposals import Plan
from agent.core.reasons import AskedToEnd, HealthCheckFailed, ProcessesLeft, Requested, Waiting
from agent.core.records import Stored
from agent.core.saved_states import Checkpoint, Inventory, Replica, RestorePoint, StateId
from agent.core.state import AgentState, Leaving
from agent.core.view import ClusterView
from agent.observe.announcements import Announced, announce
from agent.observe.messages import describe, describe_exit
from agent.observe.stragglers import Straggler
from trainer_runtime.contract import EXIT_NO_RESTART

R = TypeVar("R", bound=msgspec.Struct)


def but(record: R, **changed: object) -> R:
    return msgspec.structs.replace(record, **changed)


SPEC = Spec(run="r", np_min=2, np_max=2, secret="s", changed_by="someone", changed_at=0.0)
ELASTIC = but(SPEC, np_min=1, np_max=3)
A, B, C = (but(NODE, node_id=name, link=link, reachable_group=1) for name, link in (("a", 1), ("b", 2), ("c", 3)))
PAIR = Group(
    run="r",
    number=1,
    members=(A.member, B.member),
    cause="start",
    reason=LOST,
    restarts=0,
    step=0,
    reached=2,
)
WAIT = but(PAIR, members=(), cause="wait", reason=LOST)
EXITED = Failure(rank=0, local_rank=0, exit_code=1, signal=None, is_peer_lost=False, tail="", at=0.0)
SAVED = Checkpoint(
    number=1,
    run="r",
    copy=StateId(run="r", group=1, step=4),
    name="n",
    private=".n",
    manifest_sha256="",
    kept=(),
    superseded=(),
)
DONE = Result(run="r", group=1, succeeded=True, exit_code=0, reason=FINISHED)


def view(
    spec: Spec = SPEC,
    *nodes: Node,
    group: Group | None = PAIR,
    begun: int = 1,
    parts: Sequence[Part] = (),
    **more: object,
) -> ClusterView:
    begins = RestorePoint(group=begun, copy=None, lineage=(), checkpoint=None)
    return ClusterView(
        revision=100,
        is_whole=True,
        spec=Stored(spec, 1, 1),
        nodes=tuple(Stored(each, age, age) for age, each in enumerate(nodes, start=2)),
        group=Stored(group, 10, 10) if group is not None else None,
        restore_point=Stored(begins, 11, 11) if group is not None else None,
        statuses=statuses(*parts),
        **more,  # type: ignore[arg-type] - its other fields
    )


def report(failure: Failure | None = EXITED, node: Node = A, **changed: object) -> ExitReport:
    if failure is not None:
        failure = but(failure, **changed)
    return ExitReport(group=1, node_id=node.node_id, incarnation=node.incarnation, step=0, failure=failure)


def suspect(one: Node, by: Node) -> Stored[Suspicion]:
    told = Suspicion(
        node_id=one.node_id,
        incarnation=one.incarnation,
        by_node_id=by.node_id,
        by_incarnation=by.incarnation,
        is_lost=False,
        has_had_link=True,
        why="",
    )
    return Stored(told, 1, 1)


STILL = "made no step after step 3 for 6 s:"
APART = "a and the others do not reach each other; waiting for a lease to end"


def still(node: Node, rank: int, doing: str, stage: str = "suspicious") -> StallReport:
    told = RankStall(rank=rank, step=3, doing=doing, where="t.py:3 in f", stack="")
    return StallReport(
        group=1,
        node_id=node.node_id,
        incarnation=node.incarnation,
        stage=stage,
        for_s=6.0,
        limit_s=6.0,
        ranks=(told,),
    )


HELD_BY_ALL = tuple(Inventory(group=1, node_id=name, incarnation="i1", copies=()) for name in "ab")
CUT = (suspect(A, B), suspect(B, A), suspect(A, C), suspect(C, A))
STEPPED = TransitionReport(group=1, node_id="a", incarnation="i1", stopped_s=0.0, stepped_s=1.0)
TRIO = but(PAIR, members=(A.member, B.member, C.member), reached=3)


def case(sentence: str, shown: ClusterView, after_s: float = 0.0, policy: Policy = POLICY) -> object:
    """A plan is made so long after all of the view was first seen."""
    return pytest.param(sentence, shown, after_s, policy, id=sentence)


@pytest.mark.parametrize(
    ("sentence", "shown", "after_s", "policy"),
    [
        case("all of 2 nodes there", view(SPEC, A, B, group=None)),
        case("2 nodes there (np 1:3); waiting a moment for more", view(ELASTIC, A, B, group=None)),
        case("2 nodes there (np 1:3)", view(ELASTIC, A, B, group=None), 1.0),
        case("waiting for 1 of 2 nodes; here: a", view(SPEC, A, group=None)),
        case("waiting for 2 of 2 nodes; here: none; lost x", view(SPEC, group=WAIT)),
        case(
            "gave up after 9 s of waiting for 1 of 2 nodes; here: a",
            view(SPEC, A, group=None),
            9.0,
            policy=replace(POLICY, elastic_timeout_s=9.0),
        ),
        # A group begins.
        case("waiting for a and b to say what can be resumed from", view(SPEC, A, B, begun=0)),
        case(
            "waiting for b to say what can be resumed from",
            view(SPEC, A, B, begun=0, parts=HELD_BY_ALL[:1]),
        ),
        case("group 1 begins at the start", view(SPEC, A, B, begun=0, parts=HELD_BY_ALL)),
        case(
            "group 1 begins after step 4",
            view(SPEC, A, B, begun=0, checkpoint=Stored(SAVED, 12, 12), parts=HELD_BY_ALL),
        ),
        case(
            "b has the checkpoint n on its disk",
            view(SPEC, A, B, begun=0, checkpoint=Stored(but(SAVED, node="b"), 12, 12), parts=HELD_BY_ALL),
        ),
        case(
            "waiting for x: only its own disk has the checkpoint n",
            view(SPEC, A, B, begun=0, checkpoint=Stored(but(SAVED, node="x"), 12, 12), parts=HELD_BY_ALL),
        ),
        # It trains.
        case("running on 2 nodes (np 2)", view(SPEC, A, B)),
        case("running on 2 nodes; 1 more needed for np 3", view(but(SPEC, np_min=3, np_max=3), A, B)),
        case("c joined (np 1:3)", view(ELASTIC, A, B, C)),
        case("3 nodes there (np 1:4); waiting a moment for more", view(but(ELASTIC, np_max=4), A, B, C)),
        case("running on 2 nodes; waiting for c to be warm", view(ELASTIC, A, B, but(C, is_warming=True))),
        case("running on 2 nodes; waiting for c to set up the script", view(but(ELASTIC, in_place=True), A, B, C)),
        case(
            "c joined (np 1:3); the ranks are to stop after a common step and save it",
            view(
                ELASTIC,
                but(A, restoring_group=1),
                B,
                C,
                handoff=Stored(HandoffRequest(group=1, after=0, reason=LOST), 12, 12),
            ),
        ),
        case("np is now 1", view(but(SPEC, np_min=1, np_max=1), A, B)),
        case("b was asked to leave", view(ELASTIC, A, but(B, is_draining=True))),
        case("b was excluded by an operator", view(but(ELASTIC, excluded=("b",)), A, B)),
        case("an operator asked for a restart", view(but(SPEC, restart_after=1), A, B)),
        case("paused by someone: nothing changes until it is resumed", view(but(SPEC, paused_by="someone"), A, B)),
        case("stopped by someone", view(but(SPEC, ending=Requested(what="stop", by="someone")), A, B)),
        case("group 1: 1 of 2 nodes have finished", view(SPEC, A, B, parts=(report(None),))),
        case("all 2 ranks finished in group 1", view(SPEC, A, B, parts=(report(None), report(None, B)))),
        case("the job has ended: all 2 ranks finished in group 1", view(SPEC, A, B, result=Stored(DONE, 12, 12))),
        # It breaks.
        case("lost b", view(ELASTIC, A)),
        case(
            "lost b; b is unfit: its health check failed: no GPU",
            view(ELASTIC, A, but(B, unfit=HealthCheckFailed(trouble="no GPU"))),
        ),
        case("rank 0 on a exited with code 1", view(SPEC, A, B, parts=(report(),))),
        case("rank 0 on a was killed by SIGKILL", view(SPEC, A, B, parts=(report(exit_code=None, signal=9),))),
        case(
            "rank 0 on a exited with code 1 of a broken connection; checking the lease of b",
            view(SPEC, A, B, parts=(report(is_peer_lost=True),)),
        ),
        case(
            "rank 0 on a exited with code 1; checking the lease of b",
            view(SPEC, A, B, parts=(report(),), suspects=(suspect(B, A),)),
        ),
        case(
            "rank 0 on a exited with code 1: 2 failures without progress; trying again within 1 s",
            view(SPEC, A, B, group=but(PAIR, restarts=1), parts=(report(),)),
        ),
        case(
            "rank 0 on a exited with code 1, after 3 restarts without progress",
            view(SPEC, A, B, group=but(PAIR, restarts=3), parts=(report(),)),
        ),
        case(
            "rank 0 on a exited with code 93, which asks for no restart",
            view(SPEC, A, B, parts=(report(exit_code=EXIT_NO_RESTART),)),
        ),
        case("the master's port on a was taken", view(SPEC, A, B, parts=(report(is_port_taken=True),))),
        case(
            "waiting for the checkpoint: a cannot read /x; trying again within 4 s",
            view(SPEC, A, B, group=but(PAIR, failed_reads=4), parts=(report(unreadable="/x"),)),
        ),
        case(
            f"running on 2 nodes (np 2); rank 1 on b {STILL} it sleeps at t.py:3 in f; 1 of 1 others wait for it",
            view(SPEC, A, B, parts=(still(A, 0, "waits"), still(B, 1, "sleeps"))),
        ),
        case("running on 2 nodes (np 2)", view(SPEC, A, B, parts=(still(A, 0, "waits", "over"),))),
        # Members do not reach each other.
        case(
            f"{APART}; rank 0 on a {STILL} it waits for others at t.py:3 in f, and so do all",
            view(ELASTIC, A, B, C, group=TRIO, suspects=CUT, parts=(STEPPED, still(A, 0, "waits"))),
        ),
        # Etcd has lost data, or was away.
        case(
            "etcd has lost data; waiting for all members to publish their cached records",
            replace(view(SPEC, but(A, cached=CachedRecords(spec=SPEC, group=PAIR)), B, group=None), spec=None),
        ),
        case(
            "etcd had lost data; all members are back",
            replace(view(SPEC, but(A, cached=CachedRecords(spec=SPEC, group=PAIR)), B, group=None), spec=None),
            4.0,
        ),
    ],
)
def test_a_plan_has_a_reason(sentence: str, shown: ClusterView, after_s: float, policy: Policy) -> None:
    seen = observe(observe(Observations(), shown, 100.0), shown, 100.0 + after_s)
    assert describe(plan(shown, seen, policy, 100.0 + after_s).reason) == sentence


def test_a_plan_without_the_job_or_after_an_outage_has_a_reason() -> None:
    lost = "etcd has lost the job, and no node has it cached"
    assert describe(plan(ClusterView(1, is_whole=True), Observations(), POLICY, 0.0).reason) == lost
    shown = view(SPEC, A)
    seen = replace(observe(Observations(), shown, 9.0), outage=Outage(9.0, 0))
    assert describe(plan(shown, seen, POLICY, 9.0).reason) == "etcd was away; waiting for b to return"


SETTLED = AgentState(ME, POLICY, cached=CachedRecords(spec=SPEC, group=None))
TOLD = Announced(np="2", has_joined=True)
COMPLETE = Incident(
    run="r",
    group=1,
    cause="lost",
    reason=LOST,
    members=(IncidentMember(node_id="a", nproc=1),),
    phases=Phases(first_step_s=1.0),
)
LEADS = replace(view(SPEC, A, B), leader=Stored(Leader(node_id="a", incarnation="i1"), 1, 1))


@pytest.mark.parametrize(
    ("told", "state", "sentences"),
    [
        (replace(TOLD, has_joined=False), replace(SETTLED, view=view(SPEC, A, group=None)), ["joined job job as a"]),
        (replace(TOLD, np=""), SETTLED, ["the job's np is 2; --np=3 given here is not used"]),
        (replace(TOLD, np="1"), SETTLED, ["np is now 2 (by someone)"]),
        (TOLD, replace(SETTLED, cached=CachedRecords(spec=SPEC, group=PAIR)), ["group 1: 2 ranks on a and b; lost x"]),
        (
            TOLD,
            replace(SETTLED, cached=CachedRecords(spec=SPEC, group=but(PAIR, members=(A.member,)))),
            ["group 1: 1 rank on a; lost x"],
        ),
        (TOLD, replace(SETTLED, cached=CachedRecords(spec=SPEC, group=WAIT)), ["group 1: no node trains; lost x"]),
        (TOLD, replace(SETTLED, trouble="no way"), ["a write was not answered: no way"]),
        (replace(TOLD, trouble="no way"), SETTLED, ["etcd takes writes again"]),
        (replace(TOLD, group=1), replace(SETTLED, view=LEADS), ["group 1 after 1.0 s: lost x; first step 1.0 s"]),
    ],
)
def test_news_is_told_once(told: Announced, state: AgentState, sentences: list[str]) -> None:
    told, new = announce(told, state, (COMPLETE,), now=0.0)
    assert new == tuple(sentences)
    assert announce(told, state, (COMPLETE,), now=0.0)[1] == ()


def test_a_reason_to_wait_is_told_when_it_changes() -> None:
    told = TOLD
    for reason, is_new in ((LOST, True), (LOST, False), (FINISHED, True), (LOST, True)):
        told, new = announce(told, replace(SETTLED, planned=Plan(None, reason)), now=0.0)
        assert new == ((describe(reason),) if is_new else ())
    acts = replace(SETTLED, planned=Plan(fx.Refresh(), FINISHED))
    assert announce(told, acts, now=0.0)[1] == ()


def test_nodes_that_have_not_reported_their_snapshots_are_named_only_if_they_are_late() -> None:
    """Each group begins with such a wait, for some milliseconds."""
    told, named = TOLD, list[str]()
    for second, who in enumerate(("a b", "a", "a", "a", "", "a", "a")):
        reason = Waiting(what="inventory", node_ids=tuple(who.split()))
        planned = Plan(None, reason) if who else Plan(fx.Refresh(), FINISHED)
        told, new = announce(told, replace(SETTLED, planned=planned), now=float(second))
        named += [f"{second}: {sentence}" for sentence in new]
    assert named == ["2: waiting for a to say what can be resumed from"]


def test_each_slow_rank_is_named_once_in_a_group() -> None:
    """Also after another one has been named."""

    def named(told: Announced, *own_s: float, number: int = 1) -> tuple[Announced, int]:
        nodes = (but(each, own_s=(own,)) for each, own in zip((A, B, C), own_s, strict=True))
        group = but(TRIO, number=number)
        shown = replace(view(ELASTIC, *nodes, group=group, parts=first_steps(group)), leader=LEADS.leader)
        told, new = announce(told, replace(SETTLED, view=shown), now=0.0)
        return told, len(new)

    told, count = named(TOLD, 0.9, 0.1, 0.1)
    assert count == 1
    told, count = named(told, 0.9, 0.9, 0.1)
    assert count == 1
    told, count = named(told, 0.9, 0.9, 0.1)
    assert count == 0
    assert named(told, 0.9, 0.9, 0.1, number=2)[1] == 2


def test_a_slow_rank_is_named_with_its_share_of_a_step() -> None:
    assert Straggler(1, "b", 0.9, 0.15).sentence == (
        "rank 1 on b is slow: 0.9 s of each step are its own work, 0.15 s the others'"
    )


ASKED = ev.PublishAsked(1, but(SAVED, copy=StateId(run="r", group=1, step=5)))
BEGUN = Stored(RestorePoint(group=2, copy=SAVED.copy, lineage=(SAVED.copy,), checkpoint=SAVED), 11, 11)


def refused(asked: ev.PublishAsked, shown: ClusterView) -> str:
    verdict = settle(asked, shown, "r")
    assert isinstance(verdict, fx.AnswerPublish)
    assert verdict.checkpoint is None
    assert verdict.reason is not None
    return describe(verdict.reason)


def test_a_refused_commit_has_a_reason() -> None:
    group = Stored(but(PAIR, number=2), 10, 10)
    over = replace(view(SPEC, A, B), group=group)
    assert refused(ASKED, over) == "group 2 has been formed since"
    now = replace(over, restore_point=BEGUN, checkpoint=Stored(SAVED, 12, 12))
    cut_off = "step 5 of group 1 is not of this job's history"
    assert refused(replace(ASKED, group=2), replace(now, checkpoint=None)) == cut_off
    assert refused(replace(ASKED, group=2), now) == f"{cut_off}: it continues from another copy"
    same = replace(ASKED, group=2, checkpoint=but(SAVED, private=".other"))
    assert refused(same, now) == "step 4 of group 1 is committed already"
    rollback = replace(same, checkpoint=but(same.checkpoint, is_rollback=True))
    assert refused(rollback, now) == "step 4 of group 1 is not older than what it replaces"


def leaving(state: AgentState, event: ev.Event) -> tuple[int, str]:
    state, _ = step(state, event, 0.0)
    assert state.leaving is not None
    return state.leaving.code, describe(state.leaving.reason)


NEW = AgentState(ME, POLICY)
RAN = replace(NEW, workers=LocalWorkers(group=1))
TAKEN = "node id 'a' is held by a living agent (pid 7, address 10.0.0.2)"
HOLDER = fx.NodeIdHolder(but(B, pid=7, address="10.0.0.2"), lease_id=1, is_alive=True)


def ended(**changed: object) -> ev.ViewChanged:
    return ev.ViewChanged(ClusterView(1, is_whole=True, result=Stored(but(DONE, **changed), 1, 1)))


@pytest.mark.parametrize(
    ("state", "event", "code", "sentence"),
    [
        (
            NEW,
            ended(),
            0,
            (
                "job job is finished (succeeded: all 2 ranks finished in group 1); elastic-agent reset lets it "
                "continue from its newest checkpoint, if any; --fresh starts it over"
            ),
        ),
        (RAN, ended(), 0, "job job succeeded: all 2 ranks finished in group 1"),
        (RAN, ended(summary="no incidents"), 0, "job job succeeded: all 2 ranks finished in group 1; no incidents"),
        (RAN, ended(succeeded=False), 0, "job job stopped: all 2 ranks finished in group 1"),
        (RAN, ended(succeeded=False, exit_code=76), 76, "job job failed: all 2 ranks finished in group 1"),
        (NEW, ev.StopAsked(15), 0, "left the job, as it was asked to"),
        (NEW, ev.StopAsked(2), 130, "stopped by SIGINT"),
        (
            replace(NEW, pending=fx.Register(NODE)),
            ev.WriteAnswered(fx.Register(NODE), ev.Outcome.REFUSED, holder=HOLDER),
            2,
            f"{TAKEN}: choose another --node_id, or stop that agent",
        ),
    ],
)
def test_an_agent_reports_why_it_ends(state: AgentState, event: ev.Event, code: int, sentence: str) -> None:
    assert leaving(state, event) == (code, sentence)


def test_an_unfit_node_reports_why() -> None:
    assert replace(NEW, health="its GPU is gone").node.unfit == HealthCheckFailed(trouble="its GPU is gone")
    assert NEW.node.unfit is None
    stuck = replace(NEW, workers=LocalWorkers(group=3, is_stuck=True))
    assert stuck.node.unfit == ProcessesLeft(group=3)


def goes(
    *,
    nodes: tuple[Node, ...] = (),
    held: int = 0,
    held_run: str = SPEC.run,
    reached: int = 0,
    saved: int = 0,
    is_over: bool = False,
    leads: bool = True,
    workers: LocalWorkers | None = None,
) -> str:
    """What it says that leaves a job, as a signal asked it to, once its workers are gone."""
    copy = StateId(run=held_run, group=1, step=held)
    committed = Checkpoint(copy=but(copy, step=saved), name="n", private="", manifest_sha256="", kept=(), superseded=())
    view = ClusterView(
        1,
        is_whole=leads,
        nodes=tuple(Stored(each, 1, 1) for each in nodes),
        result=Stored(DONE, 1, 1) if is_over else None,
    )
    known = CachedRecords(spec=SPEC, group=None, checkpoint=committed if saved else None)
    copies = (Replica(copy=copy, world_size=1, has_common=True, parts=(0,)),) if held else ()
    state = replace(NEW, view=view, cached=known, copies=copies, leaving=Leaving(0, AskedToEnd()))
    state = replace(state, workers=workers or LocalWorkers(before=Reached(1, reached)))
    state, effects = step(state, ev.Ticked(), 0.0)
    (leave,) = [each for each in effects if isinstance(each, fx.Deregister)]
    state = replace(state, view=replace(view, is_whole=False))  # it does not lead any more
    _, effects = step(state, ev.WriteAnswered(leave, ev.Outcome.DONE), 0.0)
    (told,) = [describe_exit(each) for each in effects if isinstance(each, fx.Exit)]
    return told.removeprefix("left the job, as it was asked to")


def test_the_last_node_to_leave_reports_what_only_its_memory_had() -> None:
    all_of_them = "; 9 steps up to step 9 given up: there is no checkpoint"
    assert goes(held=9, saved=5) == "; 4 steps up to step 9 given up: the newest checkpoint is of step 5"
    assert goes(held=9) == goes(reached=9) == goes(held=7, reached=9) == all_of_them
    assert goes(held=9, nodes=(NEW.node,)) == all_of_them, "its own record is still to be seen"
    assert goes(held=5, saved=5) == goes(saved=5) == goes() == ""
    assert goes(held=9, nodes=(but(NODE, node_id="other"),)) == "", "that one has it too, or goes on"
    assert goes(held=9, is_over=True) == ""
    assert goes(held=9, held_run="other") == "", "that is of a run before"
    assert goes(held=9, leads=False) == "", "it does not know who is there"


def test_a_signal_sent_to_the_ranks_as_well_is_reported_with_its_cost() -> None:
    ended = ev.WorkerExited(group=1, local_rank=0, exit_code=None, signal=15, stderr_tail="", step=9, at=1.0)
    workers = LocalWorkers(group=1, step=9, exits=(ended,))
    said = goes(workers=workers)
    assert said.startswith(
        "; 9 steps up to step 9 given up: there is no checkpoint, and SIGTERM ended the ranks before"
    )
    assert "SIGTERM" not in goes(workers=replace(workers, is_asked_to_end=True)), "the agent did that itself"
