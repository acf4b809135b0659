"""The environment of each rank: the user's variables, those of `torchrun`, the `PADDLE_*` names, and this project's.

Scripts written for torchrun (2.13) or for Paddle's launcher find the variables that they expect. A user's value wins
for tuning (threads, buffering, network interfaces). The variables that place a rank in its group are always set by the
agent.

The environment has two parts. The *static* part does not depend on the group, so a standby can be started with it. The
*group variables* (`GROUP_VARIABLES`) are known once the group is; see `standbys.py`.
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
from agent.workers.devices import gpus_of_rank
from agent.workers.rank_logs import error_path
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from agent.core.model import Group, Member

ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
"""Addresses of all ranks. Not set if there are too many for one variable."""
GROUP_VARIABLES = frozenset(
    {
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE"),
        *("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT", ENDPOINTS),
        *("PADDLE_RANK_IN_NODE", "TRAINING_ROLE"),
        *(contract.JOB_ID, contract.RUN_ID, contract.GROUP, contract.NODE_ID, contract.CHECKPOINT_DIR, contract.FRESH),
        contract.RANKS_KEY,
        contract.SETUP,
        *(contract.HANDOFF_WAIT_S, contract.VERDICT_WITHIN_S, contract.PS_INCARNATION),
    }
)
"""Variables that depend on the group: they define which rank of which group, or which role process, a process is."""

_SNAPSHOTS = frozenset({contract.SNAPSHOT_OVERHEAD, contract.SNAPSHOT_MEMORY})
_VARIABLE_BYTES = 128 << 10
"""Longest variable with which Linux starts a process, with name and terminating zero (`MAX_ARG_STRLEN`)."""
_SECRET = re.compile(r"ELASTIC_AGENT_(ETCD_.*|.*PASSWORD.*)")


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank in its group."""

    group: Group
    node_rank: int
    local_rank: int

    @property
    def member(self) -> Member:
        """The node that the rank runs on."""
        return self.group.members[self.node_rank]

    @property
    def rank(self) -> int:
        """The rank in the world."""
        return self.group.first_rank(self.node_rank) + self.local_rank


@dataclass(frozen=True)
class JobFacts:
    """Values that all ranks of a node have in common."""

    job_id: str
    role: str
    run: str
    first_group: int
    """Number of the run's first group."""
    fresh: bool
    checkpoint_dir: str
    max_restarts: int
    handoff_wait_s: float
    verdict_within_s: float
    interface: str | None
    """Network interface that has this node's address."""
    snapshots: SnapshotConfig
    secret: str
    """The job's secret. Ranks get only a key that is derived from it for their group."""
    setup: str = ""
    """Whether the processes set up before they enter their group: a value of `contract.SETUP`, or empty."""


@dataclass(frozen=True)
class RankSlot:
    """The place of one rank process on its node. It is known before there is a group."""

    nproc: int
    """Number of rank processes on this node."""
    local_rank: int
    interface: str | None
    """Network interface that has this node's address."""
    snapshots: SnapshotConfig


def build_environment(base: Mapping[str, str], place: RankPlace, facts: JobFacts, log: Path) -> dict[str, str]:
    """Build the complete environment of one rank. `base` is the environment that the user gave to the agent."""
    variables = _torchrun(place, facts, log) | _paddle(place) | _contract(place, facts)
    slot = RankSlot(place.member.nproc, place.local_rank, facts.interface, facts.snapshots)
    return static_environment(base, slot) | variables


def static_environment(base: Mapping[str, str], slot: RankSlot) -> dict[str, str]:
    """Build the environment without `GROUP_VARIABLES`."""
    env = {name: value for name, value in without_secrets(base).items() if name not in GROUP_VARIABLES | _SNAPSHOTS}
    if gpus := gpus_of_rank(base, slot.nproc, slot.local_rank):
        env["FLAGS_selected_gpus"] = gpus
    return _defaults(slot) | env | _snapshots(slot.snapshots)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that give access to etcd."""
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
        # Documented as "the number of worker group restarts so far": scripts use it to see whether this is the first
        # start. The group's count of failures would not do, because it returns to 0 with progress.
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
        contract.CHECKPOINT_DIR: facts.checkpoint_dir,
        contract.FRESH: "1" if facts.fresh else "0",
        contract.HANDOFF_WAIT_S: f"{facts.handoff_wait_s:g}",
        contract.VERDICT_WITHIN_S: f"{facts.verdict_within_s:g}",
        **({contract.SETUP: facts.setup} if facts.setup else {}),
        **_snapshots(facts.snapshots),
    }


def _ranks_key(secret: str, group: Group) -> str:
    variables = f"elastic-agent: the ranks of group {group.number} of {group.run}"
    return hmac.digest(secret.encode(), variables.encode(), hashlib.sha256).hex()


def _snapshots(config: SnapshotConfig) -> dict[str, str]:
    variables = {contract.SNAPSHOT_OVERHEAD: f"{config.overhead_percent:g}"} if config.is_enabled else {}
    if config.is_enabled and config.memory_bytes is not None:
        variables[contract.SNAPSHOT_MEMORY] = str(config.memory_bytes)
    return variables


def _defaults(slot: RankSlot) -> dict[str, str]:
    """Return values for variables that the user has not set."""
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if slot.nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    if slot.interface:
        # Found by address: after an outage, a network may come back under another interface name.
        # NCCL takes a plain name for a prefix: `eth1` would also choose eth10.
        defaults |= {"GLOO_SOCKET_IFNAME": slot.interface, "NCCL_SOCKET_IFNAME": f"={slot.interface}"}
    return defaults


def interface_of(ips: Collection[str]) -> str | None:
    """Name the network interface of this host that has one of the addresses. Asks the kernel only, never DNS."""
    wanted = {ip.partition("%")[0] for ip in ips}
    is_loopback = any(ipaddress.ip_address(ip).is_loopback for ip in wanted)
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for found in addresses:
            ip = found.address.partition("%")[0]
            # The loopback interface has all of 127.0.0.0/8, but lists one address.
            if ip in wanted or (is_loopback and ip in {"127.0.0.1", "::1"}):
                return name
    return None
