"""Three real members: one is lost, the leader too, one is frozen, one is alone; the client goes on with the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from clusters import Member, etcd_cluster, leader_first
from ports import free_ports
from waiting import wait_for

from agent.errors import StoreUnavailable
from agent.store.api import KeyRange, Put, Snapshot
from agent.store.etcd import EtcdStore
from agent.store.failures import NeverSent
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

ALL = KeyRange("/job/", is_prefix=True)
RETRY_S = 3.0
SLACK_S = 1.0
LEASE_S = 5.0


@dataclass
class Client:
    """Writes without end, follows what is there, and keeps a lease, as an agent does."""

    store: EtcdStore
    written: dict[str, bytes] = field(default_factory=dict)
    """What etcd has acknowledged."""
    snapshots: list[Snapshot] = field(default_factory=list)
    outages: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_closed = threading.Event()
        self.mirror = Mirror(self.store, [ALL], self.snapshots.append, self.outages.append)
        self.mirror.start()
        lease = self.store.grant(LEASE_S)
        self.store.transact([], [Put("/job/alive", b"", lease.lease_id)])
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
        """A read within its deadline; soon ten more writes, all seen by the mirror; the lease is renewed."""
        began_at, before = time.monotonic(), len(self.written)
        renewed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.store.read([ALL])
        assert time.monotonic() - began_at < RETRY_S + SLACK_S
        wait_for(lambda: len(self.written) >= before + 10, "ten more writes", within_s=RETRY_S + SLACK_S)
        seen = len(self.written)
        wait_for(lambda: len(self.snapshots[-1].items) > seen, "the mirror shows them", within_s=RETRY_S + SLACK_S)
        wait_for(lambda: (self.keeper.fresh_until() or 0.0) > renewed_at + LEASE_S, "a renewal", within_s=LEASE_S)

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
        started.append(Client(EtcdStore([member.endpoint for member in members], retry_for_s=RETRY_S)))
        return started[-1]

    yield start
    for client in started:
        client.close()


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_one_member_of_three_is_lost(members: list[Member], connect: Connect, victim: str, fault: str) -> None:
    """The one that the client uses. Reads, writes, renewals and the mirror go on; nothing acknowledged is lost."""
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
    client = connect(alone)
    wait_for(lambda: len(client.snapshots) > 0, "a snapshot")
    for other in others:
        other.freeze()
    wait_for(lambda: len(client.outages) > 0, "the watch fails")
    assert "no leader" in client.outages[0]
    for other in others:
        other.thaw()
    wait_for(lambda: client.snapshots[-1].revision >= client.store.read([]).revision, "the mirror is back")


def test_a_write_that_was_never_sent_goes_to_another_endpoint(members: list[Member]) -> None:
    """One call, two dead endpoints before the living one."""
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]
    store = EtcdStore([*dead, members[0].endpoint])
    leader_first(members)
    assert store.transact([], [Put("/job/a", b"1")]).succeeded
    store.close()


def test_a_write_that_may_have_been_sent_is_not_repeated(members: list[Member]) -> None:
    """It waits at a frozen endpoint, which is then killed: the client cannot know what became of it."""
    leader_first(members)
    used, other, third = members
    store = EtcdStore([used.endpoint, other.endpoint, third.endpoint], attempt_timeout_s=10.0)
    store.read([])
    used.freeze()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(store.transact, [], [Put("/job/a", b"1")])
        wait_for(used.has_unread, "the write has arrived")
        used.kill()
        with pytest.raises(StoreUnavailable) as raised:
            answer.result(5.0)
    assert not isinstance(raised.value, NeverSent)
    assert store.read([ALL]).items == ()
    store.close()


def test_a_quiet_watch_follows_when_other_calls_leave_its_endpoint(members: list[Member]) -> None:
    """By itself it would notice a frozen endpoint only after several seconds."""
    _, used, other = leader_first(members)
    mine, theirs = EtcdStore([used.endpoint, other.endpoint]), EtcdStore([other.endpoint])
    snapshots: list[Snapshot] = []
    mirror = Mirror(mine, [ALL], snapshots.append, lambda _: None)
    mirror.start()
    wait_for(lambda: len(snapshots) > 0, "a snapshot")
    used.freeze()
    mine.read([])
    theirs.transact([], [Put("/job/a", b"1")])
    wait_for(lambda: len(snapshots[-1].items) == 1, "the mirror shows it", within_s=4.0)
    mirror.close()
    mine.close()
    theirs.close()
