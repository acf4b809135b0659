"""Conflicts of workers and servers: a refused, stopped, replaced or moved peer gets an error, and nothing hangs."""

from __future__ import annotations

import logging
import math
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration.ps_cluster import PATIENCE_S, SECRET, Job
from integration.test_ps_servers import COUNTS, count, counted
from waiting import freeze, wait_for

from trainer_runtime.ps import shard_host as shard_host_module
from trainer_runtime.ps.client import Client, NotReadyError
from trainer_runtime.ps.frames import (
    MAX_BODY_BYTES,
    MAX_JSON_BYTES,
    FrameConnection,
    Header,
    MessageKind,
    RefusedError,
    server_handshake,
)
from trainer_runtime.ps.leases import leases_of
from trainer_runtime.ps.messages import Gradients
from trainer_runtime.ps.replica_sender import ReplicaSender
from trainer_runtime.ps.rules import SGD, Sum
from trainer_runtime.ps.shard import Shard
from trainer_runtime.ps.shard_connection import Endpoint, ShardCaller
from trainer_runtime.ps.shard_host import ShardHost, ShardHostSettings
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.ps.worker_progress import ASYNC, SYNC
from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer

_NOWHERE = "/proc/self/nowhere"


class BackgroundCall(threading.Thread):
    """Runs a function on a thread, and records its error."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._do = do
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._do()
        except Exception as error:  # noqa: BLE001 - reported by the test
            self.error = error

    def wait(self) -> None:
        self.join(PATIENCE_S)
        assert not self.is_alive()


# Refused and interrupted requests


def test_after_a_refusal_answers_match_their_requests(make_job: Callable[..., Job]) -> None:
    """All servers had received the request; connections stay open, so that no server takes this worker for lost."""
    job = make_job(3)
    client = job.client()
    table = client.declare(COUNTS)
    count(client, table, 1, 2, 3)
    before = [
        dict(shard_host.connections)
        for shard_host in (job.processes[number].shard_hosts[number] for number in range(3))
    ]
    with pytest.raises(RefusedError, match=r"shard \d cannot be saved"):
        client.save(_NOWHERE)
    assert counted(client, table, 4) == [0.0, 1.0, 1.0, 1.0]
    assert client.shrink(3600) == 0
    assert before == [job.processes[number].shard_hosts[number].connections for number in range(3)]


def test_the_answer_to_an_interrupted_request_is_dropped(make_job: Callable[..., Job]) -> None:
    job = make_job(1)
    client = job.client()
    table = client.declare(COUNTS)
    count(client, table, 1)
    main = threading.main_thread().ident
    assert main is not None
    lock = job.processes[0].shard_hosts[0].lock
    with lock:  # the request is not answered yet
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.pull(table, torch.tensor([1]))
    assert client.pull(table, torch.tensor([2])).item() == 0.0
    assert client.pull(table, torch.tensor([1])).item() == 1.0


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, _: client.lease(5, 3, None),
        lambda client, _: client.lease("data", 3.0, None),
        lambda client, _: client.lease("data", -1, None),
        lambda client, _: client.shrink(86400.0),
        lambda client, table: client.push([Gradients(table, torch.arange(9).flip(0), torch.ones(9, 1))]),
        lambda client, table: client.push([Gradients(table, torch.tensor([1, 2]), torch.ones(2, 3))]),
    ],
)
def test_invalid_requests_are_refused_and_the_worker_can_continue(
    make_job: Callable[..., Job], ask: Callable[[Client, int], object]
) -> None:
    client = make_job(2).client(timeout_s=5.0)
    table = client.declare(COUNTS)
    with pytest.raises(RefusedError, match=r"\w+ \w+"):
        ask(client, table)
    count(client, table, 3)
    assert counted(client, table, 4)[3] == 1.0


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_an_invalid_weight_is_not_sent(make_job: Callable[..., Job], weight: float) -> None:
    client = make_job(1).client()
    with pytest.raises(ValueError, match="weight of a step"):
        client.push([], weight)


def test_a_request_that_is_too_large_is_not_sent(make_job: Callable[..., Job]) -> None:
    client = make_job(1).client()
    table = client.declare(COUNTS)
    with pytest.raises(ValueError, match="PULL of 2147483656 bytes for one server"):
        client.pull(table, torch.empty(MAX_BODY_BYTES // 8 + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="LEASE of"):
        client.lease("x" * MAX_JSON_BYTES, 1, None)
    count(client, table, 1)
    assert counted(client, table, 2) == [0.0, 1.0]


def test_a_request_that_always_breaks_the_connection_is_given_up(make_job: Callable[..., Job]) -> None:
    client = make_job(1).client()
    client._specs.append(COUNTS)  # the server does not have this table
    with pytest.raises(NotReadyError, match=r"8 times in a row.* PULL at 127\.0\.0\.1:\d+: connection closed"):
        client.pull(0, torch.tensor([1]))


def test_a_script_may_use_another_default_dtype(make_job: Callable[..., Job]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        client = make_job(2).client()
        table = client.declare(TableSpec("t", 2, SGD(1.0), initial="zeros"))
        ids = torch.arange(10)
        assert not client.pull(table, ids).any()
        client.push([Gradients(table, ids, torch.ones(10, 2))])
        rows = client.pull(table, ids)
        assert (rows.dtype, rows.unique().tolist()) == (torch.float32, [-1.0])
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_worker_that_has_left_sends_no_requests(make_job: Callable[..., Job]) -> None:
    job = make_job(2)
    client = job.client()
    table = client.declare(COUNTS)
    client.leave()
    asked: list[Callable[[], object]] = [
        lambda: client.pull(table, torch.tensor([1])),
        lambda: client.lease("data", 3, None),
        lambda: client.declare(TableSpec("more", 1, Sum())),
        client.leave,
    ]
    for ask in asked:
        with pytest.raises(RuntimeError, match="has left the servers"):
            ask()
    wait_for(
        lambda: not any(job.processes[number].shard_hosts[number].connections for number in range(2)),
        "its end",
        PATIENCE_S,
    )


# Several processes of a worker


def test_pushes_of_a_replaced_process_are_not_part_of_the_step(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, SYNC, 2)
    first, other = job.client(0, 1), job.client(1)
    table = first.declare(COUNTS)
    assert other.declare(COUNTS) == table
    shard = job.processes[0].shard_hosts[0].shard
    lost = BackgroundCall(lambda: first.push([Gradients(table, torch.tensor([1]), torch.full((1, 1), 100.0))]))
    wait_for(lambda: shard._waiting, "the first one's push", PATIENCE_S)
    again = job.client(0, 2)
    assert again.declare(COUNTS) == table
    lost.wait()
    both = [BackgroundCall(lambda client=client: count(client, table, 1)) for client in (again, other)]  # type: ignore[misc]
    for each in both:
        each.wait()
        assert each.error is None
    assert counted(other, table, 2) == [0.0, 1.0]


def test_the_older_of_two_processes_with_one_number_is_refused(make_job: Callable[..., Job]) -> None:
    job = make_job(2)
    older = job.client(0, 1)
    table = older.declare(COUNTS)
    newer = job.client(0, 2)
    newer.declare(COUNTS)
    with pytest.raises(RefusedError, match=r"worker 0 has another process, .*PADDLE_TRAINER_ID"):
        count(older, table, *range(10))
    before = [dict(job.processes[number].shard_hosts[number].connections) for number in range(2)]
    count(newer, table, *range(10))
    assert before == [job.processes[number].shard_hosts[number].connections for number in range(2)]
    newer.close()
    wait_for(
        lambda: not any(job.processes[number].shard_hosts[number].connections for number in range(2)),
        "its end",
        PATIENCE_S,
    )
    assert counted(older, table, 1) == [1.0], "the newer process is gone"


def test_a_worker_that_waits_for_a_part_rests_also_after_reconnecting(make_job: Callable[..., Job]) -> None:
    job = make_job(1, SYNC, 2)
    busy, idle = job.client(0), job.client(1)
    table = busy.declare(COUNTS)
    assert busy.lease("data", 1, None) == 0
    shard_host = job.processes[0].shard_hosts[0]
    found: list[int | None] = []
    waiting = BackgroundCall(lambda: found.append(idle.lease("data", 1, None)))
    wait_for(lambda: 1 not in shard_host.shard.progress.steps, "it rests", PATIENCE_S)
    broken = shard_host.connections[1]
    broken.shut_down()
    wait_for(lambda: shard_host.connections.get(1) not in {None, broken}, "another connection", PATIENCE_S)
    step = BackgroundCall(lambda: count(busy, table, 1))
    step.wait()
    assert step.error is None
    assert busy.lease("data", 1, 0) is None
    waiting.wait()
    assert found == [None]


# Moves of shards


@pytest.mark.parametrize("end", ["moved", "closed"])
def test_no_worker_waits_at_a_server_that_has_lost_the_shard(make_job: Callable[..., Job], end: str) -> None:
    before = {*threading.enumerate()}
    job = make_job(1, SYNC, 2)
    one, other = job.client(0, timeout_s=1.0), job.client(1)
    table = one.declare(COUNTS)
    other.declare(COUNTS)
    shard_host = job.processes[0].shard_hosts[0]
    pushing = BackgroundCall(lambda: count(one, table, 1))
    wait_for(lambda: shard_host.shard._waiting, "the push", PATIENCE_S)
    if end == "moved":
        shard_host.apply_place(9, ShardPlace(9, ShardServer(0, 2)))
    else:
        job.processes[0].server.close()
    pushing.wait()
    assert isinstance(pushing.error, NotReadyError)
    one.close()
    other.close()
    wait_for(
        lambda: not [each for each in {*threading.enumerate()} - before if each.name == "ps-caller"],
        "the end of all sessions",
        PATIENCE_S,
    )
    assert not shard_host.shard.applied, "the step was not completed by that"


def test_a_worker_follows_a_shard_that_moves_while_it_connects(make_job: Callable[..., Job]) -> None:
    """The old server may wait for its replica without end."""
    job = make_job(2)
    gone, here = ShardServer(1, 9), ShardServer(0, 1)
    job.processes[0].shard_hosts[0].apply_place(2, ShardPlace(1, here, gone))  # a replica that never answers
    client = Client(job.endpoints, ShardCaller(0, 1, SECRET), PATIENCE_S)
    job.clients.append(client)
    client.apply_map(job.map)
    opening = BackgroundCall(client.open)
    opening.join(0.5)
    assert opening.is_alive(), "it waits for the replica"
    job.processes[1].shard_hosts[0].apply_place(3, ShardPlace(3, ShardServer(1, 1)))
    client.apply_map(ShardMap(3, (ShardPlace(3, ShardServer(1, 1)), job.map.places[1])))
    opening.wait()
    assert opening.error is None
    assert counted(client, client.declare(COUNTS), 3) == [0.0] * 3


_SERVING = textwrap.dedent(
    """
import socket, sys
from trainer_runtime.ps.shard_host import ShardHost, ShardHostSettings
from trainer_runtime.ps.worker_progress import ASYNC
from trainer_runtime.ps.server import ParameterServer
from trainer_runtime.shard_map import ShardServer, ShardPlace

listener = socket.create_server(("127.0.0.1", 0))
endpoints = (listener.getsockname(),)
me, secret = ShardServer(0, 1), sys.argv[1].encode()
shard_host = ShardHost(0, ShardHostSettings(me, endpoints, secret, ASYNC, lambda *_: None, lambda *_: None))
shard_host.apply_place(1, ShardPlace(1, me))
server = ParameterServer((shard_host,), listener, secret, None)
print(endpoints[0][1], flush=True)
server.wait()
"""
)


def test_a_server_that_is_stopped_is_given_up_in_time() -> None:
    server = subprocess.Popen([sys.executable, "-c", _SERVING, SECRET.decode()], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        client = Client([("127.0.0.1", int(server.stdout.readline()))], ShardCaller(0, 1, SECRET), 1.0)
        client.open()
        table = client.declare(COUNTS)
        count(client, table, 1)
        freeze(server.pid)
        asking = BackgroundCall(lambda: client.pull(table, torch.tensor([1])))
        asking.wait()
        assert isinstance(asking.error, NotReadyError)
        server.send_signal(signal.SIGCONT)
        wait_for(client._connections[0].try_open, "it runs again", PATIENCE_S)
        assert counted(client, table, 2) == [0.0, 1.0]
        client.close()
    finally:
        server.kill()
        server.communicate()


def test_a_step_may_take_longer_than_the_timeout(make_job: Callable[..., Job]) -> None:
    job = make_job(1, SYNC, 2)
    one, other = job.client(0, timeout_s=0.1), job.client(1)
    table = one.declare(COUNTS)
    other.declare(COUNTS)
    pushing = BackgroundCall(lambda: count(one, table, 1))
    pushing.join(3.0)
    assert pushing.is_alive()
    count(other, table, 1)
    pushing.wait()
    assert pushing.error is None
    assert counted(one, table, 2) == [0.0, 1.0]


# Replicas


def test_a_shard_with_many_finished_parts_is_copied(make_job: Callable[..., Job]) -> None:
    job = make_job(2, replicas=1)
    job.wait_for_replicas()
    shard = job.processes[0].shard_hosts[0].shard
    shard.passes = {f"pass {number}": leases_of(500_000, [(0, 500_000)]) for number in range(3)}
    job.kill(1)
    job.restart(1, 2)
    job.wait_for_replicas()
    copied = job.processes[1].shard_hosts[0].shard.passes
    assert copied == shard.passes
    assert job.client().lease("pass 0", 500_000, None) is None


def test_repeated_failures_to_create_a_replica_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_host_module, "_RETRY_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = held.getsockname()
    me = ShardServer(0, 1)
    shard_host = ShardHost(0, ShardHostSettings(me, (nobody, nobody), SECRET, ASYNC, lambda *_: None, lambda *_: None))
    with caplog.at_level(logging.WARNING):
        shard_host.apply_place(1, ShardPlace(1, me, None, ShardServer(1, 1)))
        wait_for(lambda: "shard 0 has no replica on server 1 after 50 tries" in caplog.text, "a warning", PATIENCE_S)
    shard_host.apply_place(2, ShardPlace(1, me))
    wait_for(lambda: not [each for each in threading.enumerate() if each.name == "ps-copy"], "its end", PATIENCE_S)


def test_creating_a_replica_is_retried_after_any_error(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke in its handshake, or memory for the copy was exhausted."""
    wrong: list[Exception] = [ConnectionResetError(), RuntimeError("can't allocate memory")]

    def dial(number: int, endpoint: Endpoint, secret: bytes, hello: dict[str, Any], _tls: None) -> ReplicaSender:
        if wrong:
            raise wrong.pop()
        return ReplicaSender(number, endpoint, secret, hello)

    monkeypatch.setattr(shard_host_module, "ReplicaSender", dial)
    make_job(2, replicas=1).wait_for_replicas()
    assert not wrong


def test_wide_rows_are_copied_few_at_a_time() -> None:
    """So that each message is answered in time."""
    shard = Shard(ASYNC)
    shard.declare(TableSpec("wide", 1 << 14, Sum(), initial="zeros"))
    shard.tables[0].initialize(torch.arange(600), torch.ones(600, 1 << 14))
    lengths: list[int] = []

    def take_all(listener: socket.socket) -> None:
        connection = FrameConnection(listener.accept()[0])
        server_handshake(connection, SECRET)
        connection.send(Header(MessageKind.DONE))
        kind = None
        while kind is not MessageKind.COMPLETE:
            header = connection.receive_header()
            kind = header.kind
            connection.receive_body(header.length)
            if kind is MessageKind.ROWS:
                lengths.append(header.length)
            connection.send(Header(MessageKind.DONE))
        connection.close()

    lock = threading.Condition()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taking = BackgroundCall(lambda: take_all(listener))
        sender = ReplicaSender(0, listener.getsockname(), SECRET, {})
        sender.copy(shard, lock)
        lock.release()
        taking.wait()
        sender.close()
    assert sum(lengths) == 600 * (16 + 4 * (1 << 14))
    assert max(lengths) <= 1 << 24
