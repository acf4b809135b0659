"""The runtime of a collective job: puts an agent's parts together, and carries out the effects of its core."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from agent import clock, node_facts
from agent.config import AgentConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.budget import is_own
from agent.core.failures import Failure
from agent.core.lifecycle import step, wake_at
from agent.core.model import LinkState, NodeInfo
from agent.core.records import Identity
from agent.core.state import AgentFacts, AgentState
from agent.diagnose.health import Health
from agent.errors import ConfigError
from agent.links.dialler import Peer
from agent.links.handshake import Credential
from agent.links.part_receiver import PartReceiver
from agent.links.part_sender import PartSender
from agent.links.pool import LinkPool
from agent.links.queries import LiveRanks
from agent.links.snapshot_parts import SnapshotPart
from agent.observe.incident_recorder import Recorder, note_answer, observe_turn, summarize
from agent.observe.log import configure, log
from agent.observe.messages import describe
from agent.observe.notices import NodeDifferences, SetUpNotice, WaitNotices
from agent.ports import PortHold
from agent.runtime.agent_certificates import link_tls
from agent.runtime.final_report import FinalReport
from agent.runtime.loop import Core, Inbox
from agent.runtime.runtime import JobRuntime
from agent.runtime.store_client import CollectiveClient, first_watch
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys
from agent.workers.environment import ENDPOINTS
from agent.workers.launch_plan import plan_launch, plan_standbys
from agent.workers.rank_logs import LogArchive
from agent.workers.replica_space import ReplicaSpace
from agent.workers.worker_group import WorkerGroup
from trainer_runtime.contract import EXIT_RESTART, NODE_ID

_LOOK_EVERY_S = 1.0


class CollectiveRuntime(JobRuntime[AgentState, ev.Event, fx.Effect]):
    """All parts of an agent in a collective job.

    Args:
        config: of the agent.
        environ: of its workers.
        store: the job's etcd.
        inbox: may hold events already.
        page: address of the agent's web page; empty: it has none.
    """

    _client: CollectiveClient

    def __init__(
        self, config: AgentConfig, environ: dict[str, str], store: EtcdStore, inbox: Inbox[ev.Event], page: str = ""
    ) -> None:
        super().__init__(config, inbox)
        self._environ = environ
        self._page = page
        self._health = Health(config.health, environ, self._inbox.put)
        self._tls = link_tls(config.tls)
        self._part_receiver = PartReceiver(lambda: self._workers.snapshots, self._tls)
        self._links = LinkPool(
            on_change=self._on_link_change,
            on_clock=lambda *compared: self._inbox.put(ev.ClockCompared(*compared)),
            on_part=self._on_part,
            log_files=LogArchive(config.workers.log_dir, config.job.job_id),
            live_ranks=self._live_ranks,
            is_loop_alive=self._heartbeat.is_alive,
            heartbeat_s=config.timing.link_heartbeat_s,
            tls=self._tls,
            part_port=self._part_receiver.port,
        )
        self._part_sender = PartSender(self._links.part_address, self._tls)
        self._workers = WorkerGroup(
            self._inbox.put,
            config.hang,
            plan_standbys(config, environ),
            self._links.send_part,
            self._part_sender,
            self._links.when_delivered,
            replica_space=ReplicaSpace(config.snapshots.memory_bytes),
        )
        self._named = config.node.node_id
        """What the log calls this node."""
        self._final_report = FinalReport(
            store, JobKeys(config.job.job_id), self._is_on_console, environ.get("TORCHELASTIC_ERROR_FILE", "")
        )
        self._is_leaving = False
        self._has_warned_of_endpoints = False
        self._port = PortHold()
        self._port_used_by = 0
        """Number of the last group whose master was to use our port."""
        self._client = CollectiveClient(
            config, store, inbox, self._heartbeat, node_facts.is_agent_alive, self._final_report.before_leaving
        )
        self._watch = observer(config)
        self._state: AgentState
        """After the last step of the core."""
        self._recorder = Recorder()
        self._answers: deque[tuple[ev.Outcome, int]] = deque()
        """How writes of incidents ended, until the next turn."""

    def _core(self) -> Core[AgentState, ev.Event, fx.Effect]:
        return Core(step, wake_at)

    def _begin(self) -> AgentState:
        self._inbox.put(ev.PortReserved(self._port.renew()))
        state = initial_state(self._config, self._links.port, self._page, self._tls.fingerprint)
        self._examine_node()
        self._client.start()
        return state

    def _examine_node(self) -> None:
        """Wait for the first health check: an unfit node must not join. An order to leave ends the wait."""
        self._health.start()
        seen: list[ev.Event | fx.Exit] = []
        while not any(isinstance(event, ev.HealthChecked | ev.StopAsked | fx.Exit) for event in seen):
            seen.append(self._inbox.get(_LOOK_EVERY_S))
        for event in seen:
            if not isinstance(event, ev.Ticked):
                self._inbox.put(event)

    def _look(self, state: AgentState, now: float) -> None:
        self._state = state
        self._record(now)
        self._watch(state, now)
        self._outages.update(state, now)

    def _record(self, now: float) -> None:
        """Log what is announced, and write the incidents that are due."""
        while self._answers:
            self._recorder = note_answer(self._recorder, *self._answers.popleft(), now)
        if self._state.node_id != self._named:  # a number was added, since another agent here has the name
            self._named = self._state.node_id
            configure(self._named)
        self._recorder, sentences, write = observe_turn(self._recorder, self._state, now)
        for sentence in sentences:
            log.info(sentence)
        if write is not None:
            self._client.record(write, self._on_recorded)

    def _close(self) -> None:
        self._health.close()
        self._workers.close()
        self._client.close()
        self._port.close()
        self._links.close(goodbye=self._is_leaving)  # without a goodbye the neighbours are to notice at once
        self._part_sender.close()
        self._part_receiver.close()

    def _report_end(self, ended: fx.Exit) -> None:
        super()._report_end(ended)
        if ended.code:
            self._final_report.print()

    # Events from other threads

    def _live_ranks(self) -> LiveRanks:
        group, ranks = self._workers.live_ranks()
        until = self._client.keeper.fresh_until()
        return LiveRanks(
            group=group,
            ranks=ranks,
            is_alive=self._heartbeat.is_alive(),
            lease_left_s=None if until is None else until - clock.now(),
            etcd_s=self._client.keeper.latency_s(),
        )

    def _on_recorded(self, outcome: ev.Outcome, revision: int) -> None:
        self._answers.append((outcome, revision))
        self._inbox.put(ev.Ticked())

    def _on_link_change(self, who: Identity, state: LinkState, why: str) -> None:
        self._inbox.put(ev.LinkChanged(who, state, why))
        self._part_sender.wake()

    def _on_part(self, part: SnapshotPart) -> None:
        self._workers.snapshots.store_replica(part)

    # Effects

    def _act(self, effect: fx.Effect) -> None:  # noqa: C901, PLR0912 - one a kind of effect
        match effect:
            case fx.WatchKeys():
                self._client.follow(effect)
            case fx.HoldLinks(me, secret, peers):
                self._part_receiver.answer_as(Credential(secret.encode(), me))
                self._links.hold(
                    secret, me, tuple(Peer(each.identity, each.address, each.link, each.link_cert) for each in peers)
                )
            case fx.StartWorkers():
                self._start_workers(effect)
            case fx.SetUpWorkers():
                self._workers.start(plan_launch(effect, self._config, self._environ), is_waiting=True)
            case fx.MoveWorkers(from_group):
                launch = plan_launch(effect, self._config, self._environ)
                self._workers.move(from_group, launch, is_planned=effect.is_planned)
                self._renew_port(effect)
            case fx.SendRestorePoint(restore_point):
                self._workers.send_restore_point(restore_point)
            case fx.RequestHandoff(group, number, in_memory):
                self._workers.request_handoff(group, number, in_memory=in_memory)
            case fx.AnswerPublish(group, copy, checkpoint, reason):
                why = describe(reason) if reason is not None else ""
                self._workers.send_publish_answer(group, copy, checkpoint, why)
                is_saved = reason is not None and (reason.why, reason.group, reason.step, reason.save) == (
                    "committed",
                    copy.group,
                    copy.step,
                    copy.save,
                )
                self._workers.saver.answer(copy, checkpoint, why, is_saved=is_saved)
            case fx.SaveSnapshot():
                self._save_snapshot(effect)
            case fx.SetHangThreshold(after_s):
                self._workers.set_hang_threshold(after_s)
            case fx.TerminateWorkers(group):
                self._workers.terminate(group)
            case fx.KillWorkers(group):
                self._workers.kill(group)
            case fx.Exit():
                raise AssertionError(effect)
            case fx.WriteResult(result):
                self._client.do(replace(effect, result=summarize(self._recorder, self._state, result)))
            case _:
                self._is_leaving |= isinstance(effect, fx.Deregister)
                self._client.do(effect)
                if (
                    isinstance(effect, fx.WriteStatus)
                    and effect.status.exit
                    and _is_nodes_own(effect.status.exit.failure)
                ):
                    self._health.check_again()  # beside the recovery

    def _save_snapshot(self, order: fx.SaveSnapshot) -> None:
        step = order.copy.step
        advice = "; another signal gives it up" if self._state.leaving is not None else ""
        log.info(f"the ranks did not save: saving step {step} from memory, which takes some seconds{advice}")
        self._workers.saver.begin(order, {**self._environ, NODE_ID: self._state.node_id})

    def _is_on_console(self, node_id: str, failure: Failure) -> bool:
        """Whether this console has already shown what the worker wrote to standard error."""
        is_ours = node_id == self._config.node.node_id and not failure.hang
        return is_ours and self._workers.has_shown_errors(failure)

    def _start_workers(self, start: fx.StartWorkers) -> None:
        launch = plan_launch(start, self._config, self._environ)
        self._workers.start(launch)
        self._report_first_start([command.env for command in launch.commands], launch.commands[0].log_path.parent)
        if ENDPOINTS not in launch.commands[0].env and not self._has_warned_of_endpoints:
            self._has_warned_of_endpoints = True
            log.warning(f"there are too many ranks for {ENDPOINTS}: it is left out", ranks=start.group.world_size)
        self._renew_port(start)

    def _renew_port(self, start: fx.StartWorkers | fx.MoveWorkers) -> None:
        """Reserve another port for the next group, once, if the master of this group uses ours."""
        if start.node_rank == 0 and start.group.number > self._port_used_by:
            self._port_used_by = start.group.number
            self._inbox.put(ev.PortReserved(self._port.renew()))


def _is_nodes_own(failure: Failure | None) -> bool:
    """Whether the node may be the cause of a failure."""
    return failure is not None and is_own(failure) and failure.exit_code != EXIT_RESTART


def initial_state(config: AgentConfig, link: int, page: str, link_cert: str = "") -> AgentState:
    """Return the first state of an agent.

    Args:
        config: of the agent.
        link: port at which its neighbours reach it.
        page: address of its web page; empty: it has none.
        link_cert: fingerprint of the certificate that it presents to its neighbours; empty: it has none.

    Raises:
        ConfigError: this process cannot be found under /proc.
    """
    return AgentState(_me(config, link, page, link_cert), config.policy, watched=first_watch(config))


def observer(config: AgentConfig) -> Callable[[AgentState, float], None]:
    """Return a function to call after each turn of the loop: it logs what the agent waits for, and how nodes differ."""
    waiting = WaitNotices(config.ensemble.node_ids if config.ensemble else (), log.info)
    differences = NodeDifferences(log.warning)
    set_up = SetUpNotice(log.warning)

    def look(state: AgentState, now: float) -> None:
        waiting.update(state, now)
        differences.update(state)
        set_up.update(state)

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
        domain=config.node.domain,
        about=NodeInfo(
            page=page,
            page_has_own_token=config.http is not None and config.http.token is not None,
            facts=config.facts,
        ),
    )
