"""The output of `status` for a job in each of its states."""

from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import pytest
from nodes import NODE
from reasons import FINISHED, LOST
from rich.console import Console
from statuses import first_steps, statuses

from agent.core.failures import ExitReport, Failure
from agent.core.incident import Incident, IncidentMember, Phases, RankStall, StallReport
from agent.core.model import Group, HandoffRequest, Member, Quiesced, Result, Spec, Suspicion
from agent.core.reasons import HealthCheckFailed, NodesLost, Requested
from agent.core.records import Identity, Stored
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.core.view import ClusterView
from agent.observe.status import job_status, render

MEMBER = Member(node_id="a", incarnation="i1", address="10.0.0.1", nproc=1, port=1, link=2)
SPEC = Spec(run="r", np_min=1, np_max=3, secret="s", changed_by="test", changed_at=0.0)
GROUP = Group(run="r", number=4, members=(MEMBER,), cause="start", reason=LOST, restarts=0, step=0, reached=1)
REQUEST = HandoffRequest(group=4, after=6, reason=Requested(what="np", np="3"))
COMMITTED = Checkpoint(
    number=6,
    run="r",
    copy=StateId(run="r", group=4, step=120),
    name="r-g000004-s000000120",
    private=".r-g000004-s000000120.00000001",
    manifest_sha256="ab",
    kept=(),
    superseded=(),
)
TRAINING = ClusterView(
    revision=100,
    is_whole=True,
    spec=Stored(SPEC, 1, 1),
    nodes=(Stored(NODE, 5, 5, 7),),
    group=Stored(GROUP, 10, 10),
    restore_point=Stored(RestorePoint(group=4, copy=None, lineage=(), checkpoint=None), 11, 11),
    checkpoint=Stored(COMMITTED, 12, 12),
    handoff=Stored(REQUEST, 13, 13),
)


def shown(view: ClusterView) -> str:
    out = io.StringIO()
    for part in render(job_status("job", view)):
        Console(file=out, highlight=False).print(part, soft_wrap=True)
    return out.getvalue()


def committed(**changed: object) -> Stored[Checkpoint]:
    return Stored(msgspec.structs.replace(COMMITTED, **changed), 12, 14)


def quiesced(member: Member) -> Quiesced:
    return Quiesced(group=4, node_id=member.node_id, incarnation=member.incarnation, number=7, step=9)


def test_an_open_handoff_request_is_shown_with_its_reason() -> None:
    assert job_status("job", TRAINING).handoff == "np is now 3"
    assert "\nhandoff requested: np is now 3\n" in shown(TRAINING)


@pytest.mark.parametrize(
    ("why", "view"),
    [
        ("there is no request", replace(TRAINING, handoff=None)),
        (
            "the next group has been formed",
            replace(TRAINING, group=Stored(msgspec.structs.replace(GROUP, number=5), 10, 15)),
        ),
        (
            "all ranks have quiesced, and a checkpoint was committed",
            replace(TRAINING, checkpoint=committed(number=7, handoff=7)),
        ),
        (
            "all ranks have quiesced, with snapshots",
            replace(TRAINING, statuses=statuses(*map(quiesced, GROUP.members))),
        ),
        ("nobody trains", replace(TRAINING, group=Stored(msgspec.structs.replace(GROUP, members=()), 10, 10))),
        (
            "the job has ended",
            replace(
                TRAINING,
                result=Stored(Result(run="r", group=4, succeeded=True, exit_code=0, reason=FINISHED), 16, 16),
            ),
        ),
    ],
)
def test_no_handoff_is_shown_without_an_open_request(why: str, view: ClusterView) -> None:
    assert job_status("job", view).handoff == "", why
    assert "handoff requested" not in shown(view), why


def test_a_request_stays_open_while_only_checkpoints_of_earlier_requests_are_committed() -> None:
    for earlier in (committed(number=8), committed(number=8, handoff=5), None):
        assert job_status("job", replace(TRAINING, checkpoint=earlier)).handoff == "np is now 3"


def test_a_request_stays_open_while_ranks_have_quiesced_only_for_an_earlier_one() -> None:
    earlier = tuple(msgspec.structs.replace(quiesced(member), number=6) for member in GROUP.members)
    assert job_status("job", replace(TRAINING, statuses=statuses(*earlier))).handoff == "np is now 3"


def test_the_only_node_with_the_checkpoint_is_named() -> None:
    view = replace(TRAINING, checkpoint=committed(node="b"))
    assert job_status("job", view).checkpoint_node == "b"
    assert "\nnewest checkpoint: step 120, on the disk of b only\n" in shown(view)


def test_a_shared_checkpoint_is_shown_without_a_node() -> None:
    shared, none = replace(TRAINING, checkpoint=committed()), replace(TRAINING, checkpoint=None)
    assert job_status("job", shared).checkpoint_node is job_status("job", none).checkpoint_node is None
    assert "\nnewest checkpoint: step 120\n" in shown(shared)
    assert "checkpoint" not in shown(none)


INCIDENT = Incident(
    run="r",
    group=4,
    cause="lost",
    reason=NodesLost(node_ids=("b",), unfit=(("b", HealthCheckFailed(trouble="[/x]")),)),
    members=(IncidentMember(node_id="a", nproc=1),),
    phases=Phases(detect_s=1.0, first_step_s=0.5),
    step_s=0.25,
    replayed_steps=2,
)


def asked(**changed: object) -> ClusterView:
    return replace(TRAINING, nodes=(Stored(NODE, 5, 5),), spec=Stored(msgspec.structs.replace(SPEC, **changed), 1, 9))


def test_the_incident_of_the_group_is_shown_in_one_line_with_its_phases() -> None:
    view = replace(TRAINING, incident=Stored(INCIDENT, 14, 14))
    reason = "lost b; b is unfit: its health check failed: [/x]"
    assert f"\ngroup 4 after 1.5 s: {reason}; detect 1.0, first step 0.5 s; 2 replayed steps\n" in shown(view)
    assert "\na step takes 0.2 s\n" in shown(view)
    assert "cause of this group" not in shown(view)


def test_the_cause_is_shown_for_a_group_without_an_incident() -> None:
    assert "\ncause of this group: start: lost x\n" in shown(TRAINING)


def test_a_stalled_rank_is_named_with_its_code_location_while_the_job_trains() -> None:
    rank = RankStall(rank=0, step=3, doing="sleeps", where="train.py:3 in f", stack="")
    stall = StallReport(
        group=4, node_id="a", incarnation="i1", stage="suspicious", for_s=61.0, limit_s=60.0, ranks=(rank,)
    )
    view = replace(asked(), statuses=statuses(stall))
    assert "rank 0 on a made no step after step 3 for 61 s: it sleeps at train.py:3 in f\n" in shown(view)
    (told,) = job_status("job", view).stalls
    assert (told.rank, told.node_id, told.step, told.for_s, told.where) == (0, "a", 3, 61.0, "train.py:3 in f")
    over = replace(view, statuses=statuses(msgspec.structs.replace(stall, stage="over")))
    ended = Stored(Result(run="r", group=4, succeeded=True, exit_code=0, reason=FINISHED), 16, 16)
    for another in (over, replace(view, result=ended)):
        assert job_status("job", another).stalls == []
        assert "made no step" not in shown(another)


def test_while_a_retry_backs_off_the_job_has_not_given_up() -> None:
    """The number of failures that are allowed is an option of the agents, which a reader of etcd does not know."""
    failure = Failure(rank=0, local_rank=0, exit_code=7, signal=None, is_peer_lost=False, tail="", at=1.0)
    failed = ExitReport(group=4, node_id="a", incarnation="i1", step=0, failure=failure)
    group, here = msgspec.structs.replace(GROUP, restarts=3), msgspec.structs.replace(NODE, incarnation="i1")
    view = replace(TRAINING, handoff=None, nodes=(Stored(here, 1, 1),))
    reason = job_status("job", replace(view, group=Stored(group, 10, 10), statuses=statuses(failed))).reason
    assert reason.endswith("trying again within 2 s"), reason


def test_a_job_with_fewer_nodes_than_it_may_have_waits_a_moment_for_more() -> None:
    view = replace(TRAINING, group=None, handoff=None, restore_point=None, checkpoint=None, nodes=(Stored(NODE, 1, 1),))
    assert "waiting a moment for more" in job_status("job", view).reason


def test_a_straggler_is_named() -> None:
    other = msgspec.structs.replace(MEMBER, node_id="b")
    nodes = [msgspec.structs.replace(NODE, node_id=name, own_s=(own_s,)) for name, own_s in (("a", 0.1), ("b", 0.4))]
    group = msgspec.structs.replace(GROUP, members=(MEMBER, other))
    view = replace(asked(), group=Stored(group, 10, 10), nodes=tuple(Stored(node, 5, 5) for node in nodes))
    view = replace(view, statuses=statuses(*first_steps(group)))
    assert "\nrank 1 on b is slow: 0.4 s of each step are its own work, 0.1 s the others'\n" in shown(view)


def test_a_job_that_was_stopped_is_neither_a_success_nor_a_failure() -> None:
    result = Result(
        run="r", group=4, succeeded=False, exit_code=0, reason=Requested(what="stop", by="ann"), summary="no incidents"
    )
    assert shown(replace(TRAINING, result=Stored(result, 16, 16))).startswith(
        "job job  stopped: stopped by ann; no incidents\n"
    )


def test_a_job_that_was_reset_waits_for_agents_and_has_not_failed() -> None:
    by = Requested(what="reset", by="ann")
    result = Result(run="r", group=4, succeeded=False, exit_code=1, reason=by, is_reset=True)
    stopped = asked(ending=Requested(what="stop", by="bob"))
    status = job_status("job", replace(stopped, nodes=(), result=Stored(result, 16, 16)))
    assert (status.state, status.exit_code, status.stopped_by) == ("waiting", None, "")
    assert status.reason == "reset by ann; its next agents begin a new run"


def test_a_job_without_agents_does_not_train() -> None:
    status = job_status("job", replace(TRAINING, nodes=()))
    assert (status.state, status.reason) == ("waiting", "no agent is running; the next agents continue the job")
    ends = replace(asked(ending=Requested(what="stop", by="bob")), nodes=())
    assert job_status("job", ends).reason == "no agent is running; the next agents end the job: stopped by bob"


def test_nodes_that_an_operator_excluded_or_drained_are_marked() -> None:
    view = asked(excluded=("a", "z"), drained=(Identity("a", "i1"),))
    assert [node.note for node in job_status("job", view).nodes] == ["leaving; excluded"]
    assert "\nexcluded: a, z\n" in shown(view)


def test_a_node_without_ranks_is_a_spare_unless_it_is_excluded() -> None:
    nodes = tuple(
        Stored(msgspec.structs.replace(NODE, node_id=name, incarnation=name, standby="1 warm"), 5, 5) for name in "bc"
    )
    lines = shown(replace(asked(excluded=("c",)), nodes=nodes)).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:6]] for line in lines if "10.0.0.1" in line]
    assert rows == [["b", "10.0.0.1", "spare", "1 warm", ""], ["c", "10.0.0.1", "-", "1 warm", "excluded"]]


def test_a_new_agent_under_the_id_of_a_drained_one_is_not_leaving() -> None:
    assert [node.note for node in job_status("job", asked(drained=(Identity("a", "i0"),))).nodes] == [""]


def test_the_user_who_stopped_the_job_is_named_until_it_has_ended() -> None:
    view = asked(ending=Requested(what="stop", by="ann@host"))
    assert "\nstopping, requested by ann@host\n" in shown(view)
    ended = Stored(Result(run="r", group=4, succeeded=True, exit_code=0, reason=FINISHED), 16, 16)
    assert "stopping" not in shown(replace(view, result=ended))


def test_a_node_that_cannot_reach_the_members_is_not_admitted() -> None:
    outside = msgspec.structs.replace(MEMBER, node_id="b", incarnation="i2")
    node_b = msgspec.structs.replace(NODE, node_id="b", incarnation="i2")
    nodes = (Stored(NODE, 5, 5, 7), Stored(node_b, 6, 6, 8))
    said = Suspicion(
        node_id="a",
        incarnation="i1",
        by_node_id="b",
        by_incarnation="i2",
        is_lost=False,
        why="no answer to 3 heartbeats",
    )
    view = replace(TRAINING, nodes=nodes, suspects=(Stored(said, 20, 20, 7),))
    status = {each.node_id: each for each in job_status("job", view).nodes}
    assert status["b"].note == "not admitted: it cannot reach a: no answer to 3 heartbeats"
    assert status["a"].note == "", "it is a member, and nobody who is one accuses it"
    both = msgspec.structs.replace(GROUP, members=(MEMBER, outside))
    status = {each.node_id: each for each in job_status("job", replace(view, group=Stored(both, 10, 10))).nodes}
    assert status["a"].note == "suspected by b: no answer to 3 heartbeats"
    assert status["b"].note == ""
