"""The environment of each rank: the user's own, what `torchrun` sets, the `PADDLE_*` names, and our contract.

Scripts written for torchrun (2.13) or for Paddle's launcher find what they look for. What the user has set wins
where it is a matter of taste (threads, buffering, interfaces); places in the group are always ours.

A rank's environment has two parts. The *standing* one is the same whatever the group: a process may be started with it
before there is one. The *told* one (`TOLD`) is known with the group; see `standbys.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from agent.config import SnapshotConfig
from agent.endpoints import endpoint_of
from agent.workers.devices import own_of
from agent.workers.log_paths import error_path
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from agent.core.model import Group, Member

ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
"""All ranks' addresses. Not told where there are too many of them for one variable."""
TOLD = frozenset(
    {
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE"),
        *("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT", ENDPOINTS),
        *("PADDLE_RANK_IN_NODE", "TRAINING_ROLE"),
        *(contract.JOB_ID, contract.RUN_ID, contract.GROUP, contract.NODE_ID, contract.CHECKPOINT_DIR, contract.FRESH),
        contract.RANKS_KEY,
        *(contract.HANDOFF_WAIT_S, contract.PS_INCARNATION),
    }
)
"""Names of the variables that say which rank of which group a process is, or which process of a place."""

_SNAPSHOTS = frozenset({contract.SNAPSHOT_OVERHEAD, contract.SNAPSHOT_MEMORY})
_VARIABLE_BYTES = 128 << 10
"""Linux starts no process that has a longer one, name and closing zero included (`MAX_ARG_STRLEN`)."""
_SECRET = re.compile(r"ELASTIC_AGENT_(ETCD_.*|.*PASSWORD.*)")


@dataclass(frozen=True)
class RankPlace:
    """Which of the job's ranks it is."""

    group: Group
    node_rank: int
    local_rank: int

    @property
    def member(self) -> Member:
        """The node it runs on."""
        return self.group.members[self.node_rank]

    @property
    def rank(self) -> int:
        """Its rank in the world."""
        return self.group.first_rank(self.node_rank) + self.local_rank


@dataclass(frozen=True)
class JobFacts:
    """What is the same for all ranks of a node."""

    job_id: str
    role: str
    run: str
    first_group: int
    """Number of the run's first group."""
    fresh: bool
    checkpoint_dir: Path
    max_restarts: int
    handoff_wait_s: float
    interface: str | None
    """Network interface that has this node's address."""
    snapshots: SnapshotConfig
    secret: str
    """The job's. The ranks are given only what follows from it for their group."""


@dataclass(frozen=True)
class RankSlot:
    """Which of a node's rank processes it is; known before there is a group."""

    nproc: int
    """Rank processes on this node."""
    local_rank: int
    interface: str | None
    """Network interface that has this node's address."""
    snapshots: SnapshotConfig


def build_environment(base: Mapping[str, str], place: RankPlace, facts: JobFacts, log: Path) -> dict[str, str]:
    """The complete environment of one rank. `base` is what the user gave to the agent."""
    told = _torchrun(place, facts, log) | _paddle(place) | _contract(place, facts)
    seat = RankSlot(place.member.nproc, place.local_rank, facts.interface, facts.snapshots)
    return standing_environment(base, seat) | told


def standing_environment(base: Mapping[str, str], seat: RankSlot) -> dict[str, str]:
    """All of it but `TOLD`."""
    env = {name: value for name, value in without_secrets(base).items() if name not in TOLD | _SNAPSHOTS}
    if gpus := own_of(base, seat.nproc, seat.local_rank):
        env["FLAGS_selected_gpus"] = gpus
    return _defaults(seat) | env | _snapshots(seat.snapshots)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """What may be handed on: everything but how to get into etcd."""
    return {name: value for name, value in environ.items() if not _SECRET.fullmatch(name)}


def _torchrun(place: RankPlace, facts: JobFacts, log: Path) -> dict[str, str]:
    group, master = place.group, place.group.members[0]
    return {
        "LOCAL_RANK": str(place.local_rank),
        "RANK": str(place.rank),
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": facts.role,
        "LOCAL_WORLD_SIZE": str(place.member.nproc),
        "WORLD_SIZE": str(group.world_size),
        "GROUP_WORLD_SIZE": str(len(group.members)),
        "ROLE_WORLD_SIZE": str(group.world_size),
        "MASTER_ADDR": master.address,
        "MASTER_PORT": str(master.port),
        # "The number of worker group restarts so far": scripts ask it whether they run for the first time. The
        # group's own count of failures would not do, as it returns to 0 with progress.
        "TORCHELASTIC_RESTART_COUNT": str(group.number - facts.first_group),
        "TORCHELASTIC_MAX_RESTARTS": str(facts.max_restarts),
        "TORCHELASTIC_RUN_ID": facts.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": str(error_path(log)),
    }


def _paddle(place: RankPlace) -> dict[str, str]:
    endpoints = [
        endpoint_of(member.address, member.port + local_rank)
        for member in place.group.members
        for local_rank in range(member.nproc)
    ]
    listed = ",".join(endpoints)
    fits = len(f"{ENDPOINTS}={listed}\0") <= _VARIABLE_BYTES
    return {
        "PADDLE_TRAINER_ID": str(place.rank),
        "PADDLE_TRAINERS_NUM": str(place.group.world_size),
        "PADDLE_CURRENT_ENDPOINT": endpoints[place.rank],
        **({ENDPOINTS: listed} if fits else {}),
        "PADDLE_RANK_IN_NODE": str(place.local_rank),
        "TRAINING_ROLE": "TRAINER",
    }


def _contract(place: RankPlace, facts: JobFacts) -> dict[str, str]:
    return {
        contract.JOB_ID: facts.job_id,
        contract.RUN_ID: facts.run,
        contract.GROUP: str(place.group.number),
        contract.RANKS_KEY: _ranks_key(facts.secret, place.group),
        contract.NODE_ID: place.member.node_id,
        contract.CHECKPOINT_DIR: str(facts.checkpoint_dir),
        contract.FRESH: "1" if facts.fresh else "0",
        contract.HANDOFF_WAIT_S: f"{facts.handoff_wait_s:g}",
        **_snapshots(facts.snapshots),
    }


def _ranks_key(secret: str, group: Group) -> str:
    told = f"elastic-agent: the ranks of group {group.number} of {group.run}"
    return hmac.digest(secret.encode(), told.encode(), hashlib.sha256).hex()


def _snapshots(config: SnapshotConfig) -> dict[str, str]:
    told = {contract.SNAPSHOT_OVERHEAD: f"{config.overhead_percent:g}"} if config.is_enabled else {}
    if config.is_enabled and config.memory_bytes is not None:
        told[contract.SNAPSHOT_MEMORY] = str(config.memory_bytes)
    return told


def _defaults(seat: RankSlot) -> dict[str, str]:
    """What applies where the user has set nothing."""
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if seat.nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    if seat.interface:
        # By the address, since a network that was cut off may come back under another interface name.
        defaults |= {"GLOO_SOCKET_IFNAME": seat.interface, "NCCL_SOCKET_IFNAME": seat.interface}
    return defaults


def interface_of(ips: Collection[str]) -> str | None:
    """Name of the network interface of this host that has one of the addresses. Asks the kernel only, never DNS."""
    wanted = {ip.partition("%")[0] for ip in ips}
    is_loopback = any(ipaddress.ip_address(ip).is_loopback for ip in wanted)
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for found in addresses:
            ip = found.address.partition("%")[0]
            # All of 127.0.0.0/8 is the loopback's, though it shows one address.
            if ip in wanted or (is_loopback and ip in {"127.0.0.1", "::1"}):
                return name
    return None
