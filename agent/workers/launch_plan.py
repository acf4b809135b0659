"""What is to be started on this node: for one group, and ahead of any."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from agent.workers import log_paths
from agent.workers.environment import (
    TOLD,
    JobFacts,
    RankPlace,
    RankSlot,
    build_environment,
    interface_of,
    standing_environment,
)
from agent.workers.snapshot_store import PieceSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.config import AgentConfig, StandbyMode
    from agent.core.effects import StartWorkers


@dataclass(frozen=True)
class StandbyCommand:
    """A rank process that does not know its place yet: it begins Python's start and waits there."""

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The standing part of it."""
    cwd: Path
    cpus: tuple[int, ...] = ()
    """Where it may run; empty: anywhere."""
    stdin: str | None = os.devnull
    """As in `RankCommand`; None if it may become the rank that reads the agent's."""


@dataclass(frozen=True)
class RankCommand:
    """One rank process."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Complete: only the control page, the channel and the guardian's mark are added."""
    cwd: Path
    log_path: Path
    """Appended to; its directories are made where missing."""
    console_prefix: str | None
    """Put before each line on the agent's console. None: nothing goes there."""
    console_streams: tuple[int, ...] = (1, 2)
    """What goes there: standard output (1), standard error (2)."""
    cpus: tuple[int, ...] = ()
    """Where it may run; empty: anywhere."""
    stdin: str | None = os.devnull
    """File that is its standard input. None: the agent's own."""
    has_peers: bool = False
    """There are other ranks in its group."""

    @property
    def standing(self) -> StandbyCommand:
        """What of it does not depend on the group."""
        env = {name: value for name, value in self.env.items() if name not in TOLD}
        return StandbyCommand(self.local_rank, self.argv, env, self.cwd, self.cpus, self.stdin)


@dataclass(frozen=True)
class Launch:
    """All local rank processes of one group."""

    group: int
    commands: tuple[RankCommand, ...]
    source: PieceSource | None = None
    """Whose snapshots these ranks make. None: nobody keeps any."""


@dataclass(frozen=True)
class StandbyPlan:
    """The standby processes that a node is to have."""

    mode: StandbyMode = "off"
    commands: tuple[StandbyCommand, ...] = ()
    """One for each local rank."""


def plan_standbys(config: AgentConfig, environ: Mapping[str, str]) -> StandbyPlan:
    """The standby processes of this node. `environ` is the environment that the user gave to the agent."""
    interface = interface_of(config.node.ips)
    seats = [RankSlot(config.node.nproc, local, interface, config.snapshots) for local in range(config.node.nproc)]
    return StandbyPlan(
        mode=config.workers.standby,
        commands=tuple(
            StandbyCommand(
                seat.local_rank,
                config.workers.command,
                standing_environment(environ, seat),
                config.workers.cwd,
                config.node.cpus_of(seat.local_rank),
                config.workers.stdin_of(config.workers.stdin_rank or 0, config.node.nproc),
            )
            for seat in seats
        ),
    )


def plan_launch(start: StartWorkers, config: AgentConfig, environ: Mapping[str, str]) -> Launch:
    """The rank processes of this node. `environ` is the environment that the user gave to the agent."""
    member = start.group.members[start.node_rank]
    facts = JobFacts(
        job_id=config.job.job_id,
        role=config.workers.role,
        run=start.spec.run,
        first_group=start.spec.first_group,
        fresh=start.spec.fresh,
        checkpoint_dir=config.workers.checkpoint_dir,
        max_restarts=config.workers.max_restarts,
        handoff_wait_s=config.timing.handoff_wait_s,
        interface=interface_of(config.node.ips),
        snapshots=config.snapshots,
        secret=start.spec.secret,
    )
    places = [RankPlace(start.group, start.node_rank, local_rank) for local_rank in range(member.nproc)]
    return Launch(
        group=start.group.number,
        commands=tuple(_command(place, facts, config, environ) for place in places),
        source=PieceSource(facts.run, start.group.world_size) if facts.snapshots.is_enabled else None,
    )


def _command(place: RankPlace, facts: JobFacts, config: AgentConfig, environ: Mapping[str, str]) -> RankCommand:
    workers = config.workers
    group_dir = log_paths.group_dir(workers.log_dir, facts.job_id, facts.run, place.group.number)
    log_path = log_paths.log_path(group_dir, place.member.node_id, place.rank)
    streams = workers.console.streams(place.rank, place.local_rank)
    names = {"role_name": facts.role, "local_rank": str(place.local_rank), "rank": str(place.rank)}
    return RankCommand(
        local_rank=place.local_rank,
        rank=place.rank,
        argv=workers.command,
        env=build_environment(environ, place, facts, log_path),
        cwd=workers.cwd,
        log_path=log_path,
        console_prefix=_prefix(workers.console.prefix, names) if streams else None,
        console_streams=streams,
        cpus=config.node.cpus_of(place.local_rank),
        stdin=workers.stdin_of(place.rank, place.group.world_size),
        has_peers=place.group.world_size > 1,
    )


def _prefix(template: str, names: Mapping[str, str]) -> str:
    return f"{Template(template).safe_substitute(names)} " if template else ""
