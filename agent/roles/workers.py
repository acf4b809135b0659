"""The processes of this machine's posts: each is started, watched, replaced and ended for itself, as ranks are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from agent.config import WorkerConfig
from agent.core import events as ev
from agent.core.messages import signal_name
from agent.roles import core
from agent.roles.environment import RoleFacts, role_environment
from agent.roles.plan import RoleProcess
from agent.roles.shards import ReplicaReport
from agent.workers.channel import ReplicaMessage
from agent.workers.launch_plan import Launch, RankCommand, StandbyPlan
from agent.workers.worker_group import WorkerGroup
from trainer_runtime.shard_map import ShardMap


class RoleProcesses:
    """All of them. `post` is called from other threads."""

    def __init__(
        self,
        post: Callable[[core.ProcessExited | core.ReplicaReported], None],
        config: WorkerConfig,
        environ: Mapping[str, str],
        facts: RoleFacts,
        stop_grace_s: float,
    ) -> None:
        self._post = post
        self._config = config
        self._environ = environ
        self._facts = facts
        self._stop_grace_s = stop_grace_s
        self._workers: dict[RoleProcess, WorkerGroup] = {}
        self._exits: dict[RoleProcess, ev.WorkerExited] = {}
        self._incarnations: dict[RoleProcess, int] = {}
        self._timers: list[threading.Timer] = []

    def start(self, post: RoleProcess, incarnation: int) -> dict[str, str]:
        """Let a process begin; return its environment."""
        env = role_environment(self._environ, post, incarnation, self._facts)
        command = self._command(post, env)
        if post not in self._workers:
            standbys = StandbyPlan(self._config.standby, (command.standby_command,))
            self._workers[post] = WorkerGroup(
                partial(self._hear, post), standbys=standbys, on_replica_message=self._hear_copy
            )
        self._incarnations[post] = incarnation
        self._workers[post].start(Launch(incarnation, (command,)))
        return env

    def tell_map(self, told: ShardMap) -> None:
        """Tell all that are there which server has which shard."""
        for workers in self._workers.values():
            workers.send_message({"map": told.to_json()})

    def terminate(self, post: RoleProcess, *, is_done: bool) -> None:
        """Ask a process to end, and kill it after the grace period.

        Args:
            post: whose process.
            is_done: the job has succeeded; the process is told so first.
        """
        workers, incarnation = self._workers[post], self._incarnations[post]
        if is_done:
            workers.send_message({"done": True})
        workers.terminate(incarnation)
        timer = threading.Timer(self._stop_grace_s, workers.kill, [incarnation])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def close(self) -> None:
        """Kill what is left."""
        for timer in self._timers:
            timer.cancel()
        for workers in self._workers.values():
            workers.close()

    def log_path(self, post: RoleProcess) -> Path:
        """Where its output goes; as with fleetrun, and within the run's own directory."""
        return self._config.log_dir / self._facts.job_id / self._facts.run / f"{post.kind}log.{post.index}"

    def _command(self, post: RoleProcess, env: Mapping[str, str]) -> RankCommand:
        is_shown = post.index == 0
        return RankCommand(
            local_rank=0,
            rank=post.index,
            argv=self._config.command,
            env=env,
            cwd=self._config.cwd,
            log_path=self.log_path(post),
            stdin=self._config.script_from_stdin or os.devnull,
            console_prefix=f"[{post.kind} {post.index}] " if is_shown else None,
            console_streams=(1, 2) if is_shown else (),
        )

    def _hear_copy(self, said: ReplicaMessage) -> None:
        self._post(core.ReplicaReported(ReplicaReport(said.map, said.shard, said.is_whole)))

    def _hear(self, post: RoleProcess, event: ev.Event) -> None:
        match event:
            case ev.WorkerExited():
                self._exits[post] = event
            case ev.WorkersGone(incarnation):
                self._post(_gone(post, incarnation, self._exits.pop(post)))
            case _:
                pass  # the rest is about groups


def _gone(post: RoleProcess, incarnation: int, exited: ev.WorkerExited) -> core.ProcessExited:
    if exited.signal is not None:
        return core.ProcessExited(post, incarnation, 128 + exited.signal, f"was killed by {signal_name(exited.signal)}")
    code = exited.exit_code or 0
    why = f"ended with {code}" + (f": {exited.error}" if exited.error else "") if code else ""
    return core.ProcessExited(post, incarnation, code, why)
