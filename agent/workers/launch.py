"""What is to be started on this node for one group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.workers import logs
from agent.workers.environment import JobFacts, Place, build_environment, interface_of
from agent.workers.snapshots import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.config import AgentConfig, WorkerConfig
    from agent.core.events import StartWorkers


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
    takes_snapshots: bool = False
    """It is given a memory to put them into."""


@dataclass(frozen=True)
class Launch:
    """All local rank processes of one group."""

    group: int
    commands: tuple[RankCommand, ...]
    source: Source | None = None
    """Whose snapshots these ranks make. None: nobody keeps any."""


def plan_launch(start: StartWorkers, config: AgentConfig, environ: Mapping[str, str]) -> Launch:
    """The rank processes of this node. `environ` is the environment that the user gave to the agent."""
    member = start.group.members[start.node_rank]
    facts = JobFacts(
        job_id=config.job.job_id,
        run=start.spec.run,
        first_group=start.spec.first_group,
        fresh=start.spec.fresh,
        checkpoint_dir=config.workers.checkpoint_dir,
        max_restarts=config.workers.max_restarts,
        handoff_wait_s=config.timing.handoff_wait_s,
        interface=interface_of(config.node.ips),
        snapshots=config.snapshots,
    )
    places = [Place(start.group, start.node_rank, local_rank) for local_rank in range(member.nproc)]
    return Launch(
        group=start.group.number,
        commands=tuple(_command(place, facts, config.workers, environ) for place in places),
        source=Source(facts.run, start.group.world_size) if facts.snapshots.are_taken else None,
    )


def _command(place: Place, facts: JobFacts, workers: WorkerConfig, environ: Mapping[str, str]) -> RankCommand:
    group_dir = logs.group_dir(workers.log_dir, facts.job_id, facts.run, place.group.number)
    log_path = logs.log_path(group_dir, place.member.node_id, place.rank)
    is_shown = workers.console_ranks is None or place.rank in workers.console_ranks
    return RankCommand(
        local_rank=place.local_rank,
        rank=place.rank,
        argv=workers.command,
        env=build_environment(environ, place, facts, log_path),
        cwd=Path.cwd(),
        log_path=log_path,
        console_prefix=f"[rank {place.rank}] " if is_shown else None,
        takes_snapshots=facts.snapshots.are_taken,
    )
