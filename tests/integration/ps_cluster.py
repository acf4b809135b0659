"""Servers of one job within this process, over real sockets, with the map that says which server has which shard."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import NamedTuple

from waiting import wait_for

from agent.roles.shards import ReplicaReport, apply_report, first_map, next_map
from trainer_runtime.ps.client import Client
from trainer_runtime.ps.server import ParameterServer
from trainer_runtime.ps.shard_connection import Endpoint, ShardCaller
from trainer_runtime.ps.shard_host import ShardHost, ShardHostSettings
from trainer_runtime.ps.worker_progress import ASYNC, Mode
from trainer_runtime.shard_map import ShardMap, ShardServer
from trainer_runtime.tls import TlsFiles, accepting, dialling

SECRET = b"what the processes know"
PATIENCE_S = 60.0


class Process(NamedTuple):
    """The shards and the server of one server process."""

    shard_hosts: tuple[ShardHost, ...]
    server: ParameterServer


class Job:
    """Servers of one job, and the map of shards, which agents keep in etcd otherwise."""

    def __init__(
        self,
        servers: int,
        mode: Mode = ASYNC,
        workers: int = 1,
        *,
        replicas: int = 0,
        wait_workers_s: float = PATIENCE_S,
        grace_s: float = PATIENCE_S,
        tls: TlsFiles | None = None,
    ) -> None:
        self._accepting = accepting(tls, callers=ssl.CERT_REQUIRED) if tls else None
        self._dialling = dialling(tls, names_host=True) if tls else None
        self._mode = mode
        self._waits = (workers, wait_workers_s, grace_s)
        self._workers = workers
        self._replicas = replicas
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(servers)]
        self.endpoints: tuple[Endpoint, ...] = tuple(listener.getsockname() for listener in self._listeners)
        self._lock = threading.RLock()
        self.incarnations = dict.fromkeys(range(servers), 1)
        self.map = first_map(servers, replicas=replicas)
        self.clients: list[Client] = []
        self.processes: dict[int, Process] = {}
        with self._lock:  # a replica can be complete before the last server has started
            for number in range(servers):
                self._begin(number)
            self._apply_map(self.map)

    def client(self, worker: int = 0, incarnation: int = 1, timeout_s: float = PATIENCE_S) -> Client:
        client = Client(self.endpoints, ShardCaller(worker, incarnation, SECRET, self._dialling), timeout_s)
        with self._lock:
            self.clients.append(client)
            client.apply_map(self.map)
        client.open()
        return client

    def kill(self, number: int) -> None:
        """Stop a server as if by SIGKILL, and apply the next map."""
        with self._lock:
            process = self.processes.pop(number)
        process.server.close()
        with self._lock:
            del self.incarnations[number]
            self._apply_map(next_map(self.map, self.incarnations, replicas=self._replicas))

    def restart(self, number: int, incarnation: int) -> None:
        with self._lock:
            self._listeners[number] = socket.create_server(self.endpoints[number])
            self.incarnations[number] = incarnation
            self._begin(number)
            self._apply_map(next_map(self.map, self.incarnations, replicas=self._replicas))

    def wait_for_replicas(self) -> None:
        """Wait until each shard has a replica."""
        wait_for(lambda: all(place.replica for place in self.map.places), f"copies; there is {self.map}", PATIENCE_S)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self.processes.values():
            process.server.close()

    def _begin(self, number: int) -> None:
        settings = ShardHostSettings(
            ShardServer(number, self.incarnations[number]),
            self.endpoints,
            SECRET,
            self._mode,
            lambda *_: None,
            self._on_report,
            *self._waits,
            self._dialling,
        )
        shard_hosts = tuple(ShardHost(shard, settings) for shard in range(len(self.endpoints)))
        server = ParameterServer(shard_hosts, self._listeners[number], SECRET, self._workers, None, self._accepting)
        self.processes[number] = Process(shard_hosts, server)
        for each, place in zip(shard_hosts, self.map.places, strict=True):
            each.apply_place(self.map.number, place)

    def _on_report(self, number: int, shard: int, is_complete: bool) -> None:  # noqa: FBT001 - as `ShardHostSettings.report_replica`
        threading.Thread(
            target=self._apply_report, args=(ReplicaReport(number, shard, is_complete),), daemon=True
        ).start()

    def _apply_report(self, report: ReplicaReport) -> None:
        with self._lock:
            self._apply_map(apply_report(self.map, report))

    def _apply_map(self, shard_map: ShardMap) -> None:
        self.map = shard_map
        for process in self.processes.values():
            for shard_host, place in zip(process.shard_hosts, shard_map.places, strict=True):
                shard_host.apply_place(shard_map.number, place)
        for client in self.clients:
            client.apply_map(shard_map)
