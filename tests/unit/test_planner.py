"""The planner, as a table: a view of the job in, the next group and its reason out."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL

import msgspec
import pytest
from nodes import NODE, POLICY
from reasons import LOST, left, lost
from statuses import statuses

from agent.core.budget import back_off_s, exit_code, is_peer_lost, tally
from agent.core.causes import first_failure, with_early_end
from agent.core.effects import Refresh, RestoredRecords
from agent.core.failures import ExitReport, Failure
from agent.core.incident import TransitionReport
from agent.core.member_status import MemberStatus
from agent.core.model import CachedRecords, Group, HandoffRequest, Member, Node, Quiesced, Result, Spec
from agent.core.observations import Observations, Outage, Restart, observe
from agent.core.planner import plan
from agent.core.policy import Policy
from agent.core.proposals import STEADY_S, Plan, growth_wait_s
from agent.core.reasons import (
    FailedWorker,
    NodesJoined,
    NodesMissing,
    NotRetried,
    Requested,
    Training,
    Waiting,
    WorkersFailed,
)
from agent.core.records import Identity, Stored
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.core.view import ClusterView


def spec(np_min: int, np_max: int | None = None) -> Stored[Spec]:
    value = Spec(run="r", np_min=np_min, np_max=np_max or np_min, secret="s", changed_by="test", changed_at=0.0)
    return Stored(value, 1, 1)


def node(name: str, age: int, incarnation: str = "i1") -> Stored[Node]:
    value = msgspec.structs.replace(NODE, node_id=name, incarnation=incarnation, port=4000 + age, link=5000 + age)
    return Stored(value, age, age)


def member(name: str, incarnation: str = "i1") -> Member:
    return Member(node_id=name, incarnation=incarnation, address="10.0.0.1", nproc=1, port=1, link=2)


def group(*names: str, number: int = 1, reached: int | None = None, restarts: int = 0, step: int = 0) -> Stored[Group]:
    value = Group(
        run="r",
        number=number,
        members=tuple(member(name) for name in names),
        cause="start" if names else "wait",
        reason=LOST,
        restarts=restarts,
        step=step,
        counted_from=step,
        reached=len(names) if reached is None else reached,
    )
    return Stored(value, 10, 10)


def failed(
    name: str, *, peer_lost: bool = False, step: int = 0, code: int = 1, at: float = 0.0, step_s: float = 60.0
) -> ExitReport:
    """A step takes as long as the window, so that one is progress."""
    failure = Failure(rank=0, local_rank=0, exit_code=code, signal=None, is_peer_lost=peer_lost, tail="", at=at)
    return ExitReport(group=1, node_id=name, incarnation="i1", step=step, failure=failure, step_s=step_s)


def finished(name: str) -> ExitReport:
    return ExitReport(group=1, node_id=name, incarnation="i1", step=9, failure=None, step_s=60.0)


def view(
    job: Stored[Spec], *nodes: Stored[Node], now: Stored[Group] | None = None, reports: tuple[ExitReport, ...] = ()
) -> ClusterView:
    """A view in which all nodes reach the current group."""
    group_number = now.value.number if now is not None else 0
    reaching = [
        replace(each, value=msgspec.structs.replace(each.value, reachable_group=group_number)) for each in nodes
    ]
    return ClusterView(
        revision=100,
        is_whole=True,
        spec=job,
        group=now,
        nodes=tuple(sorted(reaching, key=lambda n: n.create_revision)),
        statuses=statuses(*reports),
        restore_point=Stored(RestorePoint(group=now.value.number, copy=None, lineage=(), checkpoint=None), 11, 11)
        if now
        else None,
    )


def decide(
    seen_view: ClusterView, *, after_s: float = 0.0, read_after_s: float | None = None, policy: Policy = POLICY
) -> Plan:
    """Plan `after_s` seconds after everything in the view was first seen, having read it again when that is given."""
    read_at = 100.0 + read_after_s if read_after_s is not None else None
    seen = replace(observe(Observations(), seen_view, 100.0), read_at=read_at)
    return plan(seen_view, observe(seen, seen_view, 100.0 + after_s), policy, 100.0 + after_s)


def names(planned: Plan) -> list[str]:
    assert isinstance(planned.action, Group), planned
    return [m.node_id for m in planned.action.members]


def code_of(planned: Plan) -> int:
    """The agents' exit code, once what they hold in memory is saved."""
    assert isinstance(planned.action, Spec), planned
    assert planned.action.ending is not None
    return exit_code(planned.action.ending)


def test_a_first_group_is_formed_at_once_when_all_are_there() -> None:
    planned = decide(view(spec(2), node("b", 5), node("a", 7)))
    assert names(planned) == ["b", "a"], "by age, not by name"
    assert isinstance(planned.action, Group)
    assert planned.action.number == 1


def at(position: int, stored: Stored[Node]) -> Stored[Node]:
    """The node, with a place in the operator's list of machines."""
    return replace(stored, value=msgspec.structs.replace(stored.value, position=position))


def test_nodes_that_come_together_are_ranked_as_the_operator_lists_them() -> None:
    listed = (at(2, node("b", 5)), at(3, node("c", 6)), at(1, node("a", 7)))
    assert names(decide(view(spec(3), *listed))) == ["a", "b", "c"]
    assert names(decide(view(spec(2, 3), *listed, now=group("b", "c")), after_s=1.0)) == ["b", "c", "a"], "ranks stay"


def test_a_first_group_waits_for_its_fixed_size_and_states_how_many_are_missing() -> None:
    planned = decide(view(spec(2), node("a", 5)), after_s=1000)
    assert planned.action is None
    assert planned.reason == NodesMissing(missing=1, needed=2, here=("a",))


def test_between_min_and_max_the_group_settles_first() -> None:
    seen = view(spec(1, 3), node("a", 5), node("b", 6))
    early = decide(seen, after_s=0.5)
    assert early.action is None
    assert early.wake_at == pytest.approx(101.0)
    assert names(decide(seen, after_s=1.0)) == ["a", "b"]


def test_settling_ends_even_if_nodes_keep_arriving() -> None:
    seen = observe(Observations(), view(spec(1, 9), node("a", 1)), 0.0)
    now = 0.0
    for age in range(2, 8):
        now += 0.9
        crowd = view(spec(1, 9), *(node(f"n{i}", i) for i in range(1, age)))
        seen = observe(seen, crowd, now)
        planned = plan(crowd, seen, POLICY, now)
    assert planned.action is not None, "five windows are over"


def test_more_nodes_than_np_are_spares() -> None:
    assert names(decide(view(spec(2), node("a", 1), node("b", 2), node("c", 3)))) == ["a", "b"]


def test_a_lost_member_of_a_fixed_job_makes_a_wait_record() -> None:
    planned = decide(view(spec(2), node("b", 2), now=group("a", "b")))
    assert isinstance(planned.action, Group)
    assert planned.action.members == ()
    assert (planned.action.number, planned.action.cause, planned.action.reached) == (2, "wait", 2)
    assert planned.reason == lost("a")


def test_a_waiting_job_names_the_missing_and_the_lost_nodes() -> None:
    planned = decide(view(spec(2), node("b", 2), now=group(number=2, reached=2)))
    assert planned.reason == NodesMissing(missing=1, needed=2, here=("b",), last=LOST)


def test_a_spare_takes_the_place_of_a_lost_member_at_once() -> None:
    planned = decide(view(spec(2), node("b", 2), node("c", 3), now=group("a", "b")))
    assert names(planned) == ["b", "c"]


def test_an_elastic_job_goes_on_with_the_rest_in_their_order() -> None:
    planned = decide(view(spec(1, 3), node("c", 1), node("a", 3), now=group("c", "b", "a")))
    assert names(planned) == ["c", "a"]


def test_the_same_node_id_under_another_incarnation_is_another_member() -> None:
    planned = decide(view(spec(1, 3), node("a", 1), node("b", 9, "i2"), now=group("a", "b")))
    assert names(planned) == ["a", "b"]
    assert isinstance(planned.action, Group)
    assert planned.action.members[1].incarnation == "i2"
    assert planned.action.cause == "lost"


def test_a_newcomer_whose_name_sorts_first_comes_last() -> None:
    seen = view(spec(1, 3), node("m", 1), node("a", 9), now=group("m"))
    assert decide(seen).action is None
    assert names(decide(seen, after_s=1.0)) == ["m", "a"]


def test_np_raised_is_a_goal_not_a_stop() -> None:
    planned = decide(view(spec(4), node("a", 1), node("b", 2), node("c", 3), now=group("a", "b")), after_s=1000)
    assert planned.action is None
    assert planned.reason == Training(nodes=2, np="4", missing=1)


def test_a_group_that_has_grown_has_reached_more() -> None:
    """By so many it is bound from then on."""
    planned = decide(view(spec(1, 3), node("a", 1), node("b", 2), now=group("a")), after_s=60.0)
    assert names(planned) == ["a", "b"]
    assert isinstance(planned.action, Group)
    assert planned.action.reached == 2


def test_that_another_node_is_lost_takes_nothing_off_the_wait_for_the_next_growth() -> None:
    last = group("a", "b", "c")
    flapped = replace(last, value=msgspec.structs.replace(last.value, cause="lost", flaps=2))
    planned = decide(view(spec(1, 4), node("a", 1), node("b", 2), now=flapped))
    assert names(planned) == ["a", "b"]
    assert isinstance(planned.action, Group)
    assert planned.action.flaps == 2


def test_a_raised_np_that_was_never_reached_does_not_bind() -> None:
    planned = decide(view(spec(4), node("b", 2), node("c", 3), now=group("a", "b")))
    assert names(planned) == ["b", "c"], "two is what was reached"


def test_np_lowered_drops_the_last_members() -> None:
    planned = decide(view(spec(2), node("a", 1), node("b", 2), node("c", 3), now=group("a", "b", "c")))
    assert names(planned) == ["a", "b"]
    assert isinstance(planned.action, Group)
    assert (planned.action.cause, planned.action.reached) == ("scale", 2)


def test_np_lowered_to_what_is_left_ends_a_wait() -> None:
    assert names(decide(view(spec(1), node("b", 2), now=group(number=2, reached=2)))) == ["b"]


def test_a_worker_failure_restarts_the_same_members_and_counts_once() -> None:
    both = (failed("a"), failed("b", at=1.0))
    planned = decide(view(spec(2), node("a", 1), node("b", 2), now=group("a", "b"), reports=both))
    assert names(planned) == ["a", "b"]
    assert isinstance(planned.action, Group)
    assert (planned.action.cause, planned.action.restarts) == ("failed", 1)


def test_failures_without_progress_are_answered_ever_more_slowly() -> None:
    """What they need may be time; the first is answered at once."""
    waits = []
    for used in range(3):
        seen = view(spec(1), node("a", 1), now=group("a", restarts=used), reports=(failed("a"),))
        planned = decide(seen)
        waits.append(0.0 if planned.wake_at is None else planned.wake_at - 100.0)
        assert names(decide(seen, after_s=waits[-1])) == ["a"]
    assert waits == [0.0, 0.5, 1.0]


def test_a_pause_does_not_keep_lost_records_lost() -> None:
    """Etcd is empty and a member is gone: the next group is written, and with it the pause."""
    paused = msgspec.structs.replace(spec(1, 3).value, paused_by="somebody")
    told = msgspec.structs.replace(
        node("b", 2).value, cached=CachedRecords(spec=paused, group=group("a", "b", number=6).value)
    )
    restored = decide(ClusterView(revision=100, is_whole=True, nodes=(Stored(told, 2, 2),)), after_s=4.0)
    assert names(restored) == ["b"]
    assert restored.restored == RestoredRecords(paused, None, None)


def test_a_job_that_etcd_has_lost_before_its_first_group_waits_for_nodes_again() -> None:
    told = msgspec.structs.replace(node("a", 2).value, cached=CachedRecords(spec=spec(2).value, group=None))
    planned = decide(replace(view(spec(2), Stored(told, 2, 2)), spec=None), after_s=POLICY.lease_ttl_s + 1.0)
    assert names(planned) == []
    assert planned.restored is not None
    assert planned.restored.spec == spec(2).value


@pytest.mark.parametrize(("revision", "older"), [(1, ()), (4, ("a",)), (5, ("a", "b"))])
def test_a_leader_whose_agent_was_restarted_waits_for_older_nodes(revision: int, older: tuple[str, ...]) -> None:
    """For one lease length since its first view. Nodes that were registered after it have read what it reads."""
    shown = view(spec(3), node("a", 4), node("b", 5), node("c", 6))
    seen = replace(observe(Observations(), shown, 100.0), restart=Restart(revision, 98.0))
    due = 98.0 + POLICY.lease_ttl_s
    planned = plan(shown, seen, POLICY, due - 0.1)
    assert names(plan(shown, seen, POLICY, due)) == ["a", "b", "c"]
    if older:
        assert planned == Plan(None, Waiting(what="newer records", node_ids=older), due)
    else:
        assert names(planned) == ["a", "b", "c"]


def test_the_ranks_of_a_domain_follow_each_other_and_rank_0_stays() -> None:
    def within(domain: str, stored: Stored[Node]) -> Stored[Node]:
        value = msgspec.structs.replace(stored.value, domain=domain, reachable_group=1)
        return Stored(value, stored.create_revision, stored.mod_revision)

    nodes = [within(domain, node(name, age)) for age, (name, domain) in enumerate(zip("abcd", "xyxy", strict=True), 1)]
    assert names(decide(view(spec(4), *nodes))) == ["a", "c", "b", "d"]
    assert names(decide(view(spec(2, 4), *nodes, now=group("b", "a")))) == ["b", "d", "a", "c"]


def test_a_member_that_is_back_as_another_is_not_waited_for() -> None:
    """Right after an outage: the old incarnation cannot return."""
    seen = view(spec(1, 2), node("a", 1), node("b", 9, "i2"), now=group("a", "b"))
    planned = plan(seen, replace(observe(Observations(), seen, 100.0), outage=Outage(99.0, 9)), POLICY, 100.0)
    assert names(planned) == ["a", "b"]


@pytest.mark.parametrize(("step_s", "refills_at"), [(30.0, 9), (20.0, 10), (60.0, 8), (600.0, 8), (0.0, 11)])
def test_progress_refills_the_budget(step_s: float, refills_at: int) -> None:
    """So many new steps after the 7th as take a minute, one at least; none is enough where nobody knows that."""
    for step in range(8, 11):
        after = (failed("a", step=step, step_s=step_s),)
        planned = decide(view(spec(1), node("a", 1), now=group("a", restarts=3, step=7), reports=after))
        if step < refills_at:
            assert code_of(planned) == 76
        else:
            assert isinstance(planned.action, Group)
            assert (planned.action.restarts, planned.action.counted_from, planned.action.step) == (1, step, step)


@pytest.mark.parametrize(
    ("step", "ran_s", "restoring_group", "wanted"),
    [(0, 3600.0, 0, Group), (0, 3599.0, 0, Spec), (7, 3600.0, 0, Spec), (0, 3600.0, 1, Spec)],
)
def test_time_until_the_failure_is_progress_only_for_scripts_that_commit_nothing(
    step: int, ran_s: float, restoring_group: int, wanted: type
) -> None:
    """One that asks where to begin does commit."""
    place = node("a", 1)
    place = replace(place, value=msgspec.structs.replace(place.value, restoring_group=restoring_group))
    trains = view(spec(1), place, now=group("a", restarts=3, step=step))
    fails = replace(trains, statuses=statuses(failed("a", step=step)))
    seen = observe(observe(Observations(), trains, 100.0), fails, 100.0 + ran_s)
    assert isinstance(plan(fails, observe(seen, fails, 102.0 + ran_s), POLICY, 102.0 + ran_s).action, wanted)


def test_replayed_steps_are_no_progress_and_a_spent_budget_ends_the_job() -> None:
    after = (failed("a", step=7, code=5),)
    planned = decide(view(spec(1), node("a", 1), now=group("a", restarts=3, step=7), reports=after))
    assert code_of(planned) == 76
    first = FailedWorker(node_id="a", rank=0, exit_code=5)
    assert planned.reason == NotRetried(first=first, why="budget", restarts=3)


def test_without_a_budget_the_job_ends_with_the_workers_own_code() -> None:
    policy = replace(POLICY, max_restarts=0)
    planned = decide(view(spec(1), node("a", 1), now=group("a"), reports=(failed("a", code=5),)), policy=policy)
    assert code_of(planned) == 5


def test_a_worker_can_ask_for_no_restart() -> None:
    planned = decide(view(spec(1), node("a", 1), now=group("a"), reports=(failed("a", code=93),)))
    assert code_of(planned) == 93, "which tells a scheduler the same"


def test_a_rank_that_left_as_rank_0_did_is_not_the_cause() -> None:
    left, asked = (failed(name, code=93, peer_lost=name == "b") for name in "ba")
    nodes = node("a", 1), node("b", 2)
    waiting = decide(view(spec(2), *nodes, now=group("a", "b"), reports=(left,)))
    assert waiting.action is None
    assert isinstance(waiting.reason, Waiting)
    assert waiting.reason.node_ids == ("a",)
    planned = decide(view(spec(2), *nodes, now=group("a", "b"), reports=(left, asked)))
    assert isinstance(planned.action, Spec)
    assert isinstance(planned.action.ending, NotRetried)
    assert planned.action.ending.first.node_id == "a"


def test_a_broken_connection_waits_for_its_cause_until_a_lease_has_surely_ended() -> None:
    """Then everything is read once more, since what is watched may come late."""
    seen = view(spec(2), node("a", 1), node("b", 2), now=group("a", "b"), reports=(failed("b", peer_lost=True),))
    waiting = decide(seen, after_s=4.5)
    assert waiting.action is None
    assert waiting.wake_at == pytest.approx(104.6)
    assert isinstance(waiting.reason, Waiting)
    assert (waiting.reason.what, waiting.reason.node_ids) == ("lease", ("a",))
    assert isinstance(decide(seen, after_s=4.7).action, Refresh)
    assert isinstance(decide(seen, after_s=4.7, read_after_s=4.5).action, Refresh)
    assert names(decide(seen, after_s=4.8, read_after_s=4.7)) == ["a", "b"]


def test_a_broken_connection_to_a_lost_node_does_not_count() -> None:
    planned = decide(view(spec(1, 2), node("b", 2), now=group("a", "b"), reports=(failed("b", peer_lost=True),)))
    assert names(planned) == ["b"]
    assert isinstance(planned.action, Group)
    assert (planned.action.cause, planned.action.restarts) == ("lost", 0)


GLOO = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:537] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "members", "cause"),
    [
        (GLOO, ("a", "b"), ("b", 1, 0, 9)),
        (GLOO, ("a", "b", "c"), None),  # c may have the cause
        ("RuntimeError: no upload: Connection reset by peer", ("a", "b"), ("a", 0, 1, 0)),
        ("ConnectionRefusedError: Connection refused", ("a", "b"), ("a", 0, 1, 0)),
    ],
)
def test_a_node_whose_ranks_ended_well_is_the_cause_of_connections_that_broke(
    error: str, members: tuple[str, ...], cause: tuple[str, int, int, int] | None
) -> None:
    lost = failed("a", peer_lost=True)
    assert lost.failure is not None
    lost = msgspec.structs.replace(lost, failure=msgspec.structs.replace(lost.failure, error=error))
    nodes = [node(name, age) for age, name in enumerate(members, 1)]
    planned = decide(view(spec(len(members)), *nodes, now=group(*members), reports=(lost, finished("b"))))
    reason = planned.reason
    if cause is None:
        assert isinstance(reason, Waiting)
        assert (reason.what, reason.node_ids) == ("lease", ("c",))
        return
    failed_ = reason.because if isinstance(reason, Waiting) else reason
    assert isinstance(failed_, WorkersFailed)
    first = failed_.first
    assert (first.node_id, first.rank, first.exit_code, first.last_step) == cause


def test_a_failure_of_its_own_is_the_cause_although_a_rank_ended_well_before() -> None:
    early, own = failed("a", code=0, at=1.0), failed("b", at=2.0)
    assert first_failure((early, own)) == (own, own.failure)
    lost = failed("b", peer_lost=True)
    assert first_failure((early, lost)) == (early, early.failure)


def test_a_node_whose_ranks_ended_well_is_not_to_blame_for_a_failure_without_a_broken_connection() -> None:
    alone = failed("a")
    assert alone.failure is not None
    late = "torch.distributed.DistStoreError: wait timeout after 300000ms"
    alone = msgspec.structs.replace(alone, failure=msgspec.structs.replace(alone.failure, error=late))
    assert with_early_end(group("a", "b").value, (alone, finished("b"))) == (alone, finished("b"))


def test_the_job_succeeds_when_every_member_has_finished() -> None:
    done = (finished("a"), finished("b"))
    planned = decide(view(spec(2), node("a", 1), now=group("a", "b"), reports=done))
    assert isinstance(planned.action, Result)
    assert planned.action.succeeded, "b may have left: success is decided from reports"


def test_nothing_planned_disturbs_a_group_that_is_finishing() -> None:
    seen = view(spec(1, 3), node("a", 1), node("b", 2), node("c", 3), now=group("a", "b"), reports=(finished("a"),))
    assert decide(seen, after_s=1000).action is None


def test_a_job_stops_waiting_after_the_given_time() -> None:
    policy = replace(POLICY, elastic_timeout_s=30.0)
    seen = view(spec(2), node("a", 1))
    assert decide(seen, after_s=29.0, policy=policy).wake_at == pytest.approx(130.0)
    planned = decide(seen, after_s=30.0, policy=policy)
    assert code_of(planned) == 75


@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "etcd away"])
def test_a_job_does_not_give_up_for_the_time_in_which_no_node_could_come(*, is_paused: bool) -> None:
    policy = replace(POLICY, elastic_timeout_s=30.0)
    waiting = view(spec(2), node("a", 1))
    paused = Stored(msgspec.structs.replace(spec(2).value, paused_by="somebody"), 1, 1)
    meanwhile = replace(waiting, spec=paused) if is_paused else waiting
    seen = observe(observe(Observations(), waiting, 100.0), meanwhile, 101.0)
    seen = observe(seen, waiting, 5000.0, is_back=not is_paused)
    assert plan(waiting, seen, policy, 5000.0).wake_at == pytest.approx(5030.0)
    assert code_of(plan(waiting, observe(seen, waiting, 5030.0), policy, 5030.0)) == 75


def test_restored_records_are_not_restored_again_while_nodes_still_have_them() -> None:
    """The second plan would be another record under the same number."""
    before = group("a", "b", number=6)
    told = msgspec.structs.replace(node("b", 2).value, cached=CachedRecords(spec=spec(1, 3).value, group=before.value))
    teller = Stored(told, 2, 2)
    empty = ClusterView(revision=100, is_whole=True, nodes=(teller,))
    restored = decide(empty, after_s=4.0)
    assert names(restored) == ["b"]
    assert isinstance(restored.action, Group)
    assert (restored.action.number, restored.restored) == (7, RestoredRecords(spec(1, 3).value, None, None))
    after = view(spec(1, 3), teller, node("c", 3), now=Stored(restored.action, 50, 50))
    following = decide(after, after_s=4.0)
    assert names(following) == ["b", "c"]
    assert isinstance(following.action, Group)
    assert (following.action.number, following.restored) == (8, None)


def test_local_ranks_are_contiguous_in_the_groups_order() -> None:
    pair = Group(
        run="r",
        number=1,
        members=(
            Member(node_id="a", incarnation="i", address="x", nproc=3, port=1, link=2),
            Member(node_id="b", incarnation="i", address="y", nproc=2, port=1, link=2),
        ),
        cause="start",
        reason=LOST,
        restarts=0,
        step=0,
        reached=2,
    )
    assert pair.world_size == 5
    assert [pair.first_rank(i) for i in range(2)] == [0, 3]
    assert pair.node_rank(Identity("b", "i")) == 1
    assert pair.node_rank(Identity("b", "other")) is None


def handed(
    *, handoff: int | None = None, saved: int = 0, saved_for: int = 0, is_late: bool = False, restoring_group: int = 1
) -> ClusterView:
    """`a` trains and commits, and `b` was asked to leave; the requested handoff, and the checkpoint last committed."""
    a = msgspec.structs.replace(node("a", 1).value, restoring_group=restoring_group)
    b = msgspec.structs.replace(node("b", 2).value, is_draining=True)
    shown = view(spec(1, 2), Stored(a, 1, 1), Stored(b, 2, 2), now=group("a", "b"))
    checkpoint = Checkpoint(
        number=saved,
        copy=StateId(run="r", group=1, step=saved),
        name="n",
        private=".n",
        manifest_sha256="",
        kept=(),
        superseded=(),
        handoff=saved_for,
        is_late=is_late,
    )
    return replace(
        shown,
        handoff=Stored(HandoffRequest(group=1, after=handoff - 1, reason=LOST), 12, 12)
        if handoff is not None
        else None,
        checkpoint=Stored(checkpoint, 13, 13) if saved else None,
    )


def hand_over(*views: ClusterView, after_s: float = 0.0, is_back: bool = False) -> Plan:
    """Plan `after_s` seconds after the last of these views was first seen; the others came a second apart."""
    now, seen = 100.0, Observations()
    for each in views:
        seen = observe(seen, each, now, is_back=is_back and each is views[-1])
        now += 1.0
    return plan(views[-1], seen, POLICY, now - 1.0 + after_s)


def test_a_planned_change_begins_with_a_handoff_request() -> None:
    planned = hand_over(handed(saved=4))
    assert planned.action == HandoffRequest(group=1, after=4, reason=left("b"))
    assert planned.action.number == 5


def test_a_script_that_never_asked_where_to_begin_is_not_asked_to_stop() -> None:
    assert names(hand_over(handed(restoring_group=0))) == ["a"]


def test_a_group_that_has_not_begun_has_nothing_to_hand_over() -> None:
    begun = RestorePoint(group=0, copy=None, lineage=(), checkpoint=None)
    assert names(hand_over(replace(handed(), restore_point=Stored(begun, 3, 3)))) == ["a"]


def test_a_drain_waits_for_its_handoff_until_its_deadline() -> None:
    requested = (handed(), handed(handoff=1))
    waiting = hand_over(*requested, after_s=7.9)
    assert waiting.action is None
    assert waiting.wake_at == pytest.approx(109.0)
    assert waiting.reason == Waiting(what="handoff", because=left("b"))
    assert names(hand_over(*requested, after_s=8.0)) == ["a"]


def test_a_newcomer_waits_much_longer_for_a_handoff() -> None:
    a = msgspec.structs.replace(node("a", 1).value, restoring_group=1)
    seen = view(spec(2), Stored(a, 1, 1), node("b", 2), now=group("a"))
    requested = replace(seen, handoff=Stored(HandoffRequest(group=1, after=0, reason=LOST), 12, 12))
    assert hand_over(seen, requested, after_s=599.0).action is None
    assert names(hand_over(seen, requested, after_s=600.0)) == ["a", "b"]


def test_a_handoff_is_requested_again_if_only_other_checkpoints_are_committed() -> None:
    a = msgspec.structs.replace(node("a", 1).value, restoring_group=1)
    seen = view(spec(2), Stored(a, 1, 1), node("b", 2), now=group("a"))
    requested = replace(seen, handoff=Stored(HandoffRequest(group=1, after=0, reason=LOST), 12, 12))
    saved = replace(requested, checkpoint=handed(saved=1).checkpoint)
    assert hand_over(seen, requested, saved, after_s=118.0).action is None
    assert hand_over(seen, requested, saved, after_s=119.0).action == HandoffRequest(
        group=1, after=1, reason=NodesJoined(node_ids=("b",), np="2")
    )


def test_the_next_group_is_written_while_the_ranks_stand_still() -> None:
    quiesced = (handed(), handed(handoff=1), handed(handoff=1, saved=2, saved_for=1))
    assert names(hand_over(*quiesced, after_s=0.9)) == ["a"]
    assert hand_over(*quiesced, after_s=1.0).action == HandoffRequest(group=1, after=2, reason=left("b"))


def test_a_checkpoint_that_is_not_for_the_handoff_does_not_fulfil_it() -> None:
    assert hand_over(handed(), handed(handoff=1), handed(handoff=1, saved=1)).action is None


def test_a_handoff_that_was_committed_late_or_unseen_is_requested_again() -> None:
    """The ranks may have trained on since."""
    again = HandoffRequest(group=1, after=1, reason=left("b"))
    late = handed(handoff=1, saved=1, saved_for=1, is_late=True)
    on_time = handed(handoff=1, saved=1, saved_for=1)
    another = handed(handoff=1, saved=1)
    assert hand_over(handed(), handed(handoff=1), late).action == again
    assert hand_over(on_time).action == again, "the first that this leader sees"
    assert hand_over(handed(), handed(handoff=1), on_time, is_back=True).action == again
    assert hand_over(handed(), handed(handoff=1), another, is_back=True).action == again


def test_after_three_failed_handoff_requests_the_change_is_made_without_one() -> None:
    views = [handed()]
    for number in (1, 3, 5):
        views += [handed(handoff=number, saved=number - 1), handed(handoff=number, saved=number + 1, saved_for=number)]
    assert hand_over(*views[:-2], after_s=5.0).action == HandoffRequest(group=1, after=4, reason=left("b"))
    assert names(hand_over(*views, after_s=5.0)) == ["a"]


def test_a_handoff_request_that_was_lost_or_overwritten_by_an_older_one_is_written_again() -> None:
    requested = (handed(), handed(handoff=1), handed(handoff=3, saved=2))
    again = HandoffRequest(group=1, after=2, reason=left("b"))
    for last in (handed(saved=2), handed(handoff=1, saved=2)):
        assert hand_over(*requested, last).action == again


def scaled(size: int, *, is_with_next_only: bool | None = None) -> ClusterView:
    """Of four nodes in a ring, `size` are wanted. None: no handoff is requested; otherwise all are quiesced for it."""
    nodes = [node(name, age) for age, name in enumerate("abcd", 1)]
    nodes[0] = replace(nodes[0], value=msgspec.structs.replace(nodes[0].value, restoring_group=1))
    seen = view(spec(size), *nodes, now=group("a", "b", "c", "d"))
    if is_with_next_only is None:
        return seen
    told = (
        Quiesced(group=1, node_id=who, incarnation="i1", number=1, step=9, is_with_next_only=is_with_next_only)
        for who in "abcd"
    )
    requested = HandoffRequest(group=1, after=0, reason=Requested(what="np", np=str(size)), in_memory=True)
    return replace(seen, handoff=Stored(requested, 12, 12), statuses=statuses(*told))


def growing(*, handoff: int | None = None, quiesced: str = "", is_late: bool = False) -> ClusterView:
    """Node b joins a, whose script commits; the requested handoff, and the nodes whose ranks are quiesced for it."""
    a = msgspec.structs.replace(node("a", 1).value, restoring_group=1)
    seen = view(spec(2), Stored(a, 1, 1), node("b", 2), now=group("a"))
    told = tuple(
        Quiesced(group=1, node_id=who, incarnation="i", number=handoff or 0, step=9, is_late=is_late)
        for who in quiesced
    )
    requested = (
        Stored(HandoffRequest(group=1, after=handoff - 1, reason=LOST, in_memory=True), 12, 12) if handoff else None
    )
    return replace(seen, handoff=requested, statuses=statuses(*told))


def test_snapshots_are_enough_if_the_remaining_members_hold_all_parts() -> None:
    assert hand_over(growing()).action == HandoffRequest(
        group=1, after=0, reason=NodesJoined(node_ids=("b",), np="2"), in_memory=True
    )


@pytest.mark.parametrize(("size", "is_enough"), [(3, True), (2, True), (1, False)])
def test_each_node_that_leaves_must_have_a_neighbour_that_stays(size: int, *, is_enough: bool) -> None:
    """Of four in a ring: c's neighbours are b and d."""
    assert hand_over(scaled(size)).action == HandoffRequest(
        group=1, after=0, reason=Requested(what="np", np=str(size)), in_memory=is_enough
    )


@pytest.mark.parametrize(
    ("size", "is_with_next_only", "is_enough"),
    [(3, True, True), (2, False, True), (2, True, False)],
)
def test_of_large_parts_only_the_next_node_has_copies(size: int, *, is_with_next_only: bool, is_enough: bool) -> None:
    """If c and d leave, nobody is left who holds what c's ranks have: a checkpoint is requested."""
    planned = hand_over(scaled(size), scaled(size, is_with_next_only=is_with_next_only))
    if is_enough:
        assert names(planned) == [*"abcd"[:size]]
    else:
        assert planned.action == HandoffRequest(
            group=1, after=1, reason=Requested(what="np", np=str(size)), in_memory=False
        )


def test_the_next_group_is_written_while_the_ranks_stand_still_with_snapshots() -> None:
    quiesced = (growing(), growing(handoff=1), growing(handoff=1, quiesced="a"))
    assert names(hand_over(*quiesced, after_s=0.9)) == ["a", "b"]


def test_after_a_failed_handoff_in_memory_a_checkpoint_is_requested() -> None:
    again = HandoffRequest(group=1, after=1, reason=NodesJoined(node_ids=("b",), np="2"))
    in_time, late = growing(handoff=1, quiesced="a"), growing(handoff=1, quiesced="a", is_late=True)
    assert hand_over(growing(), growing(handoff=1), in_time, after_s=1.0).action == again
    assert hand_over(growing(), growing(handoff=1), late).action == again
    assert hand_over(in_time).action == again, "the first that this leader sees"
    assert hand_over(growing(), growing(handoff=1), in_time, is_back=True).action == again


def test_snapshots_are_not_enough_if_a_member_is_asked_to_leave_meanwhile() -> None:
    quiesced = growing(handoff=1, quiesced="a")
    leaving = msgspec.structs.replace(quiesced.nodes[0].value, is_draining=True)
    drained = replace(quiesced, nodes=(replace(quiesced.nodes[0], value=leaving), *quiesced.nodes[1:]))
    planned = hand_over(growing(), growing(handoff=1), drained)
    assert planned.action == HandoffRequest(group=1, after=1, reason=left("a"))


def test_a_handoff_request_has_a_higher_number_than_the_handoff_of_the_last_checkpoint() -> None:
    """Else it would seem to be met already."""
    saved = handed(saved=3, saved_for=6)
    assert hand_over(saved).action == HandoffRequest(group=1, after=6, reason=left("b"))


def test_a_lost_member_is_replaced_at_once_despite_a_handoff_request() -> None:
    lost = handed(handoff=1)
    planned = hand_over(handed(), replace(lost, nodes=lost.nodes[:1]))
    assert isinstance(planned.action, Group)
    assert planned.action.cause == "lost"


def test_a_node_that_fails_twice_in_a_row_comes_last_until_there_is_progress() -> None:
    both = (failed("a"), failed("b"))
    table: tuple[tuple[str, tuple[str, ...], tuple[ExitReport, ...], tuple[int, tuple[str, ...], str]], ...] = (
        ("", (), (failed("a"),), (4, (), "a")),
        ("a", (), (failed("a"),), (4, ("a",), "a")),
        ("b", (), (failed("a"),), (4, (), "a")),
        ("a", (), both, (4, (), "")),
        ("a", (), (failed("a", peer_lost=True),), (4, (), "")),
        ("a", ("a", "b"), (failed("a"),), (4, ("b", "a"), "a")),
        ("a", ("a",), (failed("a", step=8),), (1, (), "a")),
        ("a", ("a",), (finished("a"),), (0, (), "")),
        ("a", ("a",), (), (3, ("a",), "a")),
    )
    for before, last, reports, after in table:
        ended = msgspec.structs.replace(
            group("a", "b", restarts=3, step=7).value, failed_alone=before, placed_last=last
        )
        is_failure = any(report.failure is not None for report in reports)
        told = tally(ended, reports, 0.0, 60.0, is_failure=is_failure)
        assert (told.restarts, told.placed_last, told.failed_alone) == after, (before, last, reports)


def test_in_a_first_group_warmth_has_no_say() -> None:
    """The order is that of the operator's list, then of age; later a newcomer that is warm comes first."""

    def cold(name: str, age: int, position: int) -> Stored[Node]:
        stored = node(name, age)
        return replace(stored, value=msgspec.structs.replace(stored.value, is_warming=True, position=position))

    def warm(name: str, age: int, position: int) -> Stored[Node]:
        stored = node(name, age)
        return replace(stored, value=msgspec.structs.replace(stored.value, position=position))

    assert names(decide(view(spec(2), cold("a", 1, 0), warm("b", 2, 0)))) == ["a", "b"]
    assert names(decide(view(spec(2), warm("b", 1, 2), cold("a", 2, 1)))) == ["a", "b"]
    waited = group(number=2, reached=2)
    assert names(decide(view(spec(2), cold("a", 1, 0), warm("b", 2, 0), now=waited))) == ["b", "a"]


def test_a_growth_waits_a_minute_beyond_the_settle_window_for_a_node_that_is_warming() -> None:
    warming = node("b", 2)
    warming = replace(warming, value=msgspec.structs.replace(warming.value, is_warming=True))
    seen = view(spec(1, 3), node("a", 1), warming, now=group("a"))
    waiting = decide(seen, after_s=60.9)
    assert (waiting.action, waiting.wake_at) == (None, 161.0)
    assert isinstance(waiting.reason, Waiting)
    assert (waiting.reason.what, waiting.reason.node_ids) == ("warm", ("b",))
    assert names(decide(seen, after_s=61.0)) == ["a", "b"]


@pytest.mark.parametrize(
    ("before", "step", "plain_s", "names_", "early", "is_out"),
    [
        ("", 7, 0.0, "ab", "b", False),
        ("b", 7, 0.0, "ab", "b", True),
        ("a", 7, 0.0, "ab", "b", False),
        ("b", 8, 0.0, "ab", "", False),
        ("b", 7, 59.0, "ab", "b", True),
        ("b", 7, 60.0, "ab", "", False),
        ("b", 7, 0.0, "b", "", False),
    ],
    ids=["once", "twice", "another before", "after a step", "soon", "a script that ran for long", "alone"],
)
def test_a_node_that_alone_fails_twice_before_a_first_step_is_left_out(
    before: str, step: int, plain_s: float, names_: str, early: str, *, is_out: bool
) -> None:
    ended = msgspec.structs.replace(group(*names_, step=7).value, failed_early=before, left_out=(Identity("x", "i"),))
    told = tally(ended, (failed("b", step=step, step_s=1000.0),), plain_s, 60.0, is_failure=True)
    assert told.failed_early == early
    assert told.left_out == (Identity("x", "i"), *([Identity("b", "i1")] if is_out else []))


def failing_early(*, np: Stored[Spec], there: str = "ab") -> ClusterView:
    now = group("a", "b", step=7)
    now = replace(
        now,
        value=msgspec.structs.replace(now.value, failed_alone="b", failed_early="b", left_out=(Identity("x", "i"),)),
    )
    nodes = (node(name, age) for age, name in enumerate(there, start=1))
    return view(np, *nodes, now=now, reports=(failed("b", step=7, step_s=1000.0),))


def test_the_job_continues_without_a_node_that_is_left_out_and_reports_it() -> None:
    planned = decide(failing_early(np=spec(1, 2)), after_s=60.0)
    assert names(planned) == ["a"]
    assert isinstance(planned.action, Group)
    assert planned.action.left_out == (Identity("b", "i1"),), "x is gone for good"
    assert isinstance(planned.reason, WorkersFailed)
    assert planned.reason.left_out == ("b",)
    ran = replace(group("a", number=2), value=planned.action)
    after = decide(view(spec(1, 2), node("a", 1), node("b", 2), now=ran), after_s=100.0)
    assert (after.action, after.reason) == (None, Training(nodes=1, np="1:2", left_out=("b",)))
    again = decide(view(spec(1, 2), node("a", 1), node("b", 2, "i2"), now=ran), after_s=100.0)
    assert names(again) == ["a", "b"], "another start of its agent"


def test_nobody_is_left_out_whose_place_nobody_can_take() -> None:
    """The job would only wait; so the restart budget decides."""
    assert names(decide(failing_early(np=spec(2)), after_s=60.0)) == ["a", "b"]
    assert names(decide(failing_early(np=spec(2), there="abc"), after_s=60.0)) == ["a", "c"]


def test_a_checkpoint_that_cannot_be_read_is_tried_elsewhere_ever_more_slowly_and_costs_nothing() -> None:
    report = failed("a")
    assert report.failure is not None
    unreadable = msgspec.structs.replace(
        report, failure=msgspec.structs.replace(report.failure, unreadable="/x: No such file")
    )
    waits = []
    for tries in (0, 1, 2, 8, 100):
        now = group("a", "b", restarts=3)
        now = replace(now, value=msgspec.structs.replace(now.value, failed_reads=tries))
        seen = view(spec(2), node("a", 1), node("b", 2), now=now, reports=(unreadable,))
        planned = decide(seen)
        waits.append(0.0 if planned.wake_at is None else planned.wake_at - 100.0)
        tried = decide(seen, after_s=waits[-1])
        assert names(tried) == ["b", "a"]
        first = FailedWorker(node_id="a", rank=0, exit_code=1, unreadable="/x: No such file")
        assert tried.reason == WorkersFailed(first=first)
        assert isinstance(tried.action, Group)
        assert (tried.action.restarts, tried.action.failed_reads) == (3, tries + 1)
    assert waits == [0.0, 0.5, 1.0, 30.0, 30.0]


def test_progress_and_another_failure_end_the_tries_to_read() -> None:
    ended = msgspec.structs.replace(group("a", "b", step=7).value, failed_reads=5)
    assert tally(ended, (), 0.0, 60.0, is_failure=False).failed_reads == 5
    assert tally(ended, (failed("a"),), 0.0, 60.0, is_failure=True).failed_reads == 0
    assert tally(ended, (finished("a"), failed("b", step=8)), 0.0, 60.0, is_failure=True).failed_reads == 0


def test_the_node_whose_own_disk_has_the_checkpoint_gets_rank_0_also_from_among_the_spares() -> None:
    committed = handed(saved=1).checkpoint
    assert committed is not None
    on_c = replace(committed, value=msgspec.structs.replace(committed.value, node="c"))
    for nodes, wanted in (("abc", ["c", "a"]), ("ab", ["a", "b"])):
        seen = view(spec(2), *(node(name, age) for age, name in enumerate(nodes, start=1)))
        assert names(decide(replace(seen, checkpoint=on_c))) == wanted


@pytest.mark.parametrize(("used", "wait_s"), [(1, 0.0), (2, 0.5), (3, 1.0), (8, 30.0), (1026, 30.0), (10**6, 30.0)])
def test_what_fails_again_and_again_is_tried_ever_more_slowly_up_to_half_a_minute(used: int, wait_s: float) -> None:
    assert back_off_s(used) == wait_s


def test_a_checkpoint_that_could_not_be_read_5000_times_is_waited_for() -> None:
    now = group("a", "b")
    now = replace(now, value=msgspec.structs.replace(now.value, failed_reads=5000))
    away = failed("a")
    assert away.failure is not None
    away = msgspec.structs.replace(away, failure=msgspec.structs.replace(away.failure, unreadable="/ckpt: Stale"))
    seen = view(spec(2), node("a", 5), node("b", 6), now=now, reports=(away,))
    assert decide(seen, after_s=29.0).action is None
    after = decide(seen, after_s=30.0).action
    assert isinstance(after, Group)
    assert after.failed_reads == 5001


def test_a_job_that_may_fail_without_end_may() -> None:
    now = group("a", "b", restarts=5000)
    seen = view(spec(2), node("a", 5), node("b", 6), now=now, reports=(failed("a"),))
    assert isinstance(decide(seen, after_s=30.0, policy=replace(POLICY, max_restarts=10_000)).action, Group)


def test_a_group_that_lost_its_newcomers_5000_times_waits_no_longer_than_that() -> None:
    now = msgspec.structs.replace(group("a").value, flaps=5000)
    assert growth_wait_s(POLICY, now) == STEADY_S


def test_a_rank_that_waited_at_the_store_for_others_is_not_at_fault() -> None:
    """They never came: their own ends are the cause."""
    late = "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 joined."
    assert is_peer_lost(late, signal=None)
    assert not is_peer_lost(late, signal=SIGKILL)
    assert not is_peer_lost("TimeoutError: 11 seconds waiting for clients of the upload", signal=None)


def in_place(seen: ClusterView, *started: str) -> ClusterView:
    """The same, in a job whose groups are entered in place; the ranks of these nodes have made a step, and can move."""
    assert seen.spec is not None
    assert seen.group is not None
    here = {each.node_id: each for each in seen.statuses}
    for name in started:
        status = here.get(name) or MemberStatus(group=1, node_id=name, incarnation="i1")
        moved = TransitionReport(group=1, node_id=name, incarnation="i1", stopped_s=0.0, stepped_s=1.0)
        here[name] = msgspec.structs.replace(status, can_move=True, transition=moved)
    return replace(
        seen,
        spec=Stored(msgspec.structs.replace(seen.spec.value, in_place=True), 1, 1),
        group=Stored(msgspec.structs.replace(seen.group.value, in_place=True), 10, 10),
        nodes=tuple(replace(n, value=msgspec.structs.replace(n.value, is_set_up=True)) for n in seen.nodes),
        statuses=tuple(here[name] for name in sorted(here)),
    )


def four(*failures: ExitReport, restarts: int = 0, step: int = 0) -> ClusterView:
    nodes = [node(name, age) for age, name in enumerate("abcd", start=5)]
    return view(spec(1, 4), *nodes, now=group(*"abcd", restarts=restarts, step=step), reports=failures)


def test_the_others_go_on_without_all_nodes_that_failed() -> None:
    planned = decide(in_place(four(failed("b", step=5), failed("d", step=5)), "a", "c"))
    assert names(planned) == ["a", "c"]


@pytest.mark.parametrize(("step", "expected"), [(9, ["a", "c", "d"]), (8, ["a", "c", "d", "b"])])
def test_they_do_after_each_failure_unless_it_is_at_the_same_step_again(step: int, expected: list[str]) -> None:
    """The cause of the same failure at the same step may be a sample: then all wait for that node."""
    seen = four(failed("b", step=step, step_s=0.001), restarts=2, step=8)
    planned = decide(in_place(seen, "a", "c", "d"), after_s=60.0)
    assert sorted(names(planned)) == sorted(expected)


def test_a_group_that_is_entered_in_place_grows_once_it_has_made_a_step() -> None:
    """Ranks that have made none cannot move, and would be ended."""
    seen = view(spec(1, 2), node("a", 5), node("b", 6), now=group("a"))
    assert decide(in_place(seen), after_s=60.0).action is None
    assert isinstance(decide(in_place(seen, "a"), after_s=60.0).action, HandoffRequest | Group)


@pytest.mark.parametrize(("signal", "is_again"), [(None, False), (9, True)])
def test_after_ranks_that_fail_as_they_have_moved_all_start_anew(signal: int | None, *, is_again: bool) -> None:
    """What fails by itself at once may work in a new process; what was killed says nothing about it."""
    report = failed("a")
    assert report.failure is not None
    report = msgspec.structs.replace(report, failure=msgspec.structs.replace(report.failure, signal=signal))
    planned = decide(in_place(view(spec(2), node("a", 5), node("b", 6), now=group("a", "b"), reports=(report,))))
    assert isinstance(planned.action, Group)
    assert planned.action.in_place is is_again


@pytest.mark.parametrize(("step", "is_at_once"), [(3, True), (0, False)])
def test_only_a_group_without_a_new_step_is_followed_after_a_while(step: int, *, is_at_once: bool) -> None:
    """Ranks that keep their processes wait meanwhile, and what has failed after new steps is another failure."""
    reports = (failed("a", step=step, step_s=0.001),)
    seen = view(spec(2), node("a", 5), node("b", 6), now=group("a", "b", restarts=5), reports=reports)
    planned = decide(seen, policy=replace(POLICY, max_restarts=100))
    assert isinstance(planned.action, Group) is is_at_once
