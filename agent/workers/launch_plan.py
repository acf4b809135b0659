"""The processes to start on this node: the ranks of one group, and the standbys."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import msgspec

from agent.core import effects as fx
from agent.core.neighbours import next_member
from agent.workers import rank_logs
from agent.workers.environment import (
    GROUP_VARIABLES,
    JobFacts,
    RankPlace,
    RankSlot,
    build_environment,
    interface_of,
    static_environment,
)
from agent.workers.held_snapshots import PieceSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.config import AgentConfig, StandbyMode
    from agent.core.model import Group
    from agent.core.records import Identity


@dataclass(frozen=True)
class StandbyCommand:
    """A rank process that has no rank yet. It is held during the start of Python."""

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Environment without `GROUP_VARIABLES`."""
    cwd: Path
    cpus: tuple[int, ...] = ()
    """CPUs on which it may run; empty: all."""
    stdin: str | None = os.devnull
    """As in `RankCommand`. None if it may become the rank that reads the agent's standard input."""


@dataclass(frozen=True)
class RankCommand:
    """One rank process."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Complete environment; only the control page, the channel and the guardian's mark are added."""
    cwd: Path
    log_path: Path
    """Log file, opened for appending. Missing directories are created."""
    console_prefix: str | None
    """Prefix of each line on the agent's console. None: no output goes there."""
    console_streams: tuple[int, ...] = (1, 2)
    """Streams that go to the console: standard output (1), standard error (2)."""
    cpus: tuple[int, ...] = ()
    """CPUs on which it may run; empty: all."""
    stdin: str | None = os.devnull
    """File for its standard input. None: the agent's standard input."""
    has_peers: bool = False
    """Whether its group has other ranks."""

    @property
    def standby_command(self) -> StandbyCommand:
        """The part of the command that does not depend on the group."""
        env = {name: value for name, value in self.env.items() if name not in GROUP_VARIABLES}
        return StandbyCommand(self.local_rank, self.argv, env, self.cwd, self.cpus, self.stdin)


@dataclass(frozen=True)
class Launch:
    """All local rank processes of one group."""

    group: int
    commands: tuple[RankCommand, ...]
    source: PieceSource | None = None
    """Run and world size of the snapshots that these ranks take. None: no snapshots are kept."""
    next_node: Identity | None = None
    """The agent that also holds the large parts of these snapshots. None: there is no other."""
    takes_set_up: bool = False
    """A process that has set up the script before may become one of these ranks."""
    ahead: tuple[RankCommand, ...] = ()
    """What standbys may run to set up the script before they are ranks of a later group. Empty: nothing."""


@dataclass(frozen=True)
class StandbyPlan:
    """The standbys of a node."""

    mode: StandbyMode = "off"
    commands: tuple[StandbyCommand, ...] = ()
    """One for each local rank."""


def plan_standbys(config: AgentConfig, environ: Mapping[str, str]) -> StandbyPlan:
    """Plan the standbys of this node. `environ` is the environment that the user gave to the agent."""
    interface = interface_of(config.node.ips)
    slots = [RankSlot(config.node.nproc, local, interface, config.snapshots) for local in range(config.node.nproc)]
    return StandbyPlan(
        mode=config.workers.standby,
        commands=tuple(
            StandbyCommand(
                slot.local_rank,
                config.workers.command,
                static_environment(environ, slot),
                config.workers.cwd,
                config.node.cpus_of(slot.local_rank),
                config.workers.stdin_of(config.workers.stdin_rank or 0, config.node.nproc),
            )
            for slot in slots
        ),
    )


def plan_launch(
    start: fx.StartWorkers | fx.SetUpWorkers | fx.MoveWorkers, config: AgentConfig, environ: Mapping[str, str]
) -> Launch:
    """Plan the rank processes of this node. `environ` is the environment that the user gave to the agent."""
    group = start.group
    setup = "wait" if isinstance(start, fx.SetUpWorkers) else "alone" if group.in_place else ""
    facts = _facts(start, setup, config)
    after = next_member(group, group.members[start.node_rank].identity)
    return Launch(
        group=group.number,
        commands=_commands(group, start.node_rank, facts, config, environ),
        source=PieceSource(facts.run, group.world_size) if facts.snapshots.is_enabled else None,
        next_node=after.identity if after is not None else None,
        takes_set_up=bool(setup) and group.cause != "restart",  # an operator who asks for a restart wants new processes
        ahead=_ahead(start, config, environ),
    )


def _ahead(
    start: fx.StartWorkers | fx.SetUpWorkers | fx.MoveWorkers, config: AgentConfig, environ: Mapping[str, str]
) -> tuple[RankCommand, ...]:
    """What standbys of these ranks run to set up: with their rank and world size, but never with rank 0."""
    if config.workers.standby != "hot" or isinstance(start, fx.SetUpWorkers):
        return ()
    members, node_rank = start.group.members, start.node_rank
    if node_rank == 0:  # as if it was the last node, or a second one
        members = (*members[1:], members[0]) if len(members) > 1 else members * 2
        node_rank = len(members) - 1
    group = msgspec.structs.replace(start.group, members=members)
    commands = _commands(group, node_rank, _facts(start, "wait", config), config, environ)
    return tuple(_as_standby(each, members[node_rank].node_id) for each in commands)


def _as_standby(command: RankCommand, node_id: str) -> RankCommand:
    """The same without an output of the rank's own: that rank is alive."""
    log_path = rank_logs.standby_log_path(command.log_path.parent, node_id, command.local_rank)
    env = {**command.env, "TORCHELASTIC_ERROR_FILE": str(rank_logs.error_path(log_path))}
    return replace(command, env=env, log_path=log_path, console_prefix=None)


def _facts(start: fx.StartWorkers | fx.SetUpWorkers | fx.MoveWorkers, setup: str, config: AgentConfig) -> JobFacts:
    return JobFacts(
        job_id=config.job.job_id,
        role=config.workers.role,
        run=start.spec.run,
        first_group=start.spec.first_group,
        fresh=start.spec.fresh,
        checkpoint_dir=config.workers.checkpoint_dir,
        max_restarts=config.workers.max_restarts,
        handoff_wait_s=config.timing.handoff_wait_s,
        verdict_within_s=config.timing.detect_within_s + 1.0,
        interface=interface_of(config.node.ips),
        snapshots=config.snapshots,
        secret=start.spec.secret,
        setup=setup,
    )


def _commands(
    group: Group, node_rank: int, facts: JobFacts, config: AgentConfig, environ: Mapping[str, str]
) -> tuple[RankCommand, ...]:
    places = (RankPlace(group, node_rank, local_rank) for local_rank in range(group.members[node_rank].nproc))
    return tuple(_command(place, facts, config, environ) for place in places)


def _command(place: RankPlace, facts: JobFacts, config: AgentConfig, environ: Mapping[str, str]) -> RankCommand:
    workers = config.workers
    group_dir = rank_logs.group_dir(workers.log_dir, facts.job_id, facts.run, place.group.number)
    log_path = rank_logs.log_path(group_dir, place.member.node_id, place.rank)
    streams = workers.console.streams(place.rank, place.local_rank)
    names = {"role_name": facts.role, "local_rank": str(place.local_rank), "rank": str(place.rank)}
    return RankCommand(
        local_rank=place.local_rank,
        rank=place.rank,
        argv=workers.command,
        env=build_environment(environ, place, facts, log_path),
        cwd=workers.cwd,
        log_path=log_path,
        console_prefix=Template(workers.console.prefix).safe_substitute(names) if streams else None,
        console_streams=streams,
        cpus=config.node.cpus_of(place.local_rank),
        stdin=workers.stdin_of(place.rank, place.group.world_size),
        has_peers=place.group.world_size > 1,
    )
