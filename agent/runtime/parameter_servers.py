"""The runtime of a parameter-server job: puts an agent's parts together, and carries out the effects of its core."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent import node_facts
from agent.config import AgentConfig, NodeConfig
from agent.core.effects import Announce, Exit
from agent.errors import ConfigError
from agent.observe.log import log
from agent.ports import hold_port
from agent.roles import core
from agent.roles.events import (
    RoleEffect,
    RoleEvent,
    SendShardMap,
    StartProcess,
    TerminateProcess,
    WriteRecord,
    WriteRoleResult,
    WriteShardMap,
)
from agent.roles.model import RoleNode
from agent.roles.plan import RolePlan, RoleProcess
from agent.roles.store import RoleKeys, agree_on_spec
from agent.runtime.agent_certificates import check_files
from agent.runtime.loop import Core, Inbox
from agent.runtime.runtime import JobRuntime
from agent.runtime.store_client import ParameterServerClient
from agent.store.etcd import EtcdStore
from agent.workers.role_environment import RoleFacts
from agent.workers.role_processes import RoleProcesses

_FREE_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.1


class ParameterServerRuntime(JobRuntime[core.RoleState, RoleEvent, RoleEffect]):
    """All parts of an agent in a parameter-server job.

    Args:
        config: of the agent, with `roles`.
        environ: of its processes.
        store: the job's etcd.
        inbox: may hold events already.

    Raises:
        ConfigError: another agent of this job was started with other processes, or a server's port is taken.
    """

    _client: ParameterServerClient

    def __init__(
        self,
        config: AgentConfig,
        environ: Mapping[str, str],
        store: EtcdStore,
        inbox: Inbox[RoleEvent],
        _page: str = "",
    ) -> None:
        assert config.roles is not None  # noqa: S101 - else it is another kind of job
        plan = config.roles
        machine = config.ensemble.own if config.ensemble else own_of(plan, config.node)
        if config.tls is not None and any(process.machine == machine for process in plan.of("server")):
            check_files(config.tls, machine)
        super().__init__(config, inbox)
        self._ports: list[socket.socket] = []
        """Held as long as this agent lives, for the processes that listen there."""
        spec = agree_on_spec(store, RoleKeys(config.job.job_id), plan, self._find_port)
        plan = spec.plan()
        require_free([process for process in plan.of("server") if process.machine == machine])
        node = RoleNode(machine=machine, incarnation=secrets.token_hex(6))
        self._client = ParameterServerClient(config, store, inbox, self._heartbeat, spec, node)
        facts = RoleFacts(
            plan=plan,
            job_id=config.job.job_id,
            run=spec.run,
            node_id=config.node.node_id,
            secret=spec.secret,
            checkpoint_dir=Path(config.workers.checkpoint_dir),
            fresh=config.job.fresh,
            tls=config.tls,
            gpus=config.gpus,
        )
        workers = config.workers
        self._workers = RoleProcesses(inbox.put, workers, environ, facts, config.timing.stop_grace_s)
        self._initial_state = core.RoleState(
            plan, spec.run, machine, workers.max_restarts, workers.progress_window_s, config.timing.lease_ttl_s
        )
        self._process_count = sum(process.machine == machine for process in plan.processes)

    def _find_port(self, machine: str) -> int:
        self._ports.append(hold_port(next(iter(node_facts.resolve(machine)))))
        return int(self._ports[-1].getsockname()[1])

    def _core(self) -> Core[core.RoleState, RoleEvent, RoleEffect]:
        return Core(core.step)

    def _begin(self) -> core.RoleState:
        self._client.start()
        return self._initial_state

    def _act(self, effect: RoleEffect) -> None:
        match effect:
            case StartProcess(process, incarnation):
                env = self._workers.start(process, incarnation)
                self._report_first_start([env] * self._process_count, self._workers.log_path(process).parent)
            case TerminateProcess(process, is_done):
                self._workers.terminate(process, is_done=is_done)
            case SendShardMap(shard_map):
                self._workers.send_map(shard_map)
            case WriteRecord() | WriteShardMap() | WriteRoleResult():
                self._client.do(effect)
            case Announce(sentence):
                log.warning(sentence)
            case Exit():
                raise AssertionError(effect)

    def _look(self, state: core.RoleState, _now: float) -> None:
        self._outages.notice(
            is_lost=state.is_store_lost and bool(self._client.outage),  # a new agent is cut off, and nothing is wrong
            is_over=bool(state.stop_signal or state.view.result),
            is_training=any(local.is_running for local in state.locals.values()),
        )

    def _close(self) -> None:
        self._workers.close()
        self._client.close()
        for held in self._ports:
            held.close()


def require_free(servers: Sequence[RoleProcess]) -> None:
    """Raise `ConfigError` if another program listens on the port of one of this machine's servers.

    A server of an earlier agent ends a moment after that agent, so a taken port is tried again for `_FREE_WITHIN_S`.
    """
    give_up_at = time.monotonic() + _FREE_WITHIN_S
    for process in servers:
        while (why := _why_not_free(process)) and time.monotonic() < give_up_at:
            time.sleep(_LOOK_EVERY_S)
        if why:
            raise ConfigError(
                f"{process.name} cannot listen on {process.endpoint}: {why}; stop what does, or choose another port in "
                "--servers, the same on all machines"
            )


def _why_not_free(process: RoleProcess) -> str:
    """Return why the port is not free; empty: it is, or this cannot be found out here, and the server will see."""
    address = next(iter(node_facts.resolve_if_there(process.machine)), None)
    if address is None:
        return ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, process.port), family=family).close()
    except OSError as error:
        return "the port is taken" if error.errno == errno.EADDRINUSE else ""
    return ""


def own_of(plan: RolePlan, config: NodeConfig) -> str:
    """Return which of the job's machines this one is. Raises `ConfigError`."""
    return plan.machines[0] if len(plan.machines) == 1 else node_facts.own_of(plan.machines, config.address)
