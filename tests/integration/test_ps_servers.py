"""Servers over real sockets: answered pushes survive the loss of any server, count once, and strangers are refused."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from authority import Authority
from cases import some
from integration.ps_cluster import PATIENCE_S, SECRET, Job
from waiting import wait_for

from trainer_runtime import contract, ps
from trainer_runtime.ps import roles
from trainer_runtime.ps.client import Client, NotReadyError
from trainer_runtime.ps.frames import BrokenError, FrameConnection, Header, MessageKind, RefusedError, client_handshake
from trainer_runtime.ps.geo import GeoClient
from trainer_runtime.ps.messages import Gradients
from trainer_runtime.ps.persistence import ShardPersistence
from trainer_runtime.ps.rules import SGD, Sum
from trainer_runtime.ps.shard import Author, Shard
from trainer_runtime.ps.shard_connection import ShardCaller
from trainer_runtime.ps.shard_host import ShardHost, ShardHostSettings
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.ps.worker_progress import ASYNC, SYNC, Mode, bounded, geo
from trainer_runtime.shard_map import ShardPlace, ShardServer
from trainer_runtime.tls import dialling

COUNTS = TableSpec("counts", 1, Sum(), initial="zeros")


def count(client: Client, table: int, *ids: int) -> None:
    client.push([Gradients(table, torch.tensor(ids), torch.ones(len(ids), 1))])


def counted(client: Client, table: int, ids: int) -> list[float]:
    values: list[float] = client.pull(table, torch.arange(ids)).squeeze(1).tolist()
    return values


def pair(job: Job) -> tuple[tuple[Client, Client], int]:
    """Return two workers, and the number of the counting table."""
    one, other = job.client(0), job.client(1)
    (table,) = {client.declare(COUNTS) for client in (one, other)}
    return (one, other), table


def begin(do: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=do, args=args, daemon=True)
    thread.start()
    return thread


def is_waiting(thread: threading.Thread) -> bool:
    """Return whether the thread still runs after a time in which it would have finished."""
    thread.join(0.2)
    return thread.is_alive()


def end(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def break_connections(job: Job, client: Client, worker: int, *shards: int) -> None:
    """Break a worker's connections to these shards, or to all, and wait until the servers have noticed."""
    broken = shards or range(len(client._connections))
    for shard in broken:
        connection = client._connections[shard]._connection
        assert connection is not None
        connection.shut_down()
    shard_hosts = [process.shard_hosts[shard] for process in job.processes.values() for shard in broken]
    wait_for(lambda: not any(worker in each.connections for each in shard_hosts), "the servers to notice", PATIENCE_S)


def test_a_server_without_descriptors_accepts_connections_later(
    make_job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """There is no free descriptor when a caller connects: it waits, and all others are served."""
    job = make_job(1)
    client = job.client()
    table = client.declare(COUNTS)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock:
        first_free = os.dup(sock.fileno())
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, most[1]))
        try:
            sock.connect(job.endpoints[0])
            wait_for(lambda: "cannot accept connections" in caplog.text, "a warning", PATIENCE_S)
            count(client, table, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        client_handshake(FrameConnection(sock), SECRET, {"probe": True})
    assert counted(client, table, 2) == [0.0, 1.0]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_rows_are_found_with_any_number_of_servers(make_job: Callable[..., Job], servers: int) -> None:
    client = make_job(servers).client()
    table = client.declare(TableSpec("t", 4, SGD(1.0), scale=0.5))
    ids = torch.arange(1000)
    rows = client.pull(table, ids)
    assert torch.equal(rows, TableSpec("t", 4, SGD(1.0), scale=0.5).initial_rows(ids))
    client.push([Gradients(table, ids, rows)])
    assert not client.pull(table, ids).any()


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 3)])
def test_common_steps_of_workers_are_those_of_one(make_job: Callable[..., Job], servers: int, workers: int) -> None:
    job = make_job(servers, SYNC, workers)
    alone = torch.zeros(50, 4)
    found: dict[int, torch.Tensor] = {}

    def work(worker: int) -> None:
        client = job.client(worker)
        table = client.declare(TableSpec("t", 4, SGD(0.5), initial="zeros"))
        for step in range(30):
            ids, gradients = batch(step, worker)
            client.push([Gradients(table, ids, gradients)])
        found[worker] = client.pull(table, torch.arange(50))
        client.leave()

    def batch(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
        chance = torch.Generator().manual_seed(1000 * step + worker)
        ids = torch.randint(0, 50, (20,), generator=chance).unique()
        return ids, torch.randn(len(ids), 4, generator=chance)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for step in range(30):
        for worker in range(workers):
            ids, gradients = batch(step, worker)
            alone[ids] -= 0.5 * gradients / workers
    for thread in threads:
        thread.join(PATIENCE_S)
    for process in job.processes.values():
        process.server.wait()
    assert len(found) == workers
    for rows in found.values():
        torch.testing.assert_close(rows, alone)


def test_a_lost_worker_is_not_waited_for(make_job: Callable[..., Job]) -> None:
    """It has a grace period to connect again."""
    job = make_job(2, SYNC, 2, grace_s=0.5)
    (one, other), table = pair(job)
    pushing = begin(count, one, table, 1, 2, 3)
    assert is_waiting(pushing), "the other worker has sent nothing yet"
    other.close()
    end(pushing)
    assert counted(one, table, 4) == [0.0, 1.0, 1.0, 1.0]


def test_workers_begin_together(make_job: Callable[..., Job]) -> None:
    job = make_job(2, SYNC, 2)
    one = job.client(0)
    table = one.declare(COUNTS)
    pushing = begin(count, one, table, 1, 2)
    assert is_waiting(pushing), "the other worker has not joined yet"
    other = job.client(1)
    other.declare(COUNTS)
    count(other, table, 2, 3)
    end(pushing)
    assert counted(one, table, 4) == [0.0, 0.5, 1.0, 0.5]


def test_steps_continue_without_late_workers_and_a_warning_is_logged(
    make_job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, SYNC, 3, wait_workers_s=0.5)
    (one, other), table = pair(job)
    pushing = begin(count, one, table, 1)
    count(other, table, 1)
    end(pushing)
    assert counted(one, table, 2) == [0.0, 1.0]
    assert "goes on without worker 2" in caplog.text
    third = job.client(2)
    third.declare(COUNTS)
    pushing = [begin(count, client, table, 1) for client in (one, other)]
    assert all(map(is_waiting, pushing))
    count(third, table, 1)
    end(*pushing)
    assert (third.step, third.left_out) == (2, 0), "it begins with the current step of the others"


def test_a_connection_that_breaks_for_a_moment_loses_no_gradients(make_job: Callable[..., Job]) -> None:
    job = make_job(1, SYNC, 2)
    (one, other), table = pair(job)
    break_connections(job, other, 1)
    pushing = begin(count, one, table, 1, 2)
    assert is_waiting(pushing)
    count(other, table, 2, 3)
    end(pushing)
    assert counted(one, table, 4) == [0.0, 0.5, 1.0, 0.5]
    assert other.left_out == 0


def test_workers_with_broken_connections_to_different_shards_recover(make_job: Callable[..., Job]) -> None:
    """Each reopens its broken connection while the answer of the other shard waits for the other worker."""
    job = make_job(2, SYNC, 2)
    (one, other), table = pair(job)
    break_connections(job, one, 0, 1)
    break_connections(job, other, 1, 0)
    end(*(begin(count, client, table, *range(20)) for client in (one, other)))
    assert counted(one, table, 20) == [1.0] * 20


def test_after_a_failover_steps_are_common_to_all_again(make_job: Callable[..., Job]) -> None:
    """Whichever worker connects to the new primary first."""
    job = make_job(2, SYNC, 2, replicas=1)
    (one, other), table = pair(job)
    job.wait_for_replicas()
    for _ in range(3):
        pushing = begin(count, one, table, *range(20))
        count(other, table, *range(20))
        end(pushing)
    job.kill(1)
    pushing = begin(count, one, table, *range(20))
    assert is_waiting(pushing)
    count(other, table, *range(20, 40))
    end(pushing)
    assert counted(one, table, 40) == [3.5] * 20 + [0.5] * 20


def test_a_late_push_is_reported_and_the_worker_continues_with_the_others(
    make_job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, SYNC, 2, grace_s=0.2)
    (one, other), table = pair(job)
    break_connections(job, other, 1)
    for _ in range(3):
        count(one, table, 1)
    for step in (3, 4):
        assert (other.left_out, other.step) == ((0, 0) if step == 3 else (1, 3))
        pushing = begin(count, one, table, 1) if step == 4 else None
        count(other, table, 1, 2)
        end(*([pushing] if pushing else []))
    assert counted(one, table, 3) == [0.0, 4.0, 0.5]
    assert caplog.text.count("step 1 came too late") == 1
    assert other.left_out == 1


def test_a_resting_worker_is_not_waited_for_even_after_reconnecting(make_job: Callable[..., Job]) -> None:
    job = make_job(2, SYNC, 2)
    (one, other), table = pair(job)
    other.rest()
    count(one, table, *range(20))
    break_connections(job, other, 1)
    assert counted(other, table, 20) == [1.0] * 20
    end(begin(count, one, table, *range(20)))
    other.join()
    assert other.step == 2
    pushing = begin(count, one, table, *range(20))
    assert is_waiting(pushing)
    count(other, table, *range(20))
    end(pushing)
    assert counted(one, table, 20) == [3.0] * 20


def test_a_bounded_worker_waits_for_new_workers_and_broken_connections(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, bounded(2), 2)
    one = job.client(0)
    table = one.declare(COUNTS)
    for _ in range(2):
        count(one, table, 1)
    pushing = begin(count, one, table, 1)
    assert is_waiting(pushing)
    other = job.client(1)
    other.declare(COUNTS)
    count(other, table, 1)
    end(pushing)
    break_connections(job, other, 1)
    pushing = begin(count, one, table, 1)
    assert is_waiting(pushing)
    count(other, table, 1)
    end(pushing)
    assert counted(one, table, 2) == [0.0, 6.0]


def test_a_part_stays_with_a_worker_that_reconnects_and_not_with_a_lost_one(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, SYNC, 2, grace_s=1.0)
    (one, other), _ = pair(job)
    assert (one.lease("p", 2, None), other.lease("p", 2, None)) == (0, 1)
    break_connections(job, other, 1)
    assert other.lease("p", 2, None) == 1
    other.close()
    assert one.lease("p", 2, 0) == 1, "after the grace period of the other worker"
    with pytest.raises(RefusedError, match="pass 'p' through the data has 2 parts, not 3"):
        one.lease("p", 3, None)


def test_copies_are_pulled_again_after_an_exchange(make_job: Callable[..., Job]) -> None:
    job = make_job(2, geo(2), 2)
    one, other = (GeoClient(job.client(worker), 2, 2) for worker in range(2))
    spec = TableSpec("t", 1, SGD(1.0), initial="zeros")
    (table,) = {client.declare(spec) for client in (one, other)}
    ids, down = torch.arange(100), -torch.ones(100, 1)
    for client in (one, other):
        assert not client.pull(table, ids).any()
    for _ in range(2):
        one.push([Gradients(table, ids, down)])
    assert one.pull(table, ids).unique().tolist() == [1.0]
    assert not other.pull(table, ids).any(), "before it exchanges"
    for few in (ids[:10], ids[:10]):
        other.push([Gradients(table, few, down[:10])])
    other.push([Gradients(table, ids[:5], down[:5])])  # gradients of rows that were looked up before the exchange
    expected = torch.tensor([3.0] * 5 + [2.0] * 5 + [1.0] * 90)
    assert torch.equal(other.pull(table, ids).squeeze(1), expected)
    other.exchange()
    assert one.pull(table, ids).unique().tolist() == [1.0]
    one.exchange()
    assert torch.equal(one.pull(table, ids).squeeze(1), torch.tensor([2.5] * 5 + [2.0] * 5 + [1.0] * 90))


def test_each_pass_through_the_data_has_all_parts_in_each_run(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(1)
    servers = ",".join(f"{host}:{port}" for host, port in job.endpoints)
    role = {"TRAINING_ROLE": "TRAINER", roles.SERVERS: servers, roles.WORKERS: "1", roles.WORKER: "0"}
    for name, value in {**role, roles.SECRET: SECRET.decode()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("trainer_runtime.ps.process._state", None)

    def passes(*parts: int) -> list[list[int]]:
        ps.init()
        ps.init_worker(PATIENCE_S)
        found = [[*ps.data_parts(count)] for count in parts]
        with ps.resting(), pytest.raises(RefusedError, match=r"pass 'data.1' through the data has 4 parts, not 3"):
            next(ps.data_parts(3, "data.1"))
        ps.stop_worker()
        return found

    for run in ("first", "second"):
        monkeypatch.setenv(contract.RUN_ID, run)
        assert passes(4, 4, 6) == [[*range(4)], [*range(4)], [*range(6)]]
    assert passes(4, 4, 6, 4) == [[], [], [], [*range(4)]], "as of a worker that was restarted"


def test_with_replicas_a_lost_server_loses_nothing_and_costs_no_restart(make_job: Callable[..., Job]) -> None:
    job = make_job(3, replicas=1)
    client = job.client()
    table = client.declare(COUNTS)
    job.wait_for_replicas()
    for _ in range(10):
        count(client, table, *range(300))
    job.kill(1)
    count(client, table, *range(300))
    assert counted(client, table, 300) == [11.0] * 300
    job.wait_for_replicas()
    job.kill(2)
    count(client, table, *range(300))
    assert counted(client, table, 300) == [12.0] * 300


@pytest.mark.parametrize("seed", some([0], of=range(3)))
def test_in_twenty_losses_each_push_counts_once(make_job: Callable[..., Job], seed: int) -> None:
    """Three workers push without pause, and a server is lost as soon as all shards have replicas again."""
    job = make_job(3, workers=3, replicas=1)
    is_over = threading.Event()
    pushed = [0, 0, 0]
    failed: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            client = job.client(worker)
            table = client.declare(COUNTS)
            while not is_over.is_set():
                count(client, table, worker, *range(3, 200))
                pushed[worker] += 1
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failed.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    chance = torch.Generator().manual_seed(seed)
    for loss in range(20):
        job.wait_for_replicas()
        before = [*pushed]
        wait_for(lambda before=before: all(map(int.__lt__, before, pushed)) or failed, "pushes", PATIENCE_S)  # type: ignore[misc]
        lost = int(torch.randint(0, 3, (1,), generator=chance))
        job.kill(lost)
        job.restart(lost, loss + 2)
    job.wait_for_replicas()
    is_over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed
    client = job.client(9)
    found = counted(client, client.declare(COUNTS), 200)
    assert found == [*map(float, pushed), *[float(sum(pushed))] * 197]


@pytest.mark.parametrize("mode", [SYNC, bounded(2)], ids=["sync", "bounded"])
def test_in_ten_losses_of_servers_and_connections_steps_stay_common(make_job: Callable[..., Job], mode: Mode) -> None:
    job = make_job(3, mode, 3, replicas=1)
    steps, last = [0, 0, 0], [math.inf]
    apart, left_out = [0], [0, 0, 0]

    def work(worker: int) -> None:
        client = job.client(worker)
        table = client.declare(COUNTS)
        while steps[worker] < last[0]:
            count(client, table, worker, *range(3, 200))
            steps[worker] += 1
            apart[0] = max(apart[0], steps[worker] - min(steps))
        left_out[worker] = client.left_out
        client.leave()

    threads = [begin(work, worker) for worker in range(3)]
    chance = random.Random(1)
    for loss in range(10):
        job.wait_for_replicas()
        before = [*steps]
        wait_for(lambda before=before: all(map(int.__lt__, before, steps)), "steps", PATIENCE_S)  # type: ignore[misc]
        for shard_connection in chance.choice(job.clients)._connections:
            if (connection := shard_connection._connection) is not None:
                connection.shut_down()
        lost = chance.randrange(3)
        job.kill(lost)
        job.restart(lost, loss + 2)
    last[0] = max(steps) + 5
    end(*threads)
    assert (steps, left_out) == ([last[0]] * 3, [0] * 3)
    assert apart[0] <= mode.ahead + 2, "a step is counted after its answer"
    client = job.client(9)
    own, shared = (last[0] / 3, last[0]) if mode.merges else (last[0], 3 * last[0])
    assert counted(client, client.declare(COUNTS), 200) == pytest.approx([own] * 3 + [shared] * 197, rel=1e-3)


def test_strangers_are_refused(make_job: Callable[..., Job]) -> None:
    job = make_job(1)
    client = job.client()
    table = client.declare(COUNTS)
    count(client, table, 1)
    for hello in ({"shard": 0, "worker": 0, "incarnation": 9}, {"shard": 0, "primary": [0, 1], "map": 9, "era": 9}):
        connection = FrameConnection(socket.create_connection(job.endpoints[0]))
        with pytest.raises(BrokenError, match="closed"):
            client_handshake(connection, b"another", hello)
        connection.close()
    with socket.create_connection(job.endpoints[0]) as silent:
        silent.sendall(b"\xff" * 100)
        silent.settimeout(PATIENCE_S)
        assert silent.recv(1) == b""
    assert counted(client, table, 2) == [0.0, 1.0]


def test_all_connections_use_tls_if_certificates_are_given(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job(2, replicas=1, tls=Authority(tmp_path).files("all", "127.0.0.1"))
    client = job.client()
    table = client.declare(COUNTS)
    job.wait_for_replicas()
    for _ in range(3):
        count(client, table, *range(200))
    job.kill(1)
    count(client, table, *range(200))
    assert set(counted(client, table, 200)) == {4.0}, "the replica has all pushes"
    with socket.create_connection(job.endpoints[0]) as plain, pytest.raises(BrokenError):
        client_handshake(FrameConnection(plain), SECRET, {"probe": True})


@pytest.mark.parametrize(
    ("host", "whose", "trusts", "message"),
    [
        (
            "10.0.0.1",
            "ours",
            "ours",
            "its certificate is not accepted: IP address mismatch, .*not valid for '127.0.0.1'",
        ),
        ("127.0.0.1", "theirs", "theirs", "its certificate is not accepted: self.signed certificate in .* chain"),
        ("127.0.0.1", "theirs", "ours", "it has ended the connection: .*alert unknown ca"),
    ],
)
def test_a_worker_reports_why_tls_with_a_server_failed(
    make_job: Callable[..., Job],
    tmp_path_factory: pytest.TempPathFactory,
    host: str,
    whose: str,
    trusts: str,
    message: str,
) -> None:
    authorities = {name: Authority(tmp_path_factory.mktemp(name)) for name in ("ours", "theirs")}
    job = make_job(1, tls=authorities["ours"].files("server", host))
    files = replace(authorities[whose].files("worker", "127.0.0.1"), ca=authorities[trusts].ca)
    caller = ShardCaller(0, 1, SECRET, dialling(files, names_host=True))
    with closing(Client(job.endpoints, caller, 0.5)) as client, pytest.raises(NotReadyError) as refused:
        client.open()
    assert re.search(rf"127.0.0.1:[0-9]+ \({message}\)", str(refused.value))


def test_silent_strangers_do_not_block_workers(make_job: Callable[..., Job]) -> None:
    job = make_job(1)
    silent = [socket.create_connection(job.endpoints[0]) for _ in range(200)]
    began = time.monotonic()
    client = job.client()
    count(client, client.declare(COUNTS), 1)
    assert time.monotonic() - began < 4.0, "before their handshakes time out"
    for each in silent:
        each.close()


def send_json(connection: FrameConnection, kind: MessageKind, message: dict[str, object]) -> Header:
    body = json.dumps(message).encode()
    connection.send(Header(kind, 0, length=len(body)), body)
    return connection.receive_header()


def connect_primary(job: Job, server: int, hello: dict[str, object]) -> FrameConnection:
    """Connect as a primary that sends a replica."""
    connection = FrameConnection(socket.create_connection(job.endpoints[server]))
    connection.sock.settimeout(PATIENCE_S)
    client_handshake(connection, SECRET, hello)
    return connection


def test_a_replica_ignores_older_maps(make_job: Callable[..., Job]) -> None:
    """Such maps arrive late when the primary's agent has seen the newer map first."""
    job = make_job(3)
    shard_host = job.processes[2].shard_hosts[0]
    primary, lost, me = ShardServer(0, 1), ShardServer(1, 1), ShardServer(2, 1)
    connection = connect_primary(job, 2, {"shard": 0, "primary": primary, "map": 7, "era": 1})
    assert connection.receive_header().kind is MessageKind.DONE
    state = {"applied": [[4, 1, 9]], "done": 0, "passes": {}}
    assert send_json(connection, MessageKind.COMPLETE, state).kind is MessageKind.DONE
    older = connect_primary(job, 2, {"shard": 0, "primary": lost, "map": 6, "era": 1})
    with pytest.raises(BrokenError):
        older.receive_header()
    older.close()
    shard_host.apply_place(6, ShardPlace(1, primary, None, lost))
    assert shard_host.era == 1
    shard_host.apply_place(7, ShardPlace(1, primary, None, me))
    shard_host.apply_place(8, ShardPlace(1, me))
    assert shard_host.shard.applied == {Author(4, 1): 9}
    connection.close()


def test_a_shard_that_is_loaded_again_replaces_its_replica_and_persistence(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """A partitioned server missed the map with which another server, lost since, had the shard."""
    job = make_job(2)
    persisters: list[ShardPersistence] = []
    reports: list[tuple[int, int, bool]] = []

    def open_persistence(_number: int, shard: Shard, lock: threading.Condition, _restores: bool) -> ShardPersistence:  # noqa: FBT001 - as declared
        persisters.append(ShardPersistence(tmp_path, shard, lock, 0.01))
        persisters[-1].follow()
        persisters[-1].start()
        return persisters[-1]

    me, other = ShardServer(0, 7), ShardServer(1, 1)
    shard_host = ShardHost(
        0, ShardHostSettings(me, job.endpoints, SECRET, ASYNC, open_persistence, lambda *each: reports.append(each))
    )
    shard_host.apply_place(2, ShardPlace(1, me, None, other))
    wait_for(lambda: (2, 0, True) in reports, "a copy", PATIENCE_S)
    shard_host.apply_place(5, ShardPlace(5, me, None, other))
    wait_for(lambda: (5, 0, True) in reports, "another copy", PATIENCE_S)
    assert job.processes[1].shard_hosts[0].era == 5, "the replica has the new rows"
    first, second = persisters
    wait_for(lambda: not (first._thread and first._thread.is_alive()), "the end of the first persistence", PATIENCE_S)
    assert second._thread is not None
    assert second._thread.is_alive()
    shard_host.close()


def test_an_invalid_message_ends_only_its_connection(make_job: Callable[..., Job]) -> None:
    job = make_job(2)
    client = job.client()
    table = client.declare(COUNTS)
    count(client, table, 1, 2, 3)
    wrong = {
        MessageKind.COMMAND: {"shrink_before_s": 1 << 70},
        MessageKind.LEASE: {"pass": 1},
        MessageKind.ROWS: {},
        MessageKind.COMPLETE: {},
    }
    for kind, message in wrong.items():
        connection = connect_primary(job, 0, {"shard": 0, "worker": 5, "incarnation": 1})
        assert connection.receive_header().kind is MessageKind.DONE
        if kind in {MessageKind.COMMAND, MessageKind.LEASE}:  # complete but invalid requests are answered
            assert send_json(connection, kind, message).kind is MessageKind.REFUSED
        else:
            with pytest.raises(BrokenError):
                send_json(connection, kind, message)
        connection.close()
        other = connect_primary(job, 1, {"shard": 0, "primary": [0, 1], "map": 9, "era": 9})
        assert other.receive_header().kind is MessageKind.DONE
        with pytest.raises(BrokenError):
            send_json(other, kind, message)
        other.close()
    assert counted(client, table, 4) == [0.0, 1.0, 1.0, 1.0]
