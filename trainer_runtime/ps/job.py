"""The course of a process in a parameter-server job, from `init` to its end."""

from __future__ import annotations

import operator
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_runtime import contract, tls
from trainer_runtime.ps import control_messages
from trainer_runtime.ps.client import Client
from trainer_runtime.ps.geo import GeoClient
from trainer_runtime.ps.leases import MAX_PARTS
from trainer_runtime.ps.optimizer import DistributedOptimizer
from trainer_runtime.ps.persistence import (
    Ownership,
    ShardPersistence,
    is_unfinished,
    load,
    note_finished,
    set_aside_finished,
)
from trainer_runtime.ps.roles import Role, role_of
from trainer_runtime.ps.rules import Rule
from trainer_runtime.ps.server import ParameterServer
from trainer_runtime.ps.shard import RUN_ENDS, Shard
from trainer_runtime.ps.shard_connection import ShardCaller
from trainer_runtime.ps.shard_host import GRACE_S, WAIT_WORKERS_S, Settings, ShardHost
from trainer_runtime.ps.worker_progress import ASYNC, Mode
from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer

_BACKLOG = 512
_TIMEOUT_S = 600.0


@dataclass
class _RoleJob:
    """What this process has."""

    role: Role
    mode: Mode
    hosted: tuple[ShardHost, ...] = ()
    server: ParameterServer | None = None
    client: Client | None = None
    rows: Client | GeoClient | None = None
    """What the model's rows are asked of."""
    orders: control_messages.ControlMessages | None = None
    """From the agent; None: there is no agent."""
    rows_dir: Path | None = None
    """Where a server keeps its shards; None: nowhere."""
    is_told_to_end: bool = False
    map: ShardMap | None = None
    """The newest."""
    failure: Exception | None = None
    passes: int = 0
    """Through the data that were begun without a name."""

    def take_map(self, told: ShardMap) -> None:
        """Go by a new map."""
        before, self.map = self.map, told
        for hosted, place in zip(self.hosted, told.places, strict=True):
            hosted.take_place(told.number, place)
            is_new = before is None or before.places[hosted.number] != place
            if is_new and place.primary == ShardServer(self.role.index, self.role.incarnation):
                where = "nowhere else" if place.replica is None else f"on server {place.replica.server}"
                _say(self, f"has shard {hosted.number}, and it is {where} (map {told.number})")

    def end(self) -> None:
        """The agent, or whoever has started this server, ends it."""
        self.is_told_to_end = True
        if self.server is not None:
            self.server.stop()

    def fail(self, error: Exception) -> None:
        """A map could not be followed: the server ends with that."""
        self.failure = error
        if self.server is not None:
            self.server.close()


_job: _RoleJob | None = None


def init(mode: Mode = ASYNC) -> None:
    """Find out which part this process has. First of all; servers and workers say the same mode.

    Raises:
        RuntimeError: the environment describes no part; it says what is missing.
    """
    global _job  # noqa: PLW0603 - of a process there is one
    _job = _RoleJob(role_of(), mode)


def is_server() -> bool:
    """Whether this process is a server."""
    return _here().role.kind == "server"


def is_worker() -> bool:
    """Whether this process is a worker."""
    return _here().role.kind == "worker"


def is_first_worker() -> bool:
    """Whether this is worker 0, which does what is to be done once."""
    return is_worker() and _here().role.index == 0


def worker_index() -> int:
    """This worker's number, from 0. Raises `RuntimeError` on a server."""
    return _only("worker").role.index


def worker_num() -> int:
    """How many workers the job is described with."""
    return _here().role.workers


def server_index() -> int:
    """This server's number, from 0. Raises `RuntimeError` on a worker."""
    return _only("server").role.index


def server_num() -> int:
    """How many servers the job has."""
    return len(_here().role.servers)


def server_endpoints() -> list[str]:
    """The servers' addresses, as `host:port`."""
    return [f"{host}:{port}" for host, port in _here().role.servers]


def init_server(
    load_dir: str | None = None,
    *,
    keep_dir: str | None = None,
    keep_every_s: float = 10.0,
    wait_workers_s: float = WAIT_WORKERS_S,
    grace_s: float = GRACE_S,
) -> None:
    """Take up what was kept, or was saved, and listen.

    Args:
        load_dir: where `save` has written; for a server that finds nothing that was kept. The number of servers may
            have been another.
        keep_dir: in there each server keeps its rows, so that one that is started again goes on with them. By default
            in the agent's `--checkpoint_dir`; without an agent nowhere.
        keep_every_s: how often it writes what has changed: so much at most is lost with a server.
        wait_workers_s: where workers wait for each other, how long those that have not come yet are waited for when the
            job begins, by the first one that has made a step.
        grace_s: how long they wait then for one whose connection has ended, or that has not found yet where a shard is
            now. It notices when it next asks: let it be longer than a step takes.

    Raises:
        RuntimeError: this is a worker.
        OSError: nobody can listen there.
        DamagedError: what was kept is damaged.
        FileNotFoundError: what was saved is not there, or not all of it.
    """
    job = _only("server")
    role = job.role
    # The requests of many workers share the cores already.
    torch.set_num_threads(1)
    torch.set_default_device("cpu")  # rows are there, in 32 bits, whatever the script says for its model
    torch.set_default_dtype(torch.float32)
    kept = keep_dir or os.environ.get(contract.CHECKPOINT_DIR)
    job.rows_dir = None if kept is None else Path(kept) / "servers"
    rows = _Rows(job, load_dir, keep_every_s)
    me = ShardServer(role.index, role.incarnation)
    channel = control_messages.descriptor()
    said = job.orders = (
        control_messages.ControlMessages(channel, job.take_map, job.fail) if channel is not None else None
    )
    say = said.say if said else lambda *_: None
    settings = Settings(
        me,
        role.servers,
        role.secret,
        job.mode,
        rows.take_up,
        say,
        role.workers,
        wait_workers_s,
        grace_s,
        _dialling(role),
    )
    job.hosted = tuple(ShardHost(number, settings) for number in range(len(role.servers)))
    if said is None:
        job.hosted[role.index].take_place(1, ShardPlace(1, me))
    host, port = role.servers[role.index]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # An agent knows better when all is done: workers may leave servers whose shards have moved here.
    workers = role.workers if said is None else None
    only_from = None if role.secret else role.addresses()
    accepting = tls.accepting(role.tls, callers=ssl.CERT_REQUIRED) if role.tls else None
    job.server = ParameterServer(job.hosted, listener, role.secret, workers, only_from, accepting)
    if said is not None:
        said.begin()
    _say(job, f"listens on {host}:{port}")


def _dialling(role: Role) -> ssl.SSLContext | None:
    return tls.dialling(role.tls, names_host=True) if role.tls else None


@dataclass(frozen=True)
class _Rows:
    """Where a server's rows are kept, and what they begin with."""

    job: _RoleJob
    load_dir: str | None
    keep_every_s: float

    def take_up(self, number: int, shard: Shard, lock: threading.Condition, restores: bool) -> ShardPersistence | None:  # noqa: FBT001 - as `Settings.keep`
        """Fill a shard, if that is wanted, and keep it from now on."""
        directory = self.job.rows_dir
        keeper = None if directory is None else self._keep(directory, number, shard, lock, restores)
        if self.load_dir is not None and restores and not shard.tables:
            load(shard, Path(self.load_dir), Ownership(number, len(self.job.role.servers)))
        return keeper

    def _keep(
        self,
        directory: Path,
        number: int,
        shard: Shard,
        lock: threading.Condition,
        restores: bool,  # noqa: FBT001 - as above
    ) -> ShardPersistence:
        servers = len(self.job.role.servers)
        place = directory / f"shard-{number}-of-{servers}"
        keeper = ShardPersistence(place, shard, lock, self.keep_every_s)
        kept_at = None
        if restores:
            aside = set_aside_finished(place)
            if aside is not None:
                _say(self.job, f"begins anew, since the run before has finished; its rows are in {aside} now")
            _check_number(directory, servers)
            kept_at = keeper.restore()
        else:
            with suppress(OSError):  # a disk that is away is no matter: what was copied here is served
                set_aside_finished(place)  # the mark of another run must not stand beside the rows of this one
            keeper.follow()
        if kept_at is not None:
            rows, ago_s = sum(map(len, shard.tables)), time.time() - kept_at
            _say(self.job, f"has {rows} rows as they were {ago_s:.1f} s ago; what was pushed since is lost")
        keeper.begin()
        return keeper


def _check_number(directory: Path, servers: int) -> None:
    """Raises `RuntimeError`: another number of servers has kept its rows there, and this one would begin without."""
    kept = {path.name.rpartition("-")[2] for path in directory.glob("shard-*-of-*") if is_unfinished(path)}
    if kept and str(servers) not in kept:
        there = " or ".join(sorted(kept))
        raise RuntimeError(
            f"{directory} has the rows of {there} servers, and there are {servers} now: start as many; or let a worker "
            "ps.save() the rows first, and give that to init_server(load_dir) with another directory"
        )


def run_server() -> None:
    """Serve until all workers have called `stop_worker`, or the agent ends this server with the job.

    A server that the agent ends does not come back from here. Rows that are kept on disk are noted as those of a run
    that has finished, if it has: the next run on the same directory begins anew.
    """
    job = _only("server")
    if job.server is None:
        raise RuntimeError("ps.run_server() comes after ps.init_server()")
    signal.signal(signal.SIGTERM, lambda *_: job.end())
    try:
        job.server.wait()
        is_done = not job.is_told_to_end and job.failure is None
        if job.orders is not None:
            is_done = job.orders.close()
    finally:
        job.server.close()
    if job.failure is not None:
        raise job.failure
    if is_done and job.rows_dir is not None:
        # Without an agent a server knows only that its own workers have left it.
        note_finished(job.rows_dir, "*" if job.orders is not None else str(job.role.index))
    if job.is_told_to_end:
        sys.exit(0)


def init_worker(timeout_s: float = _TIMEOUT_S) -> None:
    """Wait until all servers are there, and say every three seconds which are not.

    Raises:
        NotReadyError: one was not there in time.
        RuntimeError: this is a server.
    """
    job = _only("worker")
    caller = ShardCaller(job.role.index, time.time_ns(), job.role.secret, _dialling(job.role))
    client = job.client = Client(job.role.servers, caller, timeout_s)
    channel = control_messages.descriptor()
    if channel is not None:
        control_messages.ControlMessages(channel, client.take_map, client.fail).begin()
    client.open()
    job.rows = GeoClient(client, job.mode.every, job.role.workers) if job.mode.every else client


def distributed_optimizer(rule: Optimizer | Rule, model: nn.Module, *, name: str = "dense") -> DistributedOptimizer:
    """Put a model's parameters and embeddings on the servers. See `DistributedOptimizer`."""
    client = _client()
    return DistributedOptimizer(rule, model, _here().rows or client, name)


def data_parts(parts: int, name: str | None = None) -> Iterator[int]:
    """The numbers of parts of the data that this worker is to train, as long as there are any.

    Each of them, from 0 to `parts` - 1, is trained by one worker, and by another if that one is lost in it. A part is
    done when the next is asked for. A worker that is started again skips passes that are over. Another run of the job
    by the agent begins anew.

    Args:
        parts: into how many the data is divided; the same on all workers.
        name: of this pass through the data; another for each. By default it counts the calls: "data.1" and so on, so
            that all workers must make the same passes in the same order.

    Raises:
        NotReadyError: a server was away for too long.
        RefusedError: a pass of this name has another number of parts.
        TypeError, ValueError: `parts` is no whole number up to 2**24, or `name` no word.
    """
    parts = _whole("parts", parts, MAX_PARTS)
    if not isinstance(name, str | None):
        raise TypeError(f"the name of a pass must be a word, not {name!r}")
    job, client = _here(), _client()
    if name is None:
        job.passes += 1
        name = f"data.{job.passes}"
    return _leased(client, f"{os.environ.get(contract.RUN_ID, '')}{RUN_ENDS}{name}", parts)


def _leased(client: Client, name: str, parts: int) -> Iterator[int]:
    done = None
    while (part := client.lease(name, parts, done)) is not None:
        yield part
        done = part


@contextmanager
def resting() -> Iterator[None]:
    """Let the others make steps without this worker for a while, as it evaluates, saves or waits for something.

    Where workers wait for each other (`SYNC`, `bounded`), they would wait for this one too. No steps within; those that
    follow begin where the others are.

    Raises:
        NotReadyError: a server was away for too long.
    """
    client = _client()
    client.rest()
    try:
        yield
    finally:
        client.join()


def save(directory: str | Path) -> None:
    """Let all servers write their rows into a directory that they share. By one worker.

    Raises:
        RefusedError: one of them cannot; it says why.
        NotReadyError: a server was away for too long.
    """
    _exchange()
    Path(directory).mkdir(parents=True, exist_ok=True)
    _client().save(str(Path(directory).absolute()))


def shrink(unseen_s: int) -> int:
    """Drop the rows that nobody has pushed to for so many seconds; return how many.

    Raises:
        NotReadyError: a server was away for too long.
        TypeError, ValueError: `unseen_s` is no whole number from 0 on.
    """
    unseen_s = _whole("unseen_s", unseen_s, 1 << 62)
    return _client().shrink(unseen_s)


def stop_worker() -> None:
    """Tell the servers that this worker has done its part. Raises `NotReadyError`."""
    _exchange()
    _client().leave()


def _exchange() -> None:
    rows = _here().rows
    if isinstance(rows, GeoClient):
        rows.exchange()


def _whole(name: str, value: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not 0 <= number <= most:
        raise ValueError(f"{name} must be from 0 to {most}, not {value!r}")
    return number


def _here() -> _RoleJob:
    if _job is None:
        raise RuntimeError("call ps.init() first")
    return _job


def _say(job: _RoleJob, words: str) -> None:
    print(f"server {job.role.index} {words}", flush=True)  # noqa: T201 - where its users look for it


def _only(kind: str) -> _RoleJob:
    job = _here()
    if job.role.kind != kind:
        raise RuntimeError(f"this process is a {job.role.kind}, and that is for a {kind}: ask ps.is_{kind}() before")
    return job


def _client() -> Client:
    client = _only("worker").client
    if client is None:
        raise RuntimeError("call ps.init_worker() first")
    return client
