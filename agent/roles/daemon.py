"""An agent in a parameter-server job: its parts put together, until the job or its part in it has ended."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from agent import clock
from agent.config import AgentConfig, NodeConfig
from agent.core.effects import Announce, Exit
from agent.core.events import StoreLost
from agent.endpoints import hold_port
from agent.errors import ConfigError, RecordError
from agent.observe import banner
from agent.observe.log import log
from agent.observe.stderr import standard_error
from agent.roles import core
from agent.roles.environment import RoleFacts
from agent.roles.model import RoleNode
from agent.roles.plan import RolePlan, RoleProcess
from agent.roles.store import RoleKeys, RoleRecords, RoleWriter, agree
from agent.roles.workers import RoleProcesses
from agent.runtime import node_facts
from agent.runtime.agent_certificates import check_files
from agent.runtime.loop import Heartbeat, Inbox, end_with_any_thread
from agent.store.api import Snapshot
from agent.store.etcd import EtcdStore
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

_BEATS_PER_LEASE = 8
_FREE_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.1


class RoleDaemon:
    """All parts of it.

    Raises:
        ConfigError: another agent of this job was started with other processes, or a server's port is taken.
    """

    def __init__(
        self, config: AgentConfig, environ: Mapping[str, str], store: EtcdStore, inbox: Inbox, _page: str = ""
    ) -> None:
        assert config.roles is not None  # noqa: S101 - else it is another kind of job
        plan, ttl_s = config.roles, config.timing.effective.lease_ttl_s
        machine = config.ensemble.own if config.ensemble else own_of(plan, config.node)
        if config.tls is not None and any(post.machine == machine for post in plan.of("server")):
            check_files(config.tls, machine)
        self._inbox = inbox
        end_with_any_thread(inbox)
        self._put = cast("Callable[[core.Event], None]", inbox.put)
        self._keys = RoleKeys(config.job.job_id)
        self._ports: list[socket.socket] = []
        """Held for what listens there, as long as this agent lives."""
        spec = agree(store, self._keys, plan, self._find_port)
        plan = spec.plan()
        require_free([post for post in plan.of("server") if post.machine == machine])
        self._heartbeat = Heartbeat(ttl_s / _BEATS_PER_LEASE)
        self._mirror = Mirror(store, self._keys.everything(), self._deliver, self._on_outage)
        self._keeper = LeaseKeeper(store, self._heartbeat.is_alive, on_lost=lambda _lease: self._writer.register())
        self._heartbeat.on_beat = self._keeper.loop_turned
        mine = RoleNode(machine=machine, incarnation=secrets.token_hex(6))
        self._writer = RoleWriter(
            RoleRecords(store, self._keys, spec, config.node.node_id, mine, ttl_s, self._keeper.hold)
        )
        facts = RoleFacts(
            plan=plan,
            job_id=config.job.job_id,
            run=spec.run,
            node_id=config.node.node_id,
            secret=spec.secret,
            checkpoint_dir=config.workers.checkpoint_dir,
            fresh=config.job.fresh,
            tls=config.tls,
            gpus=config.gpus,
        )
        self._workers = RoleProcesses(self._put, config.workers, environ, facts, config.timing.stop_grace_s)
        workers = config.workers
        self._state = core.RoleState(plan, spec.run, machine, workers.max_restarts, workers.progress_window_s, ttl_s)
        self._has_shown = False
        self._shows_banner = bool(config.given)

    def _find_port(self, machine: str) -> int:
        self._ports.append(hold_port(next(iter(node_facts.resolve(machine)))))
        return int(self._ports[-1].getsockname()[1])

    def run(self) -> int:
        """Return the exit code."""
        try:
            self._writer.register()
            self._mirror.start()
            ended = self._loop()
        finally:
            self._workers.close()
            self._mirror.close()
            self._keeper.close()
            self._writer.close()
            for held in self._ports:
                held.close()
        (log.error if ended.code else log.info)(ended.sentence)
        return ended.code

    def _loop(self) -> Exit:
        while True:
            event = cast("core.Event | Exit", self._inbox.get(self._heartbeat.limit_s / 2))
            if isinstance(event, Exit):
                return event
            self._state, effects = core.step(self._state, event, clock.now())
            for effect in effects:
                if isinstance(effect, Exit):
                    return effect
                self._act(effect)
            self._heartbeat.beat()

    def _act(self, effect: core.Effect) -> None:
        match effect:
            case core.StartProcess(post, incarnation):
                env = self._workers.start(post, incarnation)
                if not self._has_shown:
                    self._has_shown = True
                    if self._shows_banner:
                        standard_error().write(banner.first_process([env] * len(self._state.locals)))
                    log.info("its output is also kept", directory=str(self._workers.log_path(post).parent))
            case core.TerminateProcess(post, is_done):
                self._workers.terminate(post, is_done=is_done)
            case core.SendShardMap(told):
                self._workers.tell_map(told)
            case core.WriteRecord() | core.WriteShardMap() | core.Decide():
                self._writer.do(effect)
            case Announce(sentence):
                log.warning(sentence)
            case Exit():
                raise AssertionError(effect)

    def _deliver(self, snapshot: Snapshot) -> None:
        try:
            view = self._keys.view(snapshot)
        except RecordError as error:
            log.error(str(error))
        else:
            self._put(core.RoleViewChanged(view))

    def _on_outage(self, reason: str) -> None:
        if not (self._state.asked_by or self._state.view.result):  # else agents that bring it stop it just then
            log.warning("etcd cannot be reached; training goes on", reason=reason)
        self._put(StoreLost())


def require_free(servers: Sequence[RoleProcess]) -> None:
    """Raise `ConfigError` if another program listens where one of this machine's servers is to.

    One that an agent before has left there ends with it, a moment later.
    """
    give_up_at = time.monotonic() + _FREE_WITHIN_S
    for post in servers:
        while (why := _why_not_free(post)) and time.monotonic() < give_up_at:
            time.sleep(_LOOK_EVERY_S)
        if why:
            raise ConfigError(
                f"{post.name} cannot listen on {post.endpoint}: {why}; stop what does, or choose another port in "
                "--servers, the same on all machines"
            )


def _why_not_free(post: RoleProcess) -> str:
    """Empty: it is free; or it is not known here, and the server will find out."""
    address = next(iter(node_facts.resolve_if_there(post.machine)), None)
    if address is None:
        return ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, post.port), family=family).close()
    except OSError as error:
        return "the port is taken" if error.errno == errno.EADDRINUSE else ""
    return ""


def own_of(plan: RolePlan, config: NodeConfig) -> str:
    """Which of the job's machines this one is. Raises `ConfigError`."""
    return plan.machines[0] if len(plan.machines) == 1 else node_facts.own_of(plan.machines, config.address)
