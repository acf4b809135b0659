"""A real etcd that is killed, frozen, cut off or missing, and the client's reaction."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from cable import Proxy
from clusters import patient_store
from ports import held_ports
from waiting import freeze

from agent.errors import StoreUnavailable
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.store.api import KeyRange, Lease, Put, Snapshot, Store
from agent.store.etcd import EtcdStore
from agent.store.etcd_errors import EndpointFailed, OutOfTime
from agent.store.etcd_protocol import message
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

if TYPE_CHECKING:
    from tests.contract.conftest import WaitUntil

ALL = KeyRange("/job/", is_prefix=True)
ATTEMPT_S, RETRY_S = 0.3, 0.6
"""Of calls that are to fail."""
BOUND_S = 60.0


class Watched:
    """A mirror and the snapshots that it delivered."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.snapshots: list[Snapshot] = []
        self.outages: list[str] = []
        self.mirror = Mirror(store, [ALL], self.snapshots.append, self.outages.append)
        self.mirror.start()

    def shows(self, **values: bytes) -> bool:
        """Say whether the newest snapshot holds exactly these keys."""
        newest = self.snapshots[-1:]
        return [{item.key: item.value for item in each.items} for each in newest] == [
            {f"/job/{key}": value for key, value in values.items()}
        ]


Connect = Callable[..., EtcdStore]


class Silent(grpc.GenericRpcHandler):
    """Ends every call as if all were well, and answers nothing."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        del handler_call_details
        return grpc.stream_stream_rpc_method_handler(lambda _requests, _context: iter(()))


class StuckDisk(grpc.GenericRpcHandler):
    """A proxy before an etcd member with a disk that can hang: requests that need the disk are then not answered."""

    def __init__(self, member: str) -> None:
        self._channel = grpc.insecure_channel(member)
        self._is_stuck = threading.Event()
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(8)
        self._server = grpc.server(self._threads, handlers=[self])
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stick(self) -> None:
        self._is_stuck.set()

    def close(self) -> None:
        self._is_over.set()
        self._server.stop(None).wait()
        self._threads.shutdown()
        self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method
        needs_disk = method.split("/")[1] in {"etcdserverpb.KV", "etcdserverpb.Watch"}

        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = self._channel.stream_stream(method)(requests)
            context.add_callback(call.cancel)
            for answer in call:
                if needs_disk and self._is_stuck.is_set():
                    self._is_over.wait()
                yield answer

        return grpc.stream_stream_rpc_method_handler(forward)


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=[Silent()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """An etcd that a test may harm."""
    with EmbeddedEtcd(tmp_path, port=0) as etcd:
        yield etcd


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Open clients, closed with the test. They are patient: a busy machine is no fault."""
    opened: list[EtcdStore] = []

    def start(*endpoints: str) -> EtcdStore:
        opened.append(patient_store(*endpoints))
        return opened[-1]

    yield start
    for store in opened:
        store.close()


@pytest.fixture
def connect_hasty() -> Iterator[Connect]:
    """Open clients with short deadlines, closed with the test."""
    opened: list[EtcdStore] = []

    def start(*endpoints: str) -> EtcdStore:
        opened.append(EtcdStore(endpoints, attempt_timeout_s=ATTEMPT_S, retry_for_s=RETRY_S))
        return opened[-1]

    yield start
    for store in opened:
        store.close()


@pytest.fixture
def watch_job() -> Iterator[Callable[[Store], Watched]]:
    started: list[Watched] = []

    def start(store: Store) -> Watched:
        started.append(Watched(store))
        return started[-1]

    yield start
    for watched in started:
        watched.store.close()  # it may be waiting for an etcd that is gone
        watched.mirror.close()


def harm(etcd: EmbeddedEtcd, number: signal.Signals) -> None:
    """Send a signal; a SIGSTOP has stopped every thread when this returns (until then etcd may answer once more)."""
    assert etcd.pid is not None
    if number is signal.SIGSTOP:
        freeze(etcd.pid)
    else:
        os.kill(etcd.pid, number)


@pytest.fixture
def port() -> Iterator[int]:
    """A port for one etcd, and for its successor; no other process gets it in between."""
    with held_ports(1) as (found,):
        yield found


def test_a_killed_etcd_comes_back_with_its_data(
    tmp_path: Path,
    port: int,
    connect: Connect,
    connect_hasty: Connect,
    watch_job: Callable[[Store], Watched],
    wait_until: WaitUntil,
) -> None:
    """Acknowledged writes survive a kill; the mirror reports the outage once, and continues by itself."""
    with EmbeddedEtcd(tmp_path, port=port) as first:
        endpoint = first.endpoint
        store = connect(endpoint)
        before = store.transact([], [Put("/job/a", b"1")]).revision
        watched = watch_job(connect(endpoint))
        wait_until(lambda: watched.shows(a=b"1"))
        harm(first, signal.SIGKILL)
        wait_until(lambda: len(watched.outages) == 1)
        with pytest.raises(StoreUnavailable):
            connect_hasty(endpoint).transact([], [Put("/job/a", b"lost")])
    with EmbeddedEtcd(tmp_path, port=port):
        wait_until(lambda: len(watched.snapshots) >= 2)
        assert store.read([ALL]).items[0].mod_revision == before
        store.transact([], [Put("/job/b", b"2")])
        wait_until(lambda: watched.shows(a=b"1", b=b"2"))
        assert len(watched.outages) == 1


def test_an_emptied_etcd_shows_a_lower_revision(
    tmp_path: Path, port: int, connect: Connect, watch_job: Callable[[Store], Watched], wait_until: WaitUntil
) -> None:
    """Lost data is delivered as it is: the receiver must see it."""
    with EmbeddedEtcd(tmp_path / "one", port=port) as first:
        store = connect(first.endpoint)
        for _ in range(5):
            store.transact([], [Put("/job/a", b"1")])
        watched = watch_job(store)
        wait_until(lambda: watched.shows(a=b"1"))
        harm(first, signal.SIGKILL)
    with EmbeddedEtcd(tmp_path / "two", port=port):
        wait_until(watched.shows)
        assert watched.snapshots[-1].revision < watched.snapshots[0].revision


def test_every_call_to_a_frozen_etcd_ends_in_time(
    own: EmbeddedEtcd, connect: Connect, connect_hasty: Connect, wait_until: WaitUntil
) -> None:
    """Each raises at its deadline, and works again once etcd does."""
    store, patient = connect_hasty(own.endpoint), connect(own.endpoint)
    lease = patient.grant(600)
    calls: list[Callable[[], object]] = [
        lambda: store.read([ALL]),
        lambda: store.transact([], [Put("/job/a", b"")]),
        lambda: store.grant(60),
        lambda: store.refresh(lease.lease_id),
        lambda: store.revoke(lease.lease_id),
    ]
    for call in calls:
        patient.read([])  # over the connection that both use: so it is open, and was not silent for long
        harm(own, signal.SIGSTOP)
        try:
            began_at = time.monotonic()
            with pytest.raises(StoreUnavailable, match=r"did not answer in time$"):
                call()
            assert time.monotonic() - began_at < BOUND_S / 2
        finally:
            harm(own, signal.SIGCONT)
    wait_until(lambda: _is_answered(store))


def _is_answered(store: EtcdStore) -> bool:
    try:
        return store.read([]).revision > 0
    except StoreUnavailable:
        return False


def test_a_mirror_catches_up_after_a_short_freeze(
    own: EmbeddedEtcd,
    connect: Connect,
    connect_hasty: Connect,
    watch_job: Callable[[Store], Watched],
    wait_until: WaitUntil,
) -> None:
    """A write that etcd received while it was frozen is delivered once it continues."""
    store = connect(own.endpoint)
    watched = watch_job(store)
    wait_until(watched.shows)
    harm(own, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        connect_hasty(own.endpoint).transact([], [Put("/job/a", b"1")])
    harm(own, signal.SIGCONT)
    store.transact([], [Put("/job/b", b"2")])
    wait_until(lambda: "/job/b" in {item.key for item in watched.snapshots[-1].items})


def test_a_mirror_notices_a_long_freeze(
    own: EmbeddedEtcd, connect: Connect, watch_job: Callable[[Store], Watched], wait_until: WaitUntil
) -> None:
    """Without an event due, keep-alive finds the frozen etcd; afterwards the mirror reads everything again."""
    store = connect(own.endpoint)
    watched = watch_job(store)
    wait_until(watched.shows)
    harm(own, signal.SIGSTOP)
    before = len(watched.snapshots)
    wait_until(lambda: len(watched.outages) > 0)
    harm(own, signal.SIGCONT)
    wait_until(lambda: len(watched.snapshots) > before)
    assert len(watched.outages) == 1


def test_a_lease_keeper_rides_out_a_freeze(
    own: EmbeddedEtcd,
    connect: Connect,
    connect_hasty: Connect,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease longer than the outage is renewed again; its freshness does not move meanwhile."""
    store = connect_hasty(own.endpoint)
    failures: list[str] = []
    refresh = store.refresh

    def noted(lease_id: int) -> float:
        try:
            return refresh(lease_id)
        except StoreUnavailable as error:
            failures.append(str(error))
            raise

    monkeypatch.setattr(store, "refresh", noted)
    lease = connect(own.endpoint).grant(20)  # renewed every 5 s
    lost: list[int] = []
    keeper = LeaseKeeper(store, lambda: True, lost.append)
    keeper.hold(lease)
    wait_until(lambda: keeper.fresh_until() is not None)
    harm(own, signal.SIGSTOP)
    failures.clear()
    wait_until(lambda: len(failures) > 0)
    fresh_until = keeper.fresh_until()
    wait_until(lambda: len(failures) > 1)
    assert keeper.fresh_until() == fresh_until
    harm(own, signal.SIGCONT)
    wait_until(lambda: keeper.fresh_until() != fresh_until)
    keeper.close()
    assert lost == []


def test_a_pulled_cable_is_an_outage_and_no_more(
    own: EmbeddedEtcd, connect: Connect, watch_job: Callable[[Store], Watched], wait_until: WaitUntil
) -> None:
    """Changes by others meanwhile are delivered after the reconnection."""
    proxy = Proxy(own.endpoint)
    watched, other = watch_job(connect(proxy.endpoint)), connect(own.endpoint)
    wait_until(watched.shows)
    proxy.pull()
    wait_until(lambda: len(watched.outages) == 1)
    other.transact([], [Put("/job/a", b"1")])
    proxy.plug_in()
    wait_until(lambda: watched.shows(a=b"1"))
    other.transact([], [Put("/job/a", b"2")])
    wait_until(lambda: watched.shows(a=b"2"))
    watched.mirror.close()
    proxy.close()


def test_a_client_that_receives_nothing_does_not_renew_its_lease(
    own: EmbeddedEtcd, connect: Connect, connect_hasty: Connect, wait_until: WaitUntil
) -> None:
    """Where answers get lost, and requests do not. One renewal is under way before it knows."""
    cable = Proxy(own.endpoint)
    store = connect_hasty(cable.endpoint)
    lease = connect(own.endpoint).grant(600)
    wait_until(lambda: _is_renewed(store, lease))
    before = _renewals(own)
    cable.drop_received()
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            store.refresh(lease.lease_id)
    assert _renewals(own) <= before + 1
    cable.pull()
    cable.plug_in()
    wait_until(lambda: _is_renewed(store, lease))
    assert _renewals(own) > before
    cable.close()


def test_a_member_whose_disk_is_stuck_is_left(
    own: EmbeddedEtcd, connect: Connect, watch_job: Callable[[Store], Watched], wait_until: WaitUntil
) -> None:
    """It renews leases and keeps a watch open and silent: a client that stays would wait for ever, its lease alive."""
    with closing(StuckDisk(own.endpoint)) as member, closing(patient_store(member.endpoint, own.endpoint)) as store:
        watched, other = watch_job(store), connect(own.endpoint)
        wait_until(watched.shows)
        lease = store.grant(60)
        member.stick()
        other.transact([], [Put("/job/a", b"1")])
        assert store.refresh(lease.lease_id) == 60.0
        assert store._pool.current().endpoint == member.endpoint
        store._attempt_timeout_s, store._probe_at = ATTEMPT_S, 0.0
        wait_until(lambda: _is_renewed(store, lease) and store._pool.current().endpoint == own.endpoint)
        store._attempt_timeout_s = BOUND_S
        wait_until(lambda: watched.shows(a=b"1"))


def test_an_etcd_without_a_health_service_still_counts_as_answering() -> None:
    """The proxy of etcd has no health service; the error that says so is an answer."""
    answer = message("LeaseKeepAliveResponse")(ID=7, TTL=60).SerializeToString()
    renew = grpc.stream_stream_rpc_method_handler(lambda _requests, _context: iter([answer]))
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("etcdserverpb.Lease", {"LeaseKeepAlive": renew})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with closing(patient_store(f"127.0.0.1:{port}")) as store:
            assert store.refresh(7) == 60.0
        server.stop(None).wait()


def _renewals(etcd: EmbeddedEtcd) -> float:
    """Number of renewals that etcd has received."""
    with urllib.request.urlopen(f"http://{etcd.endpoint}/metrics", timeout=BOUND_S) as answer:
        found = re.search(r"^etcd_debugging_lease_renewed_total (\S+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def _is_renewed(store: EtcdStore, lease: Lease) -> bool:
    try:
        return store.refresh(lease.lease_id) == lease.ttl_s
    except StoreUnavailable:
        return False


def test_a_dead_first_endpoint_is_left(own: EmbeddedEtcd, port: int, connect: Connect) -> None:
    """A read finds the live endpoint by itself; later calls go to it directly."""
    store = connect(f"127.0.0.1:{port}", own.endpoint)
    store.read([])
    assert store.transact([], [Put("/job/a", b"")]).succeeded


def test_a_frozen_first_endpoint_is_left(tmp_path: Path, own: EmbeddedEtcd, connect_hasty: Connect) -> None:
    """An endpoint that accepts and does not answer costs one attempt."""
    with EmbeddedEtcd(tmp_path / "frozen", port=0) as frozen:
        store = connect_hasty(frozen.endpoint, own.endpoint)
        harm(frozen, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            store.transact([], [])
        store._attempt_timeout_s = BOUND_S  # enough for an etcd that answers, however busy the machine is
        assert store.transact([], [Put("/job/a", b"")]).succeeded


def test_no_etcd_at_all_is_reported_in_one_line(port: int, connect_hasty: Connect, wait_until: WaitUntil) -> None:
    """The error names the endpoint and the cause, and nothing of gRPC's long description."""
    endpoint = f"127.0.0.1:{port}"
    store = connect_hasty(endpoint)
    wait_until(lambda: _why_not(store) == f"etcd at {endpoint} did not answer: Connection refused")


@pytest.mark.parametrize("name", ["a..b", "no-such-host.invalid"])
def test_a_name_that_cannot_be_resolved_is_reported_in_one_line(
    connect_hasty: Connect, wait_until: WaitUntil, name: str
) -> None:
    store = connect_hasty(f"{name}:2379")
    said = re.compile(r"did not answer: its name cannot be resolved \([^:\[\]]*\)$")
    wait_until(lambda: said.search(_why_not(store)) is not None)


def _why_not(store: EtcdStore) -> str:
    """Return the error message; on a busy machine an attempt may end before the cause is known."""
    with pytest.raises(StoreUnavailable) as raised:
        store.read([])
    return str(raised.value)


def test_an_attempt_that_is_cut_short_does_not_hide_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = chain([EndpointFailed("refused")], repeat(OutOfTime("no time left")))

    def attempt(*_: object) -> None:
        raise next(errors)

    with closing(EtcdStore(["127.0.0.1:9"], retry_for_s=RETRY_S)) as store:
        monkeypatch.setattr(store, "_attempt", attempt)
        with pytest.raises(StoreUnavailable, match=r"^refused$"):
            store.read([])


def test_an_unanswered_renewal_does_not_extend_the_lease(silent_endpoint: str) -> None:
    """It would be lost membership if it did. The last try may end with its time instead."""
    store = EtcdStore([silent_endpoint], attempt_timeout_s=BOUND_S, retry_for_s=RETRY_S)
    with closing(store), pytest.raises(StoreUnavailable, match=r"without an answer|did not answer"):
        store.refresh(7)
