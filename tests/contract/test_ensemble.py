"""The etcd that agents run: real members on loopback addresses, and which callers they accept."""

from __future__ import annotations

import errno
import os
import signal
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import PATIENCE_S, patient_store
from ports import free_port, free_ports
from waiting import freeze, wait_for

from agent.errors import ConfigError, StoreUnavailable
from agent.local_etcd import embedded, etcd_members
from agent.local_etcd.connection_filter import ConnectionFilter, PortForward
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.local_etcd.ensemble import Ensemble
from agent.local_etcd.etcd_members import EtcdCluster, EtcdMember, run_member
from agent.roles.store import RoleKeys
from agent.store.access import Credentials
from agent.store.api import KeyRange, Put
from agent.store.certificates import Tls, issue
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys

MACHINES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
KEY = "/elastic-agent/job/shared/spec"
SHARED = "a secret of the machines"


class CrashError(Exception):
    """Ends a member as if its agent had been killed, without the steps of an orderly end."""


class Machines:
    """The machines of a job; each runs its member, if it has one, in a stack of its own."""

    def __init__(self, count: int, keys: JobKeys | RoleKeys | None = None, tls: Tls | None = None) -> None:
        self._keys = keys or JobKeys("job")
        port = next(port for port in iter(free_port, None) if not _is_taken(port + 1))
        self.ensemble = Ensemble("job", MACHINES[:count], MACHINES[0], port, tls)
        self._credentials = Credentials(issue(SHARED) if tls else None)
        self._running: dict[str, ExitStack] = {}
        self.given_up: list[str] = []

    def of(self, machine: str) -> Ensemble:
        return replace(self.ensemble, own=machine)

    def endpoint(self, machine: str) -> str:
        return f"{machine}:{self.ensemble.port}"

    def start(self, *machines: str, is_welcome: bool = True) -> None:
        for machine in machines:
            self._running[machine] = stack = ExitStack()
            own = self.of(machine)
            join = stack.enter_context(run_member(own, self.given_up.append, self._keys, leave_within_s=PATIENCE_S))
            if is_welcome:
                join()

    def leave(self, machine: str) -> None:
        self._running.pop(machine).close()

    def crash(self, machine: str) -> None:
        self._running.pop(machine).__exit__(CrashError, CrashError(), None)

    def close(self) -> None:
        for machine in list(self._running):
            self.crash(machine)

    def pid(self, machine: str) -> int:
        """Return the process id of a machine's etcd. Two of three serve already while the third may still start."""

        def found() -> list[int]:
            return [each.pid for each in psutil.Process().children() if {"--name", machine} <= {*each.cmdline()}]

        wait_for(found, f"{machine} runs its etcd", PATIENCE_S)
        return found()[0]

    def expect(self, asked: str, *names: str) -> None:
        """Wait until exactly these members have started, according to the machine `asked`."""
        with closing(EtcdCluster([self.endpoint(asked)], self._credentials.tls)) as cluster:
            wait_for(lambda: _names(cluster) == sorted(names), f"{', '.join(names)} are there", PATIENCE_S)

    def write(self, machine: str, value: bytes, key: str = KEY) -> None:
        with closing(patient_store(self.endpoint(machine), credentials=self._credentials)) as store:
            put = Put(key, value)
            wait_for(lambda: _has_put(store, put), f"{machine} takes a write", 3 * PATIENCE_S)  # a new cluster: 40 s

    def write_that_a_node_is_left(self) -> None:
        """Without that, no member needs to be taken out: the job is over."""
        self.write(MACHINES[0], b"x", self._keys.nodes + "still-there")

    def read(self, machine: str) -> bytes:
        with closing(patient_store(self.endpoint(machine), credentials=self._credentials)) as store:
            items = store.read((KeyRange(KEY),)).items
            return items[0].value if items else b""


def _names(cluster: EtcdCluster) -> list[str]:
    try:
        return sorted(member.name for member in cluster.members())
    except StoreUnavailable:
        return []


def _has_put(store: EtcdStore, put: Put) -> bool:
    try:
        return store.transact([], [put]).succeeded
    except StoreUnavailable:
        return False


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def three() -> Iterator[Machines]:
    with closing(Machines(3)) as machines:
        yield machines


@pytest.fixture
def two() -> Iterator[Machines]:
    with closing(Machines(2)) as machines:
        yield machines


@pytest.mark.parametrize(("count", "expected"), [(2, 1), (3, 3), (4, 3)])
def test_the_first_machines_run_it(count: int, expected: int) -> None:
    ensemble = Machines(count).ensemble
    assert ensemble.members == MACHINES[:expected]
    assert len(ensemble.endpoints) == expected
    assert ("while that machine is lost" in ensemble.summary) == (expected == 1)


def test_of_two_machines_the_second_runs_nothing(two: Machines) -> None:
    two.start(*MACHINES[:2])
    two.write(MACHINES[0], b"1")
    two.expect(MACHINES[0], MACHINES[0])
    with socket.socket() as probe:
        assert probe.connect_ex((MACHINES[1], two.ensemble.port)) != 0


def test_any_of_three_may_be_lost_and_comes_back_empty_handed(three: Machines) -> None:
    """Also the first. What was written meanwhile is sent to it."""
    three.start(*MACHINES[:3])
    three.write(MACHINES[0], b"1")
    for lost in MACHINES[:3]:
        others = [machine for machine in MACHINES[:3] if machine != lost]
        three.crash(lost)
        three.write(others[0], lost.encode())
        three.start(lost)
        three.expect(others[0], *MACHINES[:3])
        three.write(lost, b"2")
        assert three.read(others[1]) == b"2"
    assert not three.given_up


@pytest.mark.parametrize("kind", [JobKeys, RoleKeys])
def test_a_node_that_leaves_in_order_does_not_count_as_one_that_may_be_lost(kind: type[JobKeys | RoleKeys]) -> None:
    """The last one continues to serve alone."""
    with closing(Machines(3, kind("job"))) as three:
        three.start(*MACHINES[:3])
        three.write_that_a_node_is_left()
        three.leave(MACHINES[0])
        three.expect(MACHINES[1], *MACHINES[1:3])
        three.leave(MACHINES[1])
        three.write(MACHINES[2], b"2")
        three.expect(MACHINES[2], MACHINES[2])


def test_a_node_that_leaves_before_any_other_joined_does_not_count_as_one_that_may_be_lost(three: Machines) -> None:
    """The others may still be examining theirs."""
    three.start(*MACHINES[:3])
    three.leave(MACHINES[0])
    three.expect(MACHINES[1], *MACHINES[1:3])
    three.leave(MACHINES[1])
    three.write(MACHINES[2], b"2")


def test_a_worker_that_has_not_taken_part_yet_leaves_at_once(three: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it waits for the job's etcd, whose members are not connected to each other."""
    monkeypatch.setattr(etcd_members, "_NO_LEADER_S", PATIENCE_S)
    three.start(*MACHINES[:2], is_welcome=False)
    three.write(MACHINES[0], b"1")
    freeze(three.pid(MACHINES[1]))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(three.leave, MACHINES[0]).result(PATIENCE_S / 2)


def test_a_member_that_may_be_lost_does_not_take_the_majority_from_the_last_one(
    three: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent is started with another job's id on a machine that had left, and is refused."""
    three.start(*MACHINES[:3])
    three.write_that_a_node_is_left()
    three.write(MACHINES[2], b"1")  # two serve already while the third may still be about to start its etcd
    for machine in MACHINES[:2]:
        three.leave(machine)
    looks: list[str] = []
    members = EtcdCluster.members

    def look(cluster: EtcdCluster) -> tuple[EtcdMember, ...]:
        looks.append(threading.current_thread().name)
        return members(cluster)

    monkeypatch.setattr(EtcdCluster, "members", look)
    three.start(MACHINES[0], is_welcome=False)
    wait_for(lambda: looks.count("embedded-etcd") > 2, "it has seen that others are there", PATIENCE_S)
    three.crash(MACHINES[0])
    three.write(MACHINES[2], b"2")
    three.expect(MACHINES[2], MACHINES[2])


def test_a_node_that_leaves_waits_for_etcd_while_others_leave_too(three: Machines) -> None:
    """There is no leader for a moment then. A member that ended without being removed would still count."""
    three.start(*MACHINES[:3])
    three.write_that_a_node_is_left()
    others = [three.pid(machine) for machine in MACHINES[1:3]]
    with ThreadPoolExecutor(1) as pool:
        for pid in others:
            freeze(pid)
        try:
            leaving = pool.submit(three.leave, MACHINES[0])
            with pytest.raises(TimeoutError):
                leaving.result(3.0)
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)
    three.expect(MACHINES[1], *MACHINES[1:3])


def test_a_member_that_does_not_serve_keeps_nobody_from_leaving(
    three: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent and connection filter run, but etcd cannot be started: it was uninstalled from that machine."""

    def find_nothing() -> Path:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    three.start(*MACHINES[:3])
    three.write_that_a_node_is_left()
    three.write(MACHINES[2], b"1")  # two serve already while the third may still be about to start its etcd
    monkeypatch.setattr(embedded, "find_binary", find_nothing)
    os.kill(three.pid(MACHINES[1]), signal.SIGKILL)
    three.leave(MACHINES[0])
    three.write(MACHINES[2], b"2")
    three.expect(MACHINES[2], MACHINES[2])


def test_one_that_loses_the_others_before_it_was_first_looked_at_begins_anew_too(
    three: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost its majority, and its data would prevent the members that come back from starting a new cluster."""
    monkeypatch.setattr(etcd_members, "_CHECK_EVERY_S", 10.0)
    monkeypatch.setattr(etcd_members, "_CHECKS_WITHOUT_LEADER", 1)
    three.start(*MACHINES[:3])
    three.write(MACHINES[0], b"1")
    three.crash(MACHINES[1])
    three.crash(MACHINES[2])
    three.start(*MACHINES[1:3])
    three.write(MACHINES[0], b"2")


def test_one_that_was_taken_out_does_not_come_again(three: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member ends soon after, while its agent, on a busy machine, still has things to do."""
    end = EmbeddedEtcd.__exit__

    def end_late(etcd: EmbeddedEtcd, *how: Any) -> None:  # noqa: ANN401 - what `with` calls it with
        pid = etcd.pid
        if pid is not None:  # usually it ends by itself, but it may not receive the message that it was removed
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not etcd._thread.is_alive() or etcd.pid not in {None, pid}, "the end of the case", PATIENCE_S)
        end(etcd, *how)

    monkeypatch.setattr(EmbeddedEtcd, "__exit__", end_late)
    three.start(*MACHINES[:2])
    monkeypatch.undo()
    three.start(MACHINES[2])
    three.write_that_a_node_is_left()
    for number, machine in enumerate(MACHINES[:2], start=1):
        three.leave(machine)
        three.expect(MACHINES[2], *MACHINES[number:3])
    three.write(MACHINES[2], b"2")
    three.expect(MACHINES[2], MACHINES[2])


def test_after_the_loss_of_most_those_that_come_back_begin_anew(three: Machines) -> None:
    """The data of the lost members is gone: the agents write it again from their cached records."""
    three.start(*MACHINES[:3])
    three.write(MACHINES[0], b"1")
    three.crash(MACHINES[0])
    three.crash(MACHINES[1])
    three.start(*MACHINES[:2])
    three.write(MACHINES[0], b"2")
    wait_for(lambda: three.read(MACHINES[2]) == b"2", "all three are together", 3 * PATIENCE_S)


def test_what_can_be_no_name_does_not_answer() -> None:
    assert Ensemble("job", ("10.0.0..3",), "10.0.0..3", free_port()).unreachable_members() == ["10.0.0..3"]


def test_a_port_that_is_taken_is_named(two: Machines) -> None:
    with (
        socket.create_server((MACHINES[0], two.ensemble.port)),
        pytest.raises(
            ConfigError,
            match=rf"cannot listen at 127.0.0.1:{two.ensemble.port} .*the port is taken; choose another --ctrl_port",
        ),
    ):
        two.start(MACHINES[0])


def test_only_the_named_machines_get_through_the_gate() -> None:
    """A connection from another address is closed before anything is read from it."""
    inner, outer = free_ports(2)
    received = []
    with (
        socket.create_server(("127.0.0.1", inner)) as server,
        ConnectionFilter([PortForward("127.0.0.1", outer, inner)], lambda: ["127.0.0.5"]),
    ):
        stranger = socket.create_connection(("127.0.0.1", outer), source_address=("127.0.0.6", 0))
        allowed = socket.create_connection(("127.0.0.1", outer), source_address=("127.0.0.5", 0))
        with stranger, allowed:
            stranger.sendall(b"stranger")
            allowed.sendall(b"allowed")
            passed_on, _ = server.accept()
            with passed_on:
                received.append(passed_on.recv(100))
                passed_on.sendall(b"welcome")
                assert allowed.recv(100) == b"welcome"
                assert _is_hung_up(stranger)
                server.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    server.accept()
    assert received == [b"allowed"]


def test_with_a_secret_nobody_gets_in_without_it() -> None:
    """Also not from the machines themselves, at the ports behind the gate, or as another member."""
    with closing(Machines(3, tls=issue(SHARED, MACHINES))) as three:
        three.start(*MACHINES[:3])
        three.write(MACHINES[0], b"1")
        inner = {
            each.laddr.port for each in psutil.Process(three.pid(MACHINES[0])).net_connections("tcp") if not each.raddr
        }
        own = {three.ensemble.port, three.ensemble.port + 1}
        assert len(inner) == 2
        other = issue(SHARED + "!")
        for port in inner | own:
            assert not _is_served(port, None), "in the clear"
            assert not _is_served(port, Tls(other.ca)), "without a certificate"
            assert not _is_served(port, other), "with one of another authority"
        assert _is_served(three.ensemble.port, issue(SHARED))
        with (
            closing(EtcdStore([three.endpoint(MACHINES[0])], Credentials(other), retry_for_s=5.0)) as store,
            pytest.raises(StoreUnavailable, match="made from another secret"),
        ):
            store.read(())


@pytest.mark.long("test_any_of_three_may_be_lost_and_comes_back_empty_handed, without a secret")
def test_with_a_secret_one_that_is_lost_comes_back() -> None:
    with closing(Machines(3, tls=issue(SHARED, MACHINES))) as three:
        three.start(*MACHINES[:3])
        for machine in MACHINES[:3]:  # two serve already while the third may be on its way
            three.write(machine, b"1")
        three.crash(MACHINES[1])
        three.start(MACHINES[1])
        three.expect(MACHINES[0], *MACHINES[:3])
        assert three.read(MACHINES[1]) == b"1"


def _is_served(port: int, tls: Tls | None) -> bool:
    """Whether an HTTP request is answered by more than an error of TLS's: to clients and members alike."""
    with socket.create_connection((MACHINES[0], port), PATIENCE_S) as plain, ExitStack() as opened:
        try:
            connection = plain if tls is None else opened.enter_context(_wrapped(plain, tls))
            connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(100)
        except OSError:
            return False


def _wrapped(plain: socket.socket, tls: Tls) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls.cert and tls.key:
        with tempfile.NamedTemporaryFile() as file:
            file.write(tls.cert + tls.key)
            file.flush()
            context.load_cert_chain(file.name)
    return context.wrap_socket(plain)


def test_a_client_that_connects_while_the_filter_closes_is_disconnected() -> None:
    """Whatever has become of the call by then."""
    inner, outer = free_ports(2)
    with ExitStack() as callers:
        for _ in range(20):
            with (
                socket.create_server(("127.0.0.1", inner)),
                ConnectionFilter([PortForward("127.0.0.1", outer, inner)], lambda: ["127.0.0.1"]),
            ):
                called = [socket.create_connection(("127.0.0.1", outer), PATIENCE_S) for _ in range(5)]
                for each in called:
                    callers.enter_context(each)
            assert all(map(_is_hung_up, called))


def _is_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True
