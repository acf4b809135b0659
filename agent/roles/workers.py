"""The processes of this machine's posts: each is started, watched, replaced and ended for itself, as ranks are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from agent.config import WorkerConfig
from agent.core import events as ev
from agent.core.sentences import signal_name
from agent.roles import core
from agent.roles.environment import RoleFacts, role_environment
from agent.roles.plan import Post
from agent.roles.shards import ReplicaSaid
from agent.workers.channel import CopySaid
from agent.workers.group import LocalWorkers
from agent.workers.launch import Launch, RankCommand, StandbyPlan
from trainer_runtime.shard_map import ShardMap


class PostWorkers:
    """All of them. `post` is called from other threads."""

    def __init__(
        self,
        post: Callable[[core.Gone | core.CopySaid], None],
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
        self._workers: dict[Post, LocalWorkers] = {}
        self._exits: dict[Post, ev.WorkerExited] = {}
        self._incarnations: dict[Post, int] = {}
        self._timers: list[threading.Timer] = []

    def start(self, post: Post, incarnation: int) -> dict[str, str]:
        """Let a process begin; return its environment."""
        env = role_environment(self._environ, post, incarnation, self._facts)
        command = self._command(post, env)
        if post not in self._workers:
            standbys = StandbyPlan(self._config.standby, (command.standing,))
            self._workers[post] = LocalWorkers(partial(self._hear, post), standbys=standbys, on_copy=self._hear_copy)
        self._incarnations[post] = incarnation
        self._workers[post].start(Launch(incarnation, (command,)))
        return env

    def tell_map(self, told: ShardMap) -> None:
        """Tell all that are there which server has which shard."""
        for workers in self._workers.values():
            workers.tell({"map": told.to_json()})

    def terminate(self, post: Post, *, is_done: bool) -> None:
        """Ask a process to end, and kill it after the grace period.

        Args:
            post: whose process.
            is_done: the job has succeeded; the process is told so first.
        """
        workers, incarnation = self._workers[post], self._incarnations[post]
        if is_done:
            workers.tell({"done": True})
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

    def log_path(self, post: Post) -> Path:
        """Where its output goes; as with fleetrun, and within the run's own directory."""
        return self._config.log_dir / self._facts.job_id / self._facts.run / f"{post.kind}log.{post.index}"

    def _command(self, post: Post, env: Mapping[str, str]) -> RankCommand:
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

    def _hear_copy(self, said: CopySaid) -> None:
        self._post(core.CopySaid(ReplicaSaid(said.map, said.shard, said.is_whole)))

    def _hear(self, post: Post, event: ev.Event) -> None:
        match event:
            case ev.WorkerExited():
                self._exits[post] = event
            case ev.WorkersGone(incarnation):
                self._post(_gone(post, incarnation, self._exits.pop(post)))
            case _:
                pass  # the rest is about groups


def _gone(post: Post, incarnation: int, exited: ev.WorkerExited) -> core.Gone:
    if exited.signal is not None:
        return core.Gone(post, incarnation, 128 + exited.signal, f"was killed by {signal_name(exited.signal)}")
    code = exited.exit_code or 0
    why = f"ended with {code}" + (f": {exited.error}" if exited.error else "") if code else ""
    return core.Gone(post, incarnation, code, why)
