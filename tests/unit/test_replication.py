"""Waiting until a rank's part of a snapshot was sent, and what that means for the snapshots' steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate, cycle
from pathlib import Path

import pytest
from fake_agent import FakeAgent
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import contract, restoring, snapshots
from trainer_runtime import state as state_
from trainer_runtime.agent_events import GroupOverError
from trainer_runtime.capture.capturing import Capturer
from trainer_runtime.contract import ControlPage
from trainer_runtime.replication import Replication, open_replication
from trainer_runtime.snapshot_page import create_memory

BOUND_S = 30.0


@pytest.fixture
def page() -> Iterator[ControlPage]:
    made, descriptor = ControlPage.create("test")
    os.close(descriptor)
    yield made
    made.close()


@pytest.fixture
def event() -> Iterator[int]:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def test_a_rank_waits_until_the_agent_is_done_with_its_snapshot(page: ControlPage, event: int) -> None:
    replication, is_over = Replication(page, event), threading.Event()

    def wait() -> None:
        replication.wait(7)
        is_over.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for step in (5, 6):  # of older snapshots
        page.replicated = step
        os.eventfd_write(event, 1)
    assert not is_over.wait(0.2)
    page.replicating_us, page.replicated = 250_000, 7
    os.eventfd_write(event, 1)
    assert is_over.wait(BOUND_S)
    thread.join()
    assert replication.took_s == 0.25
    replication.wait(6)  # returns at once


def test_the_end_of_the_group_ends_the_wait(page: ControlPage, event: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part may never be sent: what the rank would replace is still needed."""
    monkeypatch.setenv(contract.GROUP, "3")
    page.over = 2
    replication, is_over = Replication(page, event), threading.Event()

    def wait() -> None:
        with pytest.raises(GroupOverError):
            replication.wait(7)
        is_over.set()

    thread = threading.Thread(target=wait)
    thread.start()
    os.eventfd_write(event, 1)
    assert not is_over.wait(0.2), "another group was over"
    page.over = 3
    os.eventfd_write(event, 1)
    assert is_over.wait(BOUND_S)
    thread.join()


@pytest.mark.parametrize(
    ("world_size", "has_event", "is_open"), [("4", True, True), ("2", True, False), ("4", False, False)]
)
def test_only_a_rank_of_a_group_of_several_nodes_waits(
    page: ControlPage, event: int, monkeypatch: pytest.MonkeyPatch, world_size: str, *, has_event: bool, is_open: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if has_event:
        monkeypatch.setenv(contract.REPLICATED_FD, str(event))
    assert (open_replication(page) is not None) == is_open
    assert open_replication(None) is None


class Watched:
    """Notes when the State waits for which snapshot."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        """At the commit of which step, for the snapshot of which one."""
        self.took_s = 0.0
        self.state: tr.State

    def is_over(self, step: int) -> bool:
        return step == 0

    def wait(self, step: int) -> None:
        self.waits.append((self.state.step, step))


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[FakeAgent, Watched]]]:
    """Commit steps of a State whose parts other nodes are to hold, under an agent."""
    memory, agents = create_memory("test"), list[FakeAgent]()
    tr.init()

    def run(
        steps: int, save_every: int = 1000, took_s: float = 0.0, copied_s: float = 0.0
    ) -> tuple[FakeAgent, Watched]:
        agent, watched = FakeAgent(), Watched()
        agents.append(agent)
        watched.took_s = took_s
        monkeypatch.setattr(Capturer, "took_s", copied_s)  # else the interval would follow from it: steps take no time
        channel = agent.open()
        monkeypatch.setattr(state_, "open_channel", lambda: channel)
        monkeypatch.setattr(restoring, "open_replication", lambda _page: watched)
        variables = {contract.RUN_ID: "us", contract.GROUP: "1", contract.CHECKPOINT_DIR: str(tmp_path)}
        variables |= {contract.SNAPSHOT_FD: str(memory), contract.SNAPSHOT_OVERHEAD: "1e9"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        watched.state = state = tr.State(best=0.0, save_every=save_every)
        state.restore()
        for _ in range(steps):
            state.commit()
        return agent, watched

    yield run
    for agent in agents:
        agent.close()
    os.close(memory)


def test_a_rank_waits_one_step_before_it_replaces_a_snapshot_that_others_may_need(
    train: Callable[..., tuple[FakeAgent, Watched]],
) -> None:
    """A rank that takes a snapshot has made a step with the others, which have waited before that step as it has."""
    agent, watched = train(10)
    wait_for(lambda: agent.snapshots == [1, 3, 5, 7, 9], "every second step", BOUND_S)
    assert watched.waits == [(2, 1), (4, 3), (6, 5), (8, 7), (10, 9)]


def test_the_interval_leaves_time_for_sending(train: Callable[..., tuple[FakeAgent, Watched]]) -> None:
    """After the first few, there is not another one in the rest of a short run."""
    agent, watched = train(100, took_s=1e6)
    wait_for(lambda: agent.snapshots == [1, 3, 5, 7], "the first ones", BOUND_S)
    assert watched.waits == [(2, 1), (4, 3), (6, 5)]


@pytest.mark.parametrize("copied_s", [10.0, 0.0])
def test_what_copying_takes_from_the_steps_counts_as_far_as_it_lasts(
    train: Callable[..., tuple[FakeAgent, Watched]], monkeypatch: pytest.MonkeyPatch, copied_s: float
) -> None:
    """The first half of each interval takes very much longer than the other."""
    moments = accumulate(cycle([0.0, 2e6, 1e6]))  # a snapshot, half an interval later, and before the next snapshot
    monkeypatch.setattr(snapshots, "_trained_s", lambda: next(moments))
    _, watched = train(4, copied_s=copied_s)
    taker = watched.state._snapshots
    assert taker is not None
    assert copied_s <= taker._beside_s(5) < copied_s + 5.0


def test_a_handoff_that_leads_to_nothing_leaves_two_steps_until_the_next_snapshot(
    train: Callable[..., tuple[FakeAgent, Watched]],
) -> None:
    """Its snapshot replaces one, so all parts of it are to arrive before the next one replaces another."""
    agent, watched = train(4)
    snapshots = watched.state._snapshots
    assert snapshots is not None
    assert snapshots.take_and_wait(4)
    for _ in range(5):
        watched.state.commit()
    wait_for(lambda: agent.snapshots == [1, 3, 4, 7, 9], "not after step 5", BOUND_S)
    assert watched.waits == [(2, 1), (4, 3), (4, 3), (6, 4), (8, 7)]


def test_a_handoff_at_the_step_of_a_snapshot_takes_no_second_one(
    train: Callable[..., tuple[FakeAgent, Watched]],
) -> None:
    agent, watched = train(3)
    assert watched.state._snapshots is not None
    assert watched.state._snapshots.take_and_wait(3)
    wait_for(lambda: agent.snapshots == [1, 3], "only those of the schedule", BOUND_S)
    assert watched.waits == [(2, 1), (3, 3)]


def test_a_checkpoint_between_two_snapshots_replaces_none(train: Callable[..., tuple[FakeAgent, Watched]]) -> None:
    """It is written from a copy that is no snapshot: other ranks may still need both of these."""
    agent, watched = train(9, save_every=4)
    assert watched.state.step == 9
    wait_for(lambda: agent.snapshots == [1, 3, 5, 7, 9], "the same as without checkpoints", BOUND_S)
    wait_for(lambda: agent.committed is not None, "a checkpoint", BOUND_S)
    assert watched.waits == [(2, 1), (4, 3), (6, 5), (8, 7)]
