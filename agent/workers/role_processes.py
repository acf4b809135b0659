"""The processes of this machine in a parameter-server job, each in a worker group of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from agent.config import WorkerConfig
from agent.core import events as ev
from agent.observe.messages import signal_name
from agent.roles.events import ProcessExited, ReplicaReported
from agent.roles.plan import RoleProcess
from agent.roles.shards import ReplicaReport
from agent.workers.channel import ReplicaMessage
from agent.workers.launch_plan import Launch, RankCommand, StandbyPlan
from agent.workers.role_environment import RoleFacts, role_environment
from agent.workers.worker_group import WorkerGroup
from trainer_runtime.shard_map import ShardMap


class RoleProcesses:
    """Starts, watches and ends the processes of this machine.

    Args:
        put: takes an event; called from other threads.
        config: of the workers.
        environ: that the user gave to the agent.
        facts: what all processes share.
        stop_grace_s: time between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        put: Callable[[ProcessExited | ReplicaReported], None],
        config: WorkerConfig,
        environ: Mapping[str, str],
        facts: RoleFacts,
        stop_grace_s: float,
    ) -> None:
        self._put = put
        self._config = config
        self._environ = environ
        self._facts = facts
        self._stop_grace_s = stop_grace_s
        self._workers: dict[RoleProcess, WorkerGroup] = {}
        self._exits: dict[RoleProcess, ev.WorkerExited] = {}
        self._incarnations: dict[RoleProcess, int] = {}
        self._timers: list[threading.Timer] = []

    def start(self, process: RoleProcess, incarnation: int) -> dict[str, str]:
        """Start an incarnation of a process; return its environment."""
        env = role_environment(self._environ, process, incarnation, self._facts)
        command = self._command(process, env)
        if process not in self._workers:
            standbys = StandbyPlan(self._config.standby, (command.standby_command,))
            self._workers[process] = WorkerGroup(
                partial(self._on_event, process), standbys=standbys, on_replica_message=self._on_replica
            )
        self._incarnations[process] = incarnation
        self._workers[process].start(Launch(incarnation, (command,)))
        return env

    def send_map(self, shard_map: ShardMap) -> None:
        """Send the map of shards to all running processes."""
        for workers in self._workers.values():
            workers.send_message({"map": shard_map.to_json()})

    def terminate(self, process: RoleProcess, *, is_done: bool) -> None:
        """Ask a process to end, and kill it after the grace period.

        Args:
            process: which one.
            is_done: the job has succeeded; the process is notified of it first.
        """
        workers, incarnation = self._workers[process], self._incarnations[process]
        if is_done:
            workers.send_message({"done": True})
        workers.terminate(incarnation)
        timer = threading.Timer(self._stop_grace_s, workers.kill, [incarnation])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def close(self) -> None:
        """Kill the processes that are left."""
        for timer in self._timers:
            timer.cancel()
        for workers in self._workers.values():
            workers.close()

    def log_path(self, process: RoleProcess) -> Path:
        """Return the path of its output: named as by fleetrun, in the directory of the run."""
        return self._config.log_dir / self._facts.job_id / self._facts.run / f"{process.kind}log.{process.index}"

    def _command(self, process: RoleProcess, env: Mapping[str, str]) -> RankCommand:
        is_shown = process.index == 0
        return RankCommand(
            local_rank=0,
            rank=process.index,
            argv=self._config.command,
            env=env,
            cwd=self._config.cwd,
            log_path=self.log_path(process),
            stdin=self._config.script_from_stdin or os.devnull,
            console_prefix=f"[{process.kind} {process.index}] " if is_shown else None,
            console_streams=(1, 2) if is_shown else (),
        )

    def _on_replica(self, message: ReplicaMessage) -> None:
        self._put(ReplicaReported(ReplicaReport(message.map, message.shard, message.is_complete)))

    def _on_event(self, process: RoleProcess, event: ev.Event) -> None:
        match event:
            case ev.WorkerExited():
                self._exits[process] = event
            case ev.WorkersGone(incarnation):
                self._put(_exit_event(process, incarnation, self._exits.pop(process)))
            case _:
                pass  # other events are about groups of ranks


def _exit_event(process: RoleProcess, incarnation: int, exited: ev.WorkerExited) -> ProcessExited:
    if exited.signal is not None:
        return ProcessExited(process, incarnation, 128 + exited.signal, f"was killed by {signal_name(exited.signal)}")
    code = exited.exit_code or 0
    why = f"ended with {code}" + (f": {exited.error}" if exited.error else "") if code else ""
    return ProcessExited(process, incarnation, code, why)
