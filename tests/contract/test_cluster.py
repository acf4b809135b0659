"""Three real members: one (also the leader) is lost, frozen or isolated; the client continues with the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from clusters import PATIENCE_S, Member, etcd_cluster, leader_first, patient_store
from ports import held_ports
from waiting import wait_for

from agent.errors import StoreUnavailable
from agent.store import connections
from agent.store.api import KeyRange, Put, Snapshot
from agent.store.etcd import EtcdStore
from agent.store.etcd_errors import NeverSent
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

ALL = KeyRange("/job/", is_prefix=True)
RETRY_S = 30.0
LEASE_S = 20.0


@dataclass
class Client:
    """Writes continuously, mirrors the keys, and keeps a lease alive, as an agent does."""

    endpoints: list[str]
    written: dict[str, bytes] = field(default_factory=dict)
    """What etcd has acknowledged."""
    snapshots: list[Snapshot] = field(default_factory=list)
    outages: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_closed = threading.Event()
        self.store = EtcdStore(self.endpoints, retry_for_s=RETRY_S)
        self.mirror = Mirror(self.store, [ALL], self.snapshots.append, self.outages.append)
        self.mirror.start()
        patient = patient_store(*self.endpoints)
        lease = patient.grant(LEASE_S)
        patient.transact([], [Put("/job/alive", b"", lease.lease_id)])
        patient.close()
        self.keeper = LeaseKeeper(self.store, lambda: True, self.lost.append)
        self.keeper.hold(lease)
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        number = 0
        while not self._is_closed.wait(0.01):
            number += 1
            key, value = f"/job/{number}", b"%d" % number
            try:
                self.store.transact([], [Put(key, value)])
            except StoreUnavailable:
                continue  # it may have landed or not
            self.written[key] = value

    def check_that_it_goes_on(self) -> None:
        """A read within its deadline; then ten more writes, all seen by the mirror; the lease is renewed."""
        before = len(self.written)
        renewed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.store.read([ALL])
        wait_for(lambda: len(self.written) >= before + 10, "ten more writes")
        seen = len(self.written)
        wait_for(lambda: len(self.snapshots[-1].items) > seen, "the mirror shows them")
        wait_for(lambda: (self.keeper.fresh_until() or 0.0) > renewed_at + LEASE_S, "a renewal")

    def check_that_nothing_was_lost(self) -> None:
        self._is_closed.set()
        self._thread.join()
        stored = {item.key: item.value for item in self.store.read([ALL]).items}
        assert {key: stored.get(key) for key in self.written} == self.written
        wait_for(lambda: {each.key: each.value for each in self.snapshots[-1].items} == stored, "the mirror shows all")
        assert "/job/alive" in stored
        assert self.lost == []

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self.mirror.close()
        self.keeper.close()
        self.store.close()


Connect = Callable[..., Client]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    with etcd_cluster(tmp_path, 3) as running:
        yield running


@pytest.fixture
def connect() -> Iterator[Connect]:
    started: list[Client] = []

    def start(*members: Member) -> Client:
        started.append(Client([member.endpoint for member in members]))
        return started[-1]

    yield start
    for client in started:
        client.close()


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_one_member_of_three_is_lost(members: list[Member], connect: Connect, victim: str, fault: str) -> None:
    """The member that the client uses. All calls and the mirror continue; no acknowledged write is lost."""
    leader, follower, other = leader_first(members)
    used = leader if victim == "leader" else follower
    client = connect(used, other, follower if used is leader else leader)
    wait_for(lambda: len(client.written) > 10, "writes")
    getattr(used, fault)()
    client.check_that_it_goes_on()
    client.check_that_nothing_was_lost()


def test_each_member_in_turn_is_restarted(members: list[Member], connect: Connect) -> None:
    """As in an upgrade of etcd: the client ends where it began."""
    client = connect(*members)
    for member in members:
        member.restart()
        wait_for(member.is_listening, "it is back")
        client.check_that_it_goes_on()
    client.check_that_nothing_was_lost()


def test_a_member_that_is_alone_ends_its_watches(members: list[Member], connect: Connect) -> None:
    """It would keep them open and silent for ever, while the others went on."""
    alone, *others = members
    leader_first(members)
    client = connect(alone)
    wait_for(lambda: client.snapshots != [] and len(client.snapshots[-1].items) > 10, "the watch shows writes")
    before = len(client.outages)
    for other in others:
        other.freeze()
    wait_for(lambda: len(client.outages) > before, "the watch fails")
    assert "no leader" in client.outages[before]
    for other in others:
        other.thaw()
    revision = client.store.read([]).revision
    wait_for(lambda: client.snapshots[-1].revision >= revision, "the mirror is back")


def test_a_write_that_was_never_sent_goes_to_another_endpoint(members: list[Member]) -> None:
    """One call, two dead endpoints before the living one."""
    leader_first(members)
    with held_ports(2) as ports:
        store = patient_store(*(f"127.0.0.1:{port}" for port in ports), members[0].endpoint)
        assert store.transact([], [Put("/job/a", b"1")]).succeeded
        store.close()


def test_a_write_that_may_have_been_sent_is_not_repeated(members: list[Member]) -> None:
    """It waits at a frozen endpoint, which is then killed: the client cannot know whether it was applied."""
    leader_first(members)
    used, other, third = members
    store = patient_store(used.endpoint, other.endpoint, third.endpoint)
    store.read([])
    used.freeze()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(store.transact, [], [Put("/job/a", b"1")])
        wait_for(used.has_unread, "the write has arrived")
        used.kill()
        with pytest.raises(StoreUnavailable) as raised:
            answer.result(PATIENCE_S)
    assert not isinstance(raised.value, NeverSent)
    assert store.read([ALL]).items == ()
    store.close()


def test_a_quiet_watch_follows_when_other_calls_leave_its_endpoint(
    members: list[Member], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """By itself it would notice a frozen endpoint only much later: here keepalive is out of reach."""
    options = dict(connections._CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 600_000}
    monkeypatch.setattr(connections, "_CHANNEL_OPTIONS", tuple(options.items()))
    _, used, other = leader_first(members)
    mine = EtcdStore([used.endpoint, other.endpoint], retry_for_s=RETRY_S)
    theirs = patient_store(other.endpoint)
    snapshots: list[Snapshot] = []
    mirror = Mirror(mine, [ALL], snapshots.append, lambda _: None)
    request.addfinalizer(mirror.close)
    for store in (mine, theirs):
        request.addfinalizer(store.close)  # before the mirror
    mirror.start()
    wait_for(lambda: len(snapshots) > 0, "a snapshot")
    used.freeze()
    mine.read([])
    theirs.transact([], [Put("/job/a", b"1")])
    wait_for(lambda: len(snapshots[-1].items) == 1, "the mirror shows it", within_s=20.0)
