"""What a script calls on a server: `init_server` and `run_server`."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_runtime import contract, tls
from trainer_runtime.ps import control_messages
from trainer_runtime.ps.persistence import (
    Ownership,
    ShardPersistence,
    is_unfinished,
    load,
    note_finished,
    set_aside_finished,
)
from trainer_runtime.ps.process import ProcessState, log_server, require
from trainer_runtime.ps.roles import client_context
from trainer_runtime.ps.server import ParameterServer
from trainer_runtime.ps.shard import Shard
from trainer_runtime.ps.shard_host import GRACE_S, WAIT_WORKERS_S, ShardHost, ShardHostSettings
from trainer_runtime.shard_map import ShardPlace, ShardServer

_BACKLOG = 512


def init_server(
    load_dir: str | None = None,
    *,
    keep_dir: str | None = None,
    keep_every_s: float = 10.0,
    wait_workers_s: float = WAIT_WORKERS_S,
    grace_s: float = GRACE_S,
) -> None:
    """Load the rows that are on disk, if there are any, and start to listen.

    Args:
        load_dir: directory that `save` has written. It is read by a server that finds no rows in `keep_dir`. The number
            of servers that wrote it may differ from the number now.
        keep_dir: directory in which each server keeps its rows, so that a restarted server continues with them. The
            default is the agent's `--checkpoint_dir`; without an agent rows are not kept.
        keep_every_s: interval between writes of the changed rows. A lost server loses at most one interval of pushes.
        wait_workers_s: in modes in which workers wait for each other, how long the first worker that has made a step
            waits at the start of the job for workers that have not joined yet.
        grace_s: in these modes, how long workers wait for one whose connection has ended, or that has not found the new
            server of a shard yet. A worker notices either at its next request, so this must be longer than a step.

    Raises:
        RuntimeError: this process is a worker.
        OSError: the server cannot listen on its address.
        DamagedError: the rows in `keep_dir` are damaged.
        FileNotFoundError: the files in `load_dir` are missing or incomplete.
    """
    state = require("server")
    role = state.role
    # The requests of many workers occupy the cores already.
    torch.set_num_threads(1)
    # Rows are 32-bit floats on the CPU, whatever defaults the script sets for its model.
    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float32)
    keep_root = keep_dir or os.environ.get(contract.CHECKPOINT_DIR)
    state.rows_dir = None if keep_root is None else Path(keep_root) / "servers"
    loader = ShardLoader(state, load_dir, keep_every_s)
    me = ShardServer(role.index, role.incarnation)
    channel = control_messages.descriptor()
    control = state.control = (
        control_messages.ControlMessages(channel, state.apply_map, state.fail) if channel is not None else None
    )
    settings = ShardHostSettings(
        me,
        role.servers,
        role.secret,
        state.mode,
        loader.load_shard,
        control.report_replica if control else lambda *_: None,
        role.workers,
        wait_workers_s,
        grace_s,
        client_context(role),
    )
    state.shard_hosts = tuple(ShardHost(number, settings) for number in range(len(role.servers)))
    if control is None:
        state.shard_hosts[role.index].apply_place(1, ShardPlace(1, me))
    host, port = role.servers[role.index]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # The agent, if there is one, decides when the job is over: shards that workers have left elsewhere may move here.
    workers = role.workers if control is None else None
    allowed_addresses = None if role.secret else role.addresses()
    context = tls.accepting(role.tls, callers=ssl.CERT_REQUIRED) if role.tls else None
    state.server = ParameterServer(state.shard_hosts, listener, role.secret, workers, allowed_addresses, context)
    if control is not None:
        control.start()
    log_server(state, f"listens on {host}:{port}")


def run_server() -> None:
    """Serve until all workers have called `stop_worker`, or the agent stops this server with the job.

    If the agent stops the server, this function exits the process. If the run has finished, rows that are kept on disk
    are marked as those of a finished run: the next run on the same directory starts without them.
    """
    state = require("server")
    if state.server is None:
        raise RuntimeError("ps.run_server() comes after ps.init_server()")
    signal.signal(signal.SIGTERM, lambda *_: state.stop())
    try:
        state.server.wait()
        is_finished = not state.is_stop_requested and state.failure is None
        if state.control is not None:
            is_finished = state.control.close()
    finally:
        state.server.close()
    if state.failure is not None:
        raise state.failure
    if is_finished and state.rows_dir is not None:
        # Without an agent a server only knows that the workers have left its own shard.
        note_finished(state.rows_dir, "*" if state.control is not None else str(state.role.index))
    if state.is_stop_requested:
        sys.exit(0)


@dataclass(frozen=True)
class ShardLoader:
    """Fills the shards of a server from disk, and starts to keep them there."""

    state: ProcessState
    load_dir: str | None
    keep_every_s: float

    def load_shard(
        self,
        number: int,
        shard: Shard,
        lock: threading.Condition,
        restores: bool,  # noqa: FBT001 - as `ShardHostSettings.open_persistence`
    ) -> ShardPersistence | None:
        """Fill a shard from disk if `restores`, and keep it on disk from now on. Returns None if no shard is kept."""
        directory = self.state.rows_dir
        persistence = None if directory is None else self._open_persistence(directory, number, shard, lock, restores)
        if self.load_dir is not None and restores and not shard.tables:
            load(shard, Path(self.load_dir), Ownership(number, len(self.state.role.servers)))
        return persistence

    def _open_persistence(
        self,
        directory: Path,
        number: int,
        shard: Shard,
        lock: threading.Condition,
        restores: bool,  # noqa: FBT001 - as above
    ) -> ShardPersistence:
        servers = len(self.state.role.servers)
        shard_dir = directory / f"shard-{number}-of-{servers}"
        persistence = ShardPersistence(shard_dir, shard, lock, self.keep_every_s)
        written_at = None
        if restores:
            aside = set_aside_finished(shard_dir)
            if aside is not None:
                log_server(self.state, f"starts without rows, since the last run has finished; its rows are in {aside}")
            check_server_count(directory, servers)
            written_at = persistence.restore()
        else:
            with suppress(OSError):  # this server has a copy of the rows, and serves it also without its disk
                set_aside_finished(shard_dir)  # otherwise the marker of another run would stand beside this run's rows
            persistence.follow()
        if written_at is not None:
            rows, ago_s = sum(map(len, shard.tables)), time.time() - written_at
            log_server(self.state, f"has {rows} rows as they were {ago_s:.1f} s ago; what was pushed since is lost")
        persistence.start()
        return persistence


def check_server_count(directory: Path, servers: int) -> None:
    """Raise `RuntimeError` if only another number of servers has kept rows there: this run would start without them."""
    found = {path.name.rpartition("-")[2] for path in directory.glob("shard-*-of-*") if is_unfinished(path)}
    if found and str(servers) not in found:
        there = " or ".join(sorted(found))
        raise RuntimeError(
            f"{directory} has the rows of {there} servers, and there are {servers} now: start as many; or let a worker "
            "ps.save() the rows first, and give that to init_server(load_dir) with another directory"
        )
