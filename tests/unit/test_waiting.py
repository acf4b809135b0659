"""What an agent says while nobody trains, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nodes import ME, POLICY, node

from agent.core.local_workers import LocalWorkers
from agent.core.model import CachedRecords, ClusterView, Group, Leader, Member, Result, Spec, Stored
from agent.core.proposals import Plan
from agent.core.state import AgentState, Leaving
from agent.observe.notices import EtcdOutageNotice, WaitNotices

REASON = "waiting for 1 of 3 nodes; here: a, b"


def a_state(*, leads: bool = True, is_whole: bool = True) -> AgentState:
    """Of an agent that waits for a third node."""
    leader = Stored(Leader(node_id="a" if leads else "b", incarnation="i1"), 1, 1)
    view = ClusterView(revision=1, is_whole=is_whole, leader=leader, nodes=(node("a"), node("b")))
    return AgentState(ME, POLICY, view=view, planned=Plan(None, REASON) if leads else None)


def a_group(*names: str) -> CachedRecords:
    members = tuple(
        Member(node_id=name, incarnation="i1", address="10.0.0.1", nproc=1, port=1, link=1) for name in names
    )
    group = Group(run="r", number=1, members=members, cause="start", reason="", restarts=0, step=0, reached=1)
    return CachedRecords(
        spec=Spec(run="r", np_min=3, np_max=3, secret="s", changed_by="a", changed_at=0.0), group=group
    )


def said(state: AgentState, *moments: float, machines: tuple[str, ...] = ()) -> list[str]:
    sentences: list[str] = []
    waiting = WaitNotices(machines, sentences.append)
    for moment in moments:
        waiting.update(state, moment)
    return sentences


def test_it_is_said_every_ten_seconds_and_not_at_once() -> None:
    """At once the core has said it."""
    assert said(a_state(), 100.0, 105.0, 109.9) == []
    expected = [f"{REASON} (10 s)", f"{REASON} (20 s)"]
    assert said(a_state(), 100.0, 105.0, 110.0, 111.0, 119.9, 120.0) == expected


def test_missing_machines_are_named_where_they_are_known() -> None:
    assert said(a_state(), 0.0, 10.0, machines=("b", "a", "c")) == [f"{REASON}; missing: c (10 s)"]
    assert said(a_state(), 0.0, 10.0, machines=("b", "a")) == [f"{REASON} (10 s)"]


def test_who_does_not_lead_says_for_whom_it_waits() -> None:
    state = a_state(leads=False, is_whole=False)
    assert said(state, 0.0, 10.0, machines=("c",)) == ["waiting for b to form a group (10 s)"]
    assert state.view is not None
    leaderless = replace(state, view=replace(state.view, leader=None))
    assert said(leaderless, 0.0, 10.0) == ["waiting for a leader (10 s)"]


@pytest.mark.parametrize(
    "state",
    [
        replace(a_state(), known=a_group("a", "b")),
        replace(a_state(), leaving=Leaving(0, "")),
        replace(a_state(), drain_until=1.0),
        replace(a_state(), is_store_lost=True),
        replace(a_state(), view=None),
    ],
    ids=["trains", "leaves", "asked to leave", "no etcd", "nothing seen"],
)
def test_nothing_is_said_where_nothing_is_waited_for(state: AgentState) -> None:
    assert said(state, 0.0, 10.0, 20.0) == []


def test_a_wait_after_a_loss_is_one_too_and_each_wait_is_counted_anew() -> None:
    sentences: list[str] = []
    waiting = WaitNotices((), sentences.append)
    lost = replace(a_state(), known=a_group())
    for moment in (0.0, 10.0):
        waiting.update(lost, moment)
    waiting.update(replace(a_state(), known=a_group("a")), 11.0)
    for moment in (20.0, 29.0, 30.0):
        waiting.update(lost, moment)
    assert sentences == [f"{REASON} (10 s)", f"{REASON} (10 s)"]


def test_an_outage_of_etcd_is_told_once_and_only_where_it_is_news() -> None:
    told: list[str] = []
    outages = EtcdOutageNotice(lambda: "it did not answer", lambda what, why: told.append(f"{what} ({why})"))
    trains = replace(a_state(), is_store_lost=True, workers=LocalWorkers(is_alive=True))
    ended = Result(run="r", group=1, succeeded=True, exit_code=0, reason="")
    over = ClusterView(revision=2, is_whole=True, result=Stored(ended, 1, 1))
    for state in (
        *(trains, trains),
        a_state(),
        replace(trains, drain_until=9.0),  # the agent leaves, and stops the etcd that it brought
        a_state(),
        replace(trains, view=over),
        a_state(),
        replace(a_state(), is_store_lost=True),
    ):
        outages.update(state, 0.0)
    assert told == [
        "etcd cannot be reached; training goes on (it did not answer)",
        "etcd cannot be reached (it did not answer)",
    ]
