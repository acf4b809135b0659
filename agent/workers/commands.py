"""From a group's record and this node's configuration to what is started here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent.config import AgentConfig
from agent.core.events import StartWorkers
from agent.workers.environment import JobFacts, Place, build_environment, interface_of
from agent.workers.launch import Launch, RankCommand
from agent.workers.logs import group_dir, log_path


def launch_for(start: StartWorkers, config: AgentConfig, environ: Mapping[str, str]) -> Launch:
    """All rank processes of this node for a group. `environ` is what the user gave to the agent."""
    group, member = start.group, start.group.members[start.node_rank]
    facts = JobFacts(
        job_id=config.job.job_id,
        run=start.spec.run,
        fresh=start.spec.fresh,
        checkpoint_dir=config.workers.checkpoint_dir,
        max_restarts=config.workers.max_restarts,
        interface=interface_of(member.address),
    )
    logs = group_dir(config.workers.log_dir, config.job.job_id, start.spec.run, group.number)
    cwd = Path.cwd()

    def command(local_rank: int) -> RankCommand:
        place = Place(group, start.node_rank, local_rank)
        log = log_path(logs, member.node_id, place.rank)
        shown = config.workers.console_ranks is None or place.rank in config.workers.console_ranks
        return RankCommand(
            local_rank=local_rank,
            rank=place.rank,
            argv=config.workers.command,
            env=build_environment(environ, place, facts, log),
            cwd=cwd,
            log_path=log,
            console_prefix=f"[rank {place.rank}] " if shown else None,
        )

    return Launch(group.number, tuple(command(local_rank) for local_rank in range(member.nproc)))
