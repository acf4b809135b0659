"""The lease keeper: renews while the loop lives, reports a loss once, and knows how long the lease can be trusted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs
from waiting import wait_for

from agent.runtime import loop as loop_
from agent.runtime.loop import Heartbeat
from agent.store import lease as lease_
from agent.store.api import KeyRange, Lease, Put
from agent.store.lease import LeaseKeeper
from agent.store.memory import MemoryStore

TTL_S = 0.8
"""For tests in which the store's clock is stopped meanwhile."""
LONG_S = 6.0
"""For tests in which a lease must not expire between two renewals because the machine is busy."""
BOUND_S = 60.0


class CountingStore(MemoryStore):
    """Counts the renewals, and can hold one up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.renewals: list[int] = []
        self.changed = threading.Condition()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def refresh(self, lease_id: int) -> float:
        with self.changed:
            self.renewals.append(lease_id)
            self.changed.notify_all()
        assert self.may_answer.wait(BOUND_S)
        return super().refresh(lease_id)

    def wait_for_renewals(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.renewals) >= count, BOUND_S)


class Agent:
    """The agent's side of the keeper: its answers, and the keeper's reports."""

    def __init__(self, store: CountingStore) -> None:
        self.is_alive = True
        self.asked = threading.Semaphore(0)
        self.lost: list[int] = []
        self.has_lost = threading.Event()
        self.keeper = LeaseKeeper(store, self._is_alive, self._on_lost)

    def _is_alive(self) -> bool:
        self.asked.release()
        return self.is_alive

    def _on_lost(self, lease_id: int) -> None:
        self.lost.append(lease_id)
        self.has_lost.set()


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def agent(store: CountingStore) -> Iterator[Agent]:
    agent = Agent(store)
    yield agent
    agent.keeper.close()
    assert not agent.keeper._thread.is_alive()


def wait_until(is_so: Callable[[], bool]) -> None:
    wait_for(is_so, "the condition", BOUND_S, every_s=0.002)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_held_lease_outlives_its_length(store: CountingStore, agent: Agent) -> None:
    """It is renewed at once and then four times a length."""
    held_at = time.monotonic()
    lease = store.grant(LONG_S)
    agent.keeper.hold(lease)
    store.wait_for_renewals(6)
    assert time.monotonic() - held_at >= 5 * LONG_S / 4
    assert store.refresh(lease.lease_id) == LONG_S
    assert agent.lost == []


def test_a_grant_counts_as_a_renewal(store: CountingStore) -> None:
    """It is trusted from when it was requested, and renewed a quarter of its length after that."""
    fresh: list[float] = []
    keeper = LeaseKeeper(store, lambda: True, lambda _lease_id: None, fresh.append)
    asked_at = now()
    keeper.hold(store.grant(LONG_S), asked_at)
    assert (keeper.fresh_until(), fresh) == (asked_at + LONG_S, [asked_at + LONG_S])
    store.wait_for_renewals(1)
    assert now() >= asked_at + LONG_S / 4
    wait_until(lambda: len(fresh) == 2)
    keeper.close()


def test_freshness_counts_from_the_sending_of_an_answered_renewal(store: CountingStore, agent: Agent) -> None:
    """Nothing is known before the first answer, nor after the lease was dropped."""
    store.may_answer.clear()
    lease = store.grant(60)
    before = now()
    agent.keeper.hold(lease)
    store.wait_for_renewals(1)
    assert agent.keeper.fresh_until() is None
    sent_by = now()
    store.may_answer.set()
    wait_until(lambda: agent.keeper.fresh_until() is not None)
    fresh_until = agent.keeper.fresh_until()
    assert fresh_until is not None
    assert before + 60 <= fresh_until <= sent_by + 60
    agent.keeper.drop()
    assert agent.keeper.fresh_until() is None


def test_a_lease_has_run_out_once_its_time_is_over_until_a_renewal_is_answered(
    store: CountingStore, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a paused process finds when it wakes, before it has asked etcd anything."""
    ours = [1000.0]
    monkeypatch.setattr(lease_, "clock", SimpleNamespace(now=lambda: ours[0]))
    agent.keeper.hold(store.grant(60))
    wait_until(lambda: agent.keeper.fresh_until() is not None)
    assert agent.keeper.fresh_until() == 1060.0
    store.may_answer.clear()
    ours[0] = 1059.9
    assert not agent.keeper.has_run_out()
    ours[0] = 1060.0
    assert agent.keeper.has_run_out()
    agent.keeper.hold(store.grant(60))
    assert not agent.keeper.has_run_out()
    store.may_answer.set()


def test_a_hung_loop_loses_its_lease(store: CountingStore, agent: Agent) -> None:
    """The keeper asks, and renews nothing while the answer is no; when the loop turns again it learns of the loss."""
    agent.is_alive = False
    lease = store.grant(LONG_S)
    store.transact([], [Put("place", b"mine", lease.lease_id)])
    agent.keeper.hold(lease)
    wait_until(lambda: not store.read([KeyRange("place")]).items)
    assert store.renewals == []
    agent.is_alive = True
    agent.keeper.loop_turned()
    assert agent.has_lost.wait(BOUND_S)
    assert agent.lost == [lease.lease_id]


def test_a_renewal_that_is_due_while_the_loop_is_late_is_sent_at_its_next_turn(
    store: CountingStore, agent: Agent
) -> None:
    """Nobody asks again and again in between, and the next turn in time is not waited for."""
    agent.is_alive = False
    agent.keeper.hold(store.grant(60))
    assert agent.asked.acquire(timeout=BOUND_S)
    assert not agent.asked.acquire(timeout=0.5)
    agent.is_alive = True
    assert store.renewals == []
    turned_at = now()
    agent.keeper.loop_turned()
    store.wait_for_renewals(1)
    wait_until(lambda: agent.keeper.fresh_until() is not None)
    assert (agent.keeper.fresh_until() or 0.0) - 60 >= turned_at


def test_a_keeper_that_waits_for_a_hung_loop_can_be_given_another_lease_and_ended(
    store: CountingStore, agent: Agent
) -> None:
    """What was dropped meanwhile is never renewed."""
    agent.is_alive = False
    agent.keeper.hold(store.grant(60))
    assert agent.asked.acquire(timeout=BOUND_S)
    other = store.grant(60)
    agent.keeper.hold(other)
    assert agent.asked.acquire(timeout=BOUND_S)
    agent.is_alive = True
    agent.keeper.loop_turned()
    store.wait_for_renewals(1)
    assert store.renewals == [other.lease_id]
    agent.is_alive = False
    agent.keeper.hold(store.grant(60))
    agent.keeper.close()
    assert store.renewals == [other.lease_id]


class Loop:
    """A loop with the heartbeat of a real one. The test controls its turns, and the time for it and its lease."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(loop_, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(lease_, "clock", SimpleNamespace(now=lambda: self.now))
        self.store = CountingStore(lambda: self.now)
        self.heartbeat = Heartbeat(TTL_S)
        self.found_late = threading.Semaphore(0)
        """Released when the keeper wanted to renew and found it late: then it has nothing under way."""
        self.keeper = LeaseKeeper(self.store, self._is_alive, lambda _lease_id: None)
        self.heartbeat.on_beat = self.keeper.loop_turned

    def hang(self) -> None:
        """Be a little later than the limit, and wait until the keeper has found out."""
        self.now += self.heartbeat.limit_s + 0.01
        assert self.found_late.acquire(timeout=BOUND_S)

    def turn(self) -> None:
        """Turn again. Returns when the keeper has renewed the lease."""
        renewals = len(self.store.renewals)
        self.heartbeat.beat()
        self.store.wait_for_renewals(renewals + 1)
        wait_until(lambda: self.keeper.fresh_until() == self.now + TTL_S)

    def _is_alive(self) -> bool:
        is_alive = self.heartbeat.is_alive()
        if not is_alive:
            self.found_late.release()
        return is_alive


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop(monkeypatch)
    yield made
    made.keeper.close()


def test_a_loop_that_is_late_for_most_of_its_lease_keeps_it(loop: Loop) -> None:
    """A busy machine is no hang: each time that the loop turns again its lease is as good as new."""
    lease = loop.store.grant(TTL_S)
    loop.keeper.hold(lease)
    loop.store.wait_for_renewals(1)
    for _ in range(4):
        loop.hang()
        loop.now += TTL_S / 2  # how late it is
        loop.turn()
    assert loop.store.refresh(lease.lease_id) == TTL_S


def test_a_hung_loop_is_renewed_for_no_longer_than_the_limit(loop: Loop) -> None:
    """So its place is lost a lease and a limit after its last turn, wherever between two renewals that was."""
    loop.keeper.hold(loop.store.grant(TTL_S))
    loop.store.wait_for_renewals(1)
    for nth in range(4):
        time.sleep(nth * TTL_S / 16)  # a quarter of the pause between two renewals
        loop.hang()
        renewals, noticed = len(loop.store.renewals), loop.now
        loop.now += TTL_S / 2
        time.sleep(TTL_S / 2)  # in which two renewals fall due
        assert len(loop.store.renewals) == renewals
        fresh_until = loop.keeper.fresh_until()
        assert fresh_until is not None
        assert fresh_until - TTL_S <= noticed
        loop.turn()


def test_a_lost_lease_is_reported_once(store: CountingStore, agent: Agent) -> None:
    """Afterwards nothing is held, so nothing is asked."""
    lease = store.grant(LONG_S)
    store.revoke(lease.lease_id)
    agent.keeper.hold(lease)
    assert agent.has_lost.wait(BOUND_S)
    assert agent.keeper.fresh_until() is None
    other = store.grant(LONG_S)
    agent.keeper.hold(other)
    store.wait_for_renewals(3)
    assert agent.lost == [lease.lease_id]
    assert store.renewals[:2] == [lease.lease_id, other.lease_id]


def test_a_lease_dropped_while_its_renewal_is_under_way_is_no_loss(store: CountingStore, agent: Agent) -> None:
    """The agent revokes the lease that it dropped; `on_lost` is not called."""
    store.may_answer.clear()
    dropped, held = store.grant(60), store.grant(60)
    agent.keeper.hold(dropped)
    store.wait_for_renewals(1)
    agent.keeper.drop()
    store.revoke(dropped.lease_id)
    agent.keeper.hold(held)
    store.may_answer.set()
    wait_until(lambda: agent.keeper.fresh_until() is not None)
    assert agent.lost == []


def test_an_outage_is_retried_and_is_no_loss(store: CountingStore, agent: Agent) -> None:
    """Whether the lease lives is not known until the store answers."""
    agent.keeper.hold(store.grant(60))
    wait_until(lambda: agent.keeper.fresh_until() is not None)
    store.disconnect()
    agent.keeper.hold(store.client().grant(60))
    store.wait_for_renewals(3)
    assert agent.keeper.fresh_until() is None
    store.reconnect()
    wait_until(lambda: agent.keeper.fresh_until() is not None)
    assert agent.lost == []


@pytest.mark.parametrize("place", ["is_loop_alive", "refresh", "on_lost"])
def test_an_error_that_nobody_foresaw_costs_a_renewal_not_the_thread(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It is logged once, not at each attempt."""
    faults = threading.Semaphore(3)
    is_over = threading.Event()

    def fail() -> None:
        if faults.acquire(blocking=False):
            raise ValueError("nobody foresaw this")
        is_over.set()

    def refresh(lease_id: int) -> float:
        if place == "refresh":
            fail()
        return MemoryStore.refresh(store, lease_id)

    monkeypatch.setattr(store, "refresh", refresh)
    keeper = LeaseKeeper(
        store,
        lambda: place != "is_loop_alive" or fail() is None,
        lambda _lease_id: fail() if place == "on_lost" else None,
    )
    with capture_logs() as said:
        while not is_over.is_set():
            keeper.hold(Lease(404, TTL_S) if place == "on_lost" else store.grant(60))
            is_over.wait(0.05)
        keeper.hold(store.grant(60))
        wait_until(lambda: keeper.fresh_until() is not None)
    keeper.close()
    assert [str(each["exc_info"]) for each in said] == ["nobody foresaw this"]


def test_an_idle_keeper_ends_at_once(agent: Agent) -> None:
    """Nothing held, nothing to wait for; a lease given afterwards is not renewed."""
    agent.keeper.close()
    agent.keeper.hold(Lease(1, 60))
    assert not agent.keeper._thread.is_alive()
