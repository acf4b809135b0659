"""The agent on a node, once etcd is there: its parts put together, until its job or its part in it has ended."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable

from agent import clock
from agent.config import AgentConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.budget import is_own
from agent.core.model import Failure, NodeInfo
from agent.core.state import AgentFacts, AgentState
from agent.diagnose.health import Health
from agent.errors import ConfigError
from agent.links.dialler import Peer
from agent.links.pool import LinkPool
from agent.links.queries import LiveRanks
from agent.links.snapshot_parts import SnapshotPart
from agent.observe import banner
from agent.observe.differences import Differences
from agent.observe.log import log
from agent.observe.outages import Outages
from agent.observe.stderr import standard_error
from agent.observe.waiting import Waiting
from agent.runtime import node_facts
from agent.runtime.agent_certificates import link_tls
from agent.runtime.final_report import FinalReport
from agent.runtime.job_client import BEATS_PER_LEASE, JobClient, first_watch
from agent.runtime.loop import Heartbeat, Inbox, end_with_any_thread, run_loop
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys
from agent.workers.environment import ENDPOINTS
from agent.workers.launch_plan import plan_launch, plan_standbys
from agent.workers.log_archive import LogArchive
from agent.workers.master_ports import PortHold
from agent.workers.worker_group import WorkerGroup
from trainer_runtime.contract import EXIT_RESTART

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""They ask an agent to leave, or to stop. Who starts the daemon puts them into its inbox."""
_LOOK_EVERY_S = 1.0


class Daemon:
    """All parts of an agent. `inbox` may hold events already; `page` is where its web page is, or empty."""

    def __init__(
        self, config: AgentConfig, environ: dict[str, str], store: EtcdStore, inbox: Inbox, page: str = ""
    ) -> None:
        self._inbox = inbox
        end_with_any_thread(inbox)
        self._config = config
        self._environ = environ
        self._page = page
        self._heartbeat = Heartbeat(config.timing.lease_ttl_s / BEATS_PER_LEASE)
        self._health = Health(config.health, environ, self._inbox.put)
        self._tls = link_tls(config.tls)
        self._links = LinkPool(
            on_change=lambda *change: self._inbox.put(ev.LinkChanged(*change)),
            on_clock=lambda *compared: self._inbox.put(ev.ClockCompared(*compared)),
            on_part=self._on_part,
            log_files=LogArchive(config.workers.log_dir, config.job.job_id),
            live_ranks=self._pulse,
            is_loop_alive=self._heartbeat.is_alive,
            heartbeat_s=config.timing.link_heartbeat_s,
            tls=self._tls,
        )
        self._workers = WorkerGroup(
            self._inbox.put,
            config.hang,
            plan_standbys(config, environ),
            self._links.send_part,
            self._links.when_delivered,
        )
        self._farewell = FinalReport(store, JobKeys(config.job.job_id), self._is_on_console)
        self._is_leaving = False
        self._has_started = False
        self._has_told_of_endpoints = False
        self._port = PortHold()
        self._client = JobClient(
            config, store, inbox, self._heartbeat, node_facts.is_agent_alive, self._farewell.before_leaving
        )

    def run(self) -> int:
        """Return the exit code."""
        try:
            self._inbox.put(ev.PortReserved(self._port.renew()))
            state = initial_state(self._config, self._links.port, self._page, self._tls.fingerprint)
            self._examine_node()
            self._client.start()
            ended = run_loop(state, self._inbox, self._heartbeat, self._act, self._observer())
        finally:
            self._close()
            for number in SIGNALS:  # it has ended as it was asked to: a late signal must not change its exit code
                signal.signal(number, signal.SIG_IGN)
        if ended.code == 0:
            log.info(ended.sentence)
        else:
            log.error(ended.sentence, exit_code=ended.code)
            self._farewell.tell()
        return ended.code

    def _observer(self) -> Callable[[AgentState, float], None]:
        """What the loop calls after each turn."""
        outages = Outages(lambda: self._client.outage, lambda what, why: log.warning(what, reason=why))
        watch = observer(self._config)

        def look(state: AgentState, now: float) -> None:
            watch(state, now)
            outages.look(state, now)

        return look

    def _examine_node(self) -> None:
        """Before it joins: one that is not fit must not be taken for one that is. An order to leave comes first."""
        self._health.start()
        seen: list[ev.Event | fx.Exit] = []
        while not any(isinstance(event, ev.HealthChecked | ev.StopAsked | fx.Exit) for event in seen):
            seen.append(self._inbox.get(_LOOK_EVERY_S))
        for event in seen:
            if not isinstance(event, ev.Ticked):
                self._inbox.put(event)

    def _close(self) -> None:
        self._health.close()
        self._workers.close()
        self._client.close()
        self._port.close()
        self._links.close(goodbye=self._is_leaving)  # else the neighbours are to notice at once

    # Events from other threads

    def _pulse(self) -> LiveRanks:
        group, ranks = self._workers.pulse()
        until = self._client.keeper.fresh_until()
        return LiveRanks(
            group=group,
            ranks=ranks,
            is_alive=self._heartbeat.is_alive(),
            lease_left_s=None if until is None else until - clock.now(),
            etcd_s=self._client.keeper.latency_s(),
        )

    def _on_part(self, part: SnapshotPart) -> None:
        self._workers.snapshots.keep(part)

    # Effects

    def _act(self, effect: fx.Effect) -> None:  # noqa: C901, PLR0912 - one a kind of effect
        match effect:
            case fx.Announce(sentence):
                log.info(sentence)
            case fx.WatchKeys():
                self._client.follow(effect)
            case fx.HoldLinks(me, secret, peers):
                self._links.hold(
                    secret, me, tuple(Peer(each.identity, each.address, each.link, each.link_cert) for each in peers)
                )
            case fx.StartWorkers():
                self._start_workers(effect)
            case fx.SendRestorePoint(resume):
                self._workers.tell_resume(resume)
            case fx.RequestHandoff(group, number, in_memory):
                self._workers.tell_handoff(group, number, in_memory=in_memory)
            case fx.AnswerPublish(group, copy, checkpoint, reason):
                self._workers.tell_verdict(group, copy, checkpoint, reason)
            case fx.SetHangThreshold(after_s):
                self._workers.look_out(after_s)
            case fx.TerminateWorkers(group):
                self._workers.terminate(group)
            case fx.KillWorkers(group):
                self._workers.kill(group)
            case fx.Exit():
                raise AssertionError(effect)
            case _:
                self._is_leaving |= isinstance(effect, fx.Deregister)
                self._client.do(effect)
                if isinstance(effect, fx.WriteExitReport) and _is_nodes_own(effect.report.failure):
                    self._health.look()  # beside the recovery

    def _is_on_console(self, node_id: str, failure: Failure) -> bool:
        """Whether what this worker wrote to standard error was shown here already."""
        is_ours = node_id == self._config.node.node_id and not failure.hang
        return is_ours and self._workers.has_shown_errors(failure)

    def _start_workers(self, start: fx.StartWorkers) -> None:
        launch = plan_launch(start, self._config, self._environ)
        self._workers.start(launch)
        if not self._has_started:
            self._has_started = True
            if self._config.given:
                standard_error().write(banner.first_process([command.env for command in launch.commands]))
            log.info("its output is also kept", directory=str(launch.commands[0].log_path.parent))
        if ENDPOINTS not in launch.commands[0].env and not self._has_told_of_endpoints:
            self._has_told_of_endpoints = True
            log.warning(f"there are too many ranks for {ENDPOINTS}: it is left out", ranks=start.group.world_size)
        if start.node_rank == 0:  # this group's master has our port: hold another for the next
            self._inbox.put(ev.PortReserved(self._port.renew()))


def _is_nodes_own(failure: Failure | None) -> bool:
    """Whether the node may be to blame for it."""
    return failure is not None and is_own(failure) and failure.exit_code != EXIT_RESTART


def initial_state(config: AgentConfig, link: int, page: str, link_cert: str = "") -> AgentState:
    """The state that an agent begins with.

    Args:
        config: of the agent.
        link: the port on which its neighbours reach it.
        page: where its web page is; empty: it has none.
        link_cert: fingerprint of the certificate that it shows its neighbours; empty: it has none.

    Raises:
        ConfigError: this process cannot be found under /proc.
    """
    return AgentState(_me(config, link, page, link_cert), config.policy, watched=first_watch(config))


def observer(config: AgentConfig) -> Callable[[AgentState, float], None]:
    """Return what the loop calls after each turn: it logs whom the agent waits for, and how nodes differ."""
    waiting = Waiting(config.ensemble.node_ids if config.ensemble else (), log.info)
    differences = Differences(log.warning)

    def look(state: AgentState, now: float) -> None:
        waiting.look(state, now)
        differences.look(state)

    return look


def _me(config: AgentConfig, link: int, page: str, link_cert: str) -> AgentFacts:
    pid_started = node_facts.started_at(os.getpid())
    if pid_started is None:
        raise ConfigError("this process cannot be found under /proc: mount it, the agent watches its workers there")
    return AgentFacts(
        job_id=config.job.job_id,
        node_id=config.node.node_id,
        is_node_id_chosen=config.node.is_node_id_chosen,
        incarnation=secrets.token_hex(6),
        address=config.node.address,
        nproc=config.node.nproc,
        link=link,
        link_cert=link_cert,
        host=node_facts.host_identity(),
        pid=os.getpid(),
        pid_started=pid_started,
        run=secrets.token_hex(6),
        secret=secrets.token_hex(16),
        np_min=config.job.np_min,
        np_max=config.job.np_max,
        fresh=config.job.fresh,
        started_at=time.time(),
        started_now=clock.now(),
        timing=config.timing.effective,
        position=config.node.position,
        about=NodeInfo(
            page=page,
            page_has_own_token=config.http is not None and config.http.token is not None,
            facts=config.facts,
        ),
    )
