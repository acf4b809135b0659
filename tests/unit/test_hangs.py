"""Stalled ranks, as a table: which one the others wait for, and when its group is ended."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from nodes import NODE, POLICY
from reasons import LOST
from statuses import first_steps, statuses

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.failures import ExitReport, Failure
from agent.core.hangs import REPORT_WITHIN_S, as_report, hang_of, in_group, is_due, suspects
from agent.core.incident import RankStall, StallReport
from agent.core.local_workers import LocalWorkers
from agent.core.member_status import WrittenStatus
from agent.core.model import Group, Member, Spec, Suspicion
from agent.core.observations import Observations, follow, observe
from agent.core.planner import plan
from agent.core.reasons import Doing, Hang, WorkersFailed
from agent.core.records import Identity, Stored
from agent.core.transitions import WorkerObservations, due_status
from agent.core.view import ClusterView
from agent.observe.stragglers import stragglers

NAMES = ("a", "b", "c")
GROUP = Group(
    run="r",
    number=1,
    members=tuple(Member(node_id=name, incarnation="i1", address="h", nproc=1, port=1, link=2) for name in NAMES),
    cause="start",
    reason=LOST,
    restarts=0,
    step=0,
    reached=3,
)


def stall(
    name: str, doing: Doing, stage: str = "suspicious", *, for_s: float = 6.0, step: int = 3, where: str = ""
) -> StallReport:
    rank = RankStall(rank=NAMES.index(name), step=step, doing=doing, where=where, stack="")
    return StallReport(group=1, node_id=name, incarnation="i1", stage=stage, for_s=for_s, limit_s=6.0, ranks=(rank,))


def report(name: str, *, failure: Failure | None = None, after_s: float = 0.0) -> ExitReport:
    return ExitReport(group=1, node_id=name, incarnation="i1", step=3, failure=failure, after_s=after_s)


def failure(rank: int) -> Failure:
    return Failure(rank=rank, local_rank=0, exit_code=1, signal=None, is_peer_lost=False, tail="", at=0.0)


def view(
    *, stalls: tuple[StallReport, ...] = (), reports: tuple[ExitReport, ...] = (), own_s: tuple[float, ...] = ()
) -> ClusterView:
    nodes = [
        msgspec.structs.replace(NODE, node_id=name, own_s=(own_s[place],) if own_s else ())
        for place, name in enumerate(NAMES)
    ]
    spec = Spec(run="r", np_min=3, np_max=3, secret="s", changed_by="test", changed_at=0.0)
    return ClusterView(
        9,
        is_whole=True,
        spec=Stored(spec, 1, 1),
        group=Stored(GROUP, 2, 2),
        nodes=tuple(Stored(node, 3 + age, 3 + age) for age, node in enumerate(nodes)),
        statuses=statuses(*stalls, *reports, *(first_steps(GROUP) if own_s else ())),
    )


@pytest.mark.parametrize(
    ("stages", "doing", "due"),
    [
        (("still", "still", "still"), ("waits", "sleeps", "waits"), True),
        (("still", "suspicious", "still"), ("waits", "runs", "waits"), False),
        (("suspicious", "still", "suspicious"), ("waits", "disk", "waits"), True),
        (("still", "still", "still"), ("waits", "waits", "waits"), False),
        (("still", "still", "still"), ("sleeps", "sleeps", "sleeps"), False),
        (("suspicious", "certain", "suspicious"), ("waits", "waits", "waits"), True),
        (("over", "over", "over"), ("waits", "sleeps", "waits"), False),
    ],
)
def test_a_group_is_ended_once_it_is_certain_or_no_stack_moves_where_it_is_awaited(
    stages: tuple[str, ...], doing: tuple[Doing, ...], due: object
) -> None:
    """The stack of the rank at fault must not change, whatever those of the others do."""
    told = [stall(*each) for each in zip(NAMES, doing, stages, strict=True)]
    assert is_due(told) is due


def test_the_worst_of_those_that_are_furthest_behind_is_at_fault() -> None:
    told = [stall("a", "sleeps", step=4), stall("b", "stopped"), stall("c", "sleeps")]
    assert [rank.rank for rank in suspects(told)] == [1, 2]


def test_if_those_that_are_furthest_behind_wait_one_that_does_not_is_at_fault() -> None:
    told = [stall("a", "waits", step=3), stall("b", "sleeps", step=4), stall("c", "waits", step=4)]
    assert [rank.rank for rank in suspects(told)] == [1]


def test_if_all_wait_those_at_the_rarest_place_are_named() -> None:
    told = [
        stall("a", "waits", where="x.py:1"),
        stall("b", "waits", where="y.py:2"),
        stall("c", "waits", where="x.py:1"),
    ]
    assert [rank.rank for rank in suspects(told)] == [1]
    hang = hang_of(told)
    assert (hang.doing, hang.where, hang.elsewhere) == ("waits", "y.py:2", ("x.py:1",))
    assert hang_of(told[:1]).elsewhere == ()


def test_if_all_wait_one_that_only_has_a_collective_under_way_is_named() -> None:
    """It began that one before it hung, in another process group, say."""
    asleep, *others = (stall("a", "waits", where="x.py:1"), stall("b", "waits"), stall("c", "waits"))
    [rank] = asleep.ranks
    asleep = msgspec.structs.replace(asleep, ranks=(msgspec.structs.replace(rank, stack_shows="sleeps"),))
    told = [others[0], asleep, others[1]]
    assert [rank.rank for rank in suspects(told)] == [0]
    assert (hang_of(told).doing, hang_of(told).waiting, hang_of(told).elsewhere) == ("sleeps", 2, ())
    # With NCCL, or where ranks ask whether a collective has finished, those that wait may do so in their own code, too.
    assert hang_of([asleep]).doing == "waits"


def test_of_those_with_a_collective_under_way_the_one_at_another_place_is_named() -> None:
    """Others ask in a loop whether theirs has finished, and one of them was seen within torch."""
    told = [
        stall("a", "waits", where="x.py:1"),
        stall("b", "waits", where="x.py:9"),
        stall("c", "waits", where="x.py:1"),
    ]
    at_work = [
        msgspec.structs.replace(each, ranks=(msgspec.structs.replace(each.ranks[0], stack_shows="sleeps"),))
        for each in told[:2]
    ]
    assert [rank.rank for rank in suspects([*at_work, told[2]])] == [1, 0]


def test_a_node_that_is_done_counts_as_one_that_the_others_wait_for() -> None:
    told = in_group(GROUP, [stall("a", "waits"), stall("b", "waits"), stall("c", "waits")], [report("b")])
    assert as_report(GROUP, told).node_id == "b", "and what it told before it was done is old"
    assert in_group(GROUP, [stall("b", "waits")], [report("b")]) == (), "nobody else stands still"


def test_before_a_group_is_ended_all_its_nodes_have_a_moment_to_report() -> None:
    seen = view(stalls=(stall("a", "waits", "certain"),))
    seen_before = observe(Observations(), seen, 100.0)
    early = plan(seen, seen_before, POLICY, 100.0)
    assert early.action is None
    assert early.wake_at == 100.0 + REPORT_WITHIN_S
    late = plan(seen, seen_before, POLICY, 100.0 + REPORT_WITHIN_S)
    assert isinstance(late.action, Group)
    whole = view(stalls=(stall("a", "waits", "certain"), stall("b", "sleeps"), stall("c", "waits")))
    at_once = plan(whole, seen_before, POLICY, 100.0)
    assert isinstance(at_once.action, Group)
    assert isinstance(at_once.reason, WorkersFailed)
    assert (at_once.reason.first.node_id, at_once.reason.first.rank) == ("b", 1)
    assert at_once.reason.first.hang == Hang(doing="sleeps", step=3, for_s=6, waiting=2, others=2)


def test_the_time_of_a_fault_is_that_of_the_first_report() -> None:
    """What is told later, and took longer to tell, does not move it."""
    calm = observe(Observations(group=1), view(), 90.0)
    broken = observe(calm, view(reports=(report("a", failure=failure(0), after_s=0.5),)), 100.0)
    assert broken.fault_at == 99.5
    both = (report("a", failure=failure(0), after_s=0.5), report("b", failure=failure(1), after_s=1.5))
    assert observe(broken, view(reports=both), 101.2).fault_at == 99.5
    stands = observe(calm, view(stalls=(stall("a", "sleeps", "certain", for_s=12.0),)), 103.0)
    assert stands.fault_at == 91.0
    told_again = observe(stands, view(stalls=(stall("a", "sleeps", "certain", for_s=24.0),)), 104.0)
    assert told_again.fault_at == 91.0


def test_nothing_that_is_wrong_with_a_group_is_older_than_the_group() -> None:
    before = observe(Observations(group=0), view(), 100.0)
    assert observe(before, view(stalls=(stall("a", "sleeps", "certain", for_s=12.0),)), 103.0).fault_at == 100.0


def test_a_fault_of_the_group_before_is_not_the_next_groups() -> None:
    """Although a leader may see both without a view between them in which all is well."""
    broken = observe(
        observe(Observations(group=0), view(), 100.0), view(reports=(report("a", failure=failure(0)),)), 101.0
    )
    following = msgspec.structs.replace(GROUP, number=2)
    again = msgspec.structs.replace(report("a", failure=failure(0), after_s=0.5), group=2)
    shown = replace(view(), group=Stored(following, 8, 8), statuses=statuses(again))
    assert broken.broken_since == 101.0
    later = observe(broken, shown, 110.0)
    assert (later.broken_since, later.fault_at) == (110.0, 110.0)


def test_an_agent_that_saw_a_group_begin_still_knows_it_when_it_leads_later() -> None:
    before = follow(follow(Observations(group=0), view(), 100.0), view(), 101.0)
    assert observe(before, view(stalls=(stall("a", "sleeps", "certain", for_s=12.0),)), 103.0).fault_at == 100.0


def test_only_an_agent_that_saw_the_group_begin_counts_a_silence_reported_before() -> None:
    """Else it may have begun in a group that is gone."""
    silence = Suspicion(
        node_id="c", incarnation="i1", by_node_id="b", by_incarnation="i1", is_lost=False, why="it is silent", for_s=1.5
    )
    lost = replace(view(), nodes=view().nodes[:2], suspects=(Stored(silence, 5, 5),))
    assert observe(observe(Observations(group=0), view(), 100.0), lost, 110.0).fault_at == 108.5
    assert observe(Observations(), lost, 110.0).fault_at == 110.0


def test_an_alarm_that_was_not_raised_is_not_withdrawn() -> None:
    """And a workers' earlier life is nobody's: what they do is not told under the new one."""
    workers = LocalWorkers(group=1, count=1, is_alive=True)
    over = WorkerObservations(group=1).note(ev.RanksStalled(1, "over", 0.0, 6.0, ()))

    def due(observed: WorkerObservations, incarnation: str = "i1") -> fx.WriteStatus | None:
        return due_status(WrittenStatus(), workers, observed, (), view(), Identity("a", incarnation), 0.0)

    told = due(over)
    assert told is not None
    assert told.status.transition is not None
    assert told.status.stall is None
    assert due(over, "i.2") is None
    assert due(replace(over, group=2)) is None, "etcd shows less than was seen"


def test_a_rank_is_slow_by_what_the_others_need() -> None:
    assert stragglers(ClusterView(1, is_whole=True)) == ()
    assert [each.rank for each in stragglers(view(own_s=(0.1, 0.3, 0.1)))] == [1]
    assert stragglers(view(own_s=(0.0, 0.3, 0.0))) == (), "what the others need is not known"
    nodes = view(own_s=(0.1, 0.3, 0.1)).nodes
    late = [
        replace(each, value=msgspec.structs.replace(each.value, step_s=0.6 if each.value.own_s == (0.3,) else 0.2))
        for each in nodes
    ]
    assert stragglers(replace(view(own_s=(0.1, 0.3, 0.1)), nodes=tuple(late))) == (), "it was slow when all were"
    before = replace(view(own_s=(0.1, 0.3, 0.1)), statuses=statuses(*first_steps(GROUP)[1:]))
    assert stragglers(before) == (), "the times are those of an earlier group"
