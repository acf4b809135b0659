"""Notices on the agent's console: what a job waits for, an outage of etcd, and nodes with other software."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from nodes import ME, POLICY, node
from reasons import FINISHED, LOST

from agent.core.local_workers import LocalWorkers
from agent.core.model import CachedRecords, Group, Leader, Member, Node, NodeInfo, Result, Spec
from agent.core.proposals import Plan
from agent.core.reasons import AskedToEnd, NodesMissing, SetUpFailed
from agent.core.records import Stored
from agent.core.state import AgentState, Leaving
from agent.core.view import ClusterView
from agent.doctor.facts import Facts
from agent.observe.notices import EtcdOutageNotice, NodeDifferences, SetUpNotice, WaitNotices

REASON = "waiting for 1 of 3 nodes; here: a and b"
WAITS = NodesMissing(missing=1, needed=3, here=("a", "b"))
FACTS = (("python", "3.11.2"), ("script", "abc"), ("torch", "2.13.0"))


def waiting_state(*, is_leader: bool = True, is_whole: bool = True) -> AgentState:
    """The state of an agent that waits for a third node."""
    leader = Stored(Leader(node_id="a" if is_leader else "b", incarnation="i1"), 1, 1)
    view = ClusterView(revision=1, is_whole=is_whole, leader=leader, nodes=(node("a"), node("b")))
    return AgentState(ME, POLICY, view=view, planned=Plan(None, WAITS) if is_leader else None)


def group_of(*names: str) -> CachedRecords:
    members = tuple(
        Member(node_id=name, incarnation="i1", address="10.0.0.1", nproc=1, port=1, link=1) for name in names
    )
    group = Group(run="r", number=1, members=members, cause="start", reason=LOST, restarts=0, step=0, reached=1)
    return CachedRecords(
        spec=Spec(run="r", np_min=3, np_max=3, secret="s", changed_by="a", changed_at=0.0), group=group
    )


def wait_notices(state: AgentState, *moments: float, machines: tuple[str, ...] = ()) -> list[str]:
    printed: list[str] = []
    notices = WaitNotices(machines, printed.append)
    for moment in moments:
        notices.update(state, moment)
    return printed


def test_a_wait_is_reported_every_ten_seconds_and_not_at_once() -> None:
    """The core reports it at once."""
    assert wait_notices(waiting_state(), 100.0, 105.0, 109.9) == []
    expected = [f"{REASON} (10 s)", f"{REASON} (20 s)"]
    assert wait_notices(waiting_state(), 100.0, 105.0, 110.0, 111.0, 119.9, 120.0) == expected


def test_missing_machines_are_named_if_the_operator_named_all() -> None:
    assert wait_notices(waiting_state(), 0.0, 10.0, machines=("b", "a", "c")) == [f"{REASON}; missing: c (10 s)"]
    assert wait_notices(waiting_state(), 0.0, 10.0, machines=("b", "a")) == [f"{REASON} (10 s)"]


def test_an_agent_that_does_not_lead_reports_the_leader_that_it_waits_for() -> None:
    state = waiting_state(is_leader=False, is_whole=False)
    assert wait_notices(state, 0.0, 10.0, machines=("c",)) == ["waiting for b to form a group (10 s)"]
    assert state.view is not None
    leaderless = replace(state, view=replace(state.view, leader=None))
    assert wait_notices(leaderless, 0.0, 10.0) == ["waiting for a leader (10 s)"]


@pytest.mark.parametrize(
    "state",
    [
        replace(waiting_state(), cached=group_of("a", "b")),
        replace(waiting_state(), leaving=Leaving(0, AskedToEnd())),
        replace(waiting_state(), drain_until=1.0),
        replace(waiting_state(), is_store_lost=True),
        replace(waiting_state(), view=None),
    ],
    ids=["trains", "leaves", "asked to leave", "no etcd", "no view"],
)
def test_no_wait_is_reported_without_one(state: AgentState) -> None:
    assert wait_notices(state, 0.0, 10.0, 20.0) == []


def test_each_wait_is_timed_from_its_own_beginning() -> None:
    printed: list[str] = []
    notices = WaitNotices((), printed.append)
    lost = replace(waiting_state(), cached=group_of())
    for moment in (0.0, 10.0):
        notices.update(lost, moment)
    notices.update(replace(waiting_state(), cached=group_of("a")), 11.0)
    for moment in (20.0, 29.0, 30.0):
        notices.update(lost, moment)
    assert printed == [f"{REASON} (10 s)", f"{REASON} (10 s)"]


def test_an_outage_of_etcd_is_reported_once_unless_the_job_is_over_for_this_agent() -> None:
    printed: list[str] = []
    notice = EtcdOutageNotice(lambda: "it did not answer", lambda what, why: printed.append(f"{what} ({why})"))
    trains = replace(waiting_state(), is_store_lost=True, workers=LocalWorkers(is_alive=True))
    ended = Result(run="r", group=1, succeeded=True, exit_code=0, reason=FINISHED)
    over = ClusterView(revision=2, is_whole=True, result=Stored(ended, 1, 1))
    for state in (
        *(trains, trains),
        waiting_state(),
        replace(trains, drain_until=9.0),  # the agent leaves, and stops the etcd that it brought
        waiting_state(),
        replace(trains, view=over),
        waiting_state(),
        replace(waiting_state(), is_store_lost=True),
    ):
        notice.update(state, 0.0)
    assert printed == [
        "etcd cannot be reached; the ranks run on (it did not answer)",
        "etcd cannot be reached (it did not answer)",
    ]


def node_with(name: str, *facts: tuple[str, str]) -> Stored[Node]:
    stored = node(name)
    return replace(stored, value=msgspec.structs.replace(stored.value, about=NodeInfo(facts=facts)))


def difference_warnings(*nodes: Stored[Node], is_whole: bool = True) -> list[str]:
    """Return the warnings of the agent on `a` after two views with these nodes."""
    printed: list[str] = []
    state = AgentState(replace(ME, about=NodeInfo(facts=FACTS)), POLICY)
    differences = NodeDifferences(printed.append)
    for revision in (1, 2):
        differences.update(replace(state, view=ClusterView(revision=revision, is_whole=is_whole, nodes=nodes)))
    return printed


def test_nodes_with_the_same_software_cause_no_warning() -> None:
    assert difference_warnings(node_with("a", *FACTS), node_with("b", *FACTS)) == []


def test_another_version_and_another_script_are_named_once() -> None:
    other = (("python", "3.11.2"), ("script", "def"), ("torch", "2.12.0"))
    (warning,) = difference_warnings(node_with("a", *FACTS), node_with("b", *other))
    assert warning.startswith(
        "b runs other software: its script, or a module that it imports, is not the same as on a; "
    )
    assert warning.endswith(
        "; torch 2.12.0 there, 2.13.0 on a; install the same versions and the same script on all nodes; another "
        "training needs another --job_id"
    )


def test_another_script_in_the_same_directory_is_named(tmp_path: Path) -> None:
    for name in ("train.py", "other.py"):
        (tmp_path / name).write_text("")
    here, there = (Facts.here(tmp_path / name).brief for name in ("train.py", "other.py"))
    assert {name for name, _ in set(there) - set(here)} == {"script name", "script"}
    (warning,) = difference_warnings(node_with("b", *FACTS, ("script name", "other.py"), ("script", "def")))
    assert warning.startswith("b runs other software: script name other.py there, none on a; install")


def test_a_missing_package_is_named_and_an_incomplete_view_causes_no_warning() -> None:
    assert "torch none there, 2.13.0 on a" in difference_warnings(node_with("b", ("python", "3.11.2")))[0]
    assert difference_warnings(node_with("b", ("python", "3.12.0")), is_whole=False) == []


def test_a_set_up_that_fails_is_reported_once() -> None:
    printed: list[str] = []
    notice = SetUpNotice(printed.append)
    failed = LocalWorkers(set_up_failure=SetUpFailed(exit_code=3, signal=None, error=""))
    again = replace(failed, set_up_failure=SetUpFailed(exit_code=None, signal=9, error=""))
    for workers in (LocalWorkers(), failed, failed, LocalWorkers(), again):
        notice.update(replace(waiting_state(), workers=workers))
    does_not_join = "this node does not join yet; it tries again later"
    assert printed == [
        f"the set-up of the script ended with code 3: {does_not_join}",
        f"the set-up of the script ended with signal 9: {does_not_join}",
    ]
