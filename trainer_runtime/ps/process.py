"""The state of this process in a parameter-server job, and what a script can ask about its role."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer_runtime.checkpoint import warn
from trainer_runtime.ps.client import Client
from trainer_runtime.ps.control_messages import ControlMessages
from trainer_runtime.ps.geo import GeoClient
from trainer_runtime.ps.roles import Role, SecretError, role_of
from trainer_runtime.ps.server import ParameterServer
from trainer_runtime.ps.shard_host import ShardHost
from trainer_runtime.ps.worker_progress import ASYNC, Mode
from trainer_runtime.shard_map import ShardMap, ShardServer

_EXIT_USAGE = 2
"""Exit code after a mistake of the operator, as that of `elastic-agent`."""


@dataclass
class ProcessState:
    """The parts of this process. A server has `shard_hosts` and `server`, a worker has `client` and `rows`."""

    role: Role
    mode: Mode
    shard_hosts: tuple[ShardHost, ...] = ()
    server: ParameterServer | None = None
    client: Client | None = None
    rows: Client | GeoClient | None = None
    """The client that the model's embeddings use."""
    control: ControlMessages | None = None
    """Channel to the agent; None without an agent."""
    rows_dir: Path | None = None
    """Directory in which a server keeps its shards; None: they are not kept on disk."""
    is_stop_requested: bool = False
    map: ShardMap | None = None
    """The newest map."""
    failure: Exception | None = None
    passes: int = 0
    """Number of passes through the data that were started without a name."""

    def apply_map(self, shard_map: ShardMap) -> None:
        """Apply a new map to the shards of this server, and print the shards that it now serves."""
        before, self.map = self.map, shard_map
        for shard_host, place in zip(self.shard_hosts, shard_map.places, strict=True):
            shard_host.apply_place(shard_map.number, place)
            is_new = before is None or before.places[shard_host.number] != place
            if is_new and place.primary == ShardServer(self.role.index, self.role.incarnation):
                where = "nowhere else" if place.replica is None else f"on server {place.replica.server}"
                log_server(self, f"has shard {shard_host.number}, and it is {where} (map {shard_map.number})")

    def stop(self) -> None:
        """Stop this server on request, usually the agent's."""
        self.is_stop_requested = True
        if self.server is not None:
            self.server.stop()

    def fail(self, error: Exception) -> None:
        """Close this server with the error with which a map could not be applied."""
        self.failure = error
        if self.server is not None:
            self.server.close()


_state: ProcessState | None = None


def init(mode: Mode = ASYNC) -> None:
    """Read the role of this process from its environment. Call it first, with the same mode on servers and workers.

    Raises:
        RuntimeError: the environment describes no role; the message names what is missing.
        SystemExit: the secret that was set by hand is too short; a line on stderr says so. A script cannot continue
            without it, so this must not look like an error in the script.
    """
    global _state  # noqa: PLW0603 - one for each process
    try:
        role = role_of()
    except SecretError as error:
        warn(str(error))
        raise SystemExit(_EXIT_USAGE) from None
    _state = ProcessState(role, mode)


def current() -> ProcessState:
    """Return the state of this process. Raises `RuntimeError` before `init`."""
    if _state is None:
        raise RuntimeError("call ps.init() first")
    return _state


def require(kind: str) -> ProcessState:
    """Return the state of this process. Raises `RuntimeError` if it is not of this kind."""
    state = current()
    if state.role.kind != kind:
        raise RuntimeError(
            f"wanted a call by a {kind}, but this process is a {state.role.kind}: check ps.is_{kind}() first"
        )
    return state


def log_server(state: ProcessState, message: str) -> None:
    """Print a line to the log of this server."""
    print(f"server {state.role.index} {message}", flush=True)  # noqa: T201 - serverlog.N is read by users


def is_server() -> bool:
    """Return whether this process is a server."""
    return current().role.kind == "server"


def is_worker() -> bool:
    """Return whether this process is a worker."""
    return current().role.kind == "worker"


def is_first_worker() -> bool:
    """Return whether this process is worker 0, which usually does what is needed only once."""
    return is_worker() and current().role.index == 0


def worker_index() -> int:
    """Return the index of this worker, from 0. Raises `RuntimeError` on a server."""
    return require("worker").role.index


def worker_num() -> int:
    """Return the number of workers in the description of the job."""
    return current().role.workers


def server_index() -> int:
    """Return the index of this server, from 0. Raises `RuntimeError` on a worker."""
    return require("server").role.index


def server_num() -> int:
    """Return the number of servers of the job."""
    return len(current().role.servers)


def server_endpoints() -> list[str]:
    """Return the addresses of the servers, as `host:port`."""
    return [f"{host}:{port}" for host, port in current().role.servers]
