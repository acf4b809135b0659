"""One simulated agent: the real core and the real `JobWriter`, in a shell that lives in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import msgspec
from simulation.etcd import KEYS, Client
from simulation.files import LastSaver
from simulation.mirror import Mirror
from simulation.ranks import Ranks

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.incident import IncidentWrite
from agent.core.lifecycle import step, wake_at
from agent.core.model import Node
from agent.core.policy import Policy
from agent.core.saved_states import Replica, StateId
from agent.core.state import AgentFacts, AgentState
from agent.core.view import ClusterView
from agent.errors import StoreUnavailable
from agent.observe.incident_recorder import Recorder, note_answer, observe_turn, summarize
from agent.observe.messages import describe_exit
from agent.store.api import Lease
from agent.store.job_writer import JobWriter

if TYPE_CHECKING:
    from simulation.cluster import Cluster

_USAGE = 2
"""The code with which an agent ends whose node id another has."""
PARTS = ("inventory", "quiesced", "transition", "stall", "exit")
"""Of a member's status."""
_LOOP_S = 0.6
"""How often the loop of an agent turns at least."""
_BUFFERS = 2
"""Copies of a group that a node holds in memory."""
_SAFE_COPIES = 3
"""After so many copies of a group, the one that it began from is not held any more."""


def _nothing() -> None:
    """No hook."""


class Keeper:
    """Renews the agent's lease, and tells until when it surely lives."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.lease: Lease | None = None
        self._fresh_until: float | None = None

    def hold(self, lease: Lease, sent_at: float) -> None:
        self.lease, self._fresh_until = lease, sent_at + lease.ttl_s
        self._agent.post(ev.LeaseRenewed(self._fresh_until))
        self._renew_in(lease.ttl_s / 4)

    def drop(self) -> None:
        self.lease = self._fresh_until = None

    def has_run_out(self) -> bool:
        return self._fresh_until is not None and self._agent.clock() >= self._fresh_until

    def _renew_in(self, delay_s: float) -> None:
        lease = self.lease
        assert lease is not None
        self._agent.later(delay_s, lambda: self._renew(lease))

    def _renew(self, lease: Lease) -> None:
        if lease is not self.lease:
            return
        agent, chance = self._agent, self._agent.cluster.random
        sent_at = agent.clock()
        try:
            ttl_s = agent.client.refresh(lease.lease_id)
        except StoreUnavailable:
            self._renew_in(chance.uniform(0.25, 1.0))
            return
        if ttl_s > 0.0:
            self._fresh_until = sent_at + ttl_s
            agent.post(ev.LeaseRenewed(sent_at + ttl_s), chance.uniform(0.0, 0.3))
            self._renew_in(ttl_s / 4)
        else:
            self.drop()
            agent.mirror.refresh()


class Agent:
    """A node's agent, what belongs to its process, and its workers."""

    def __init__(self, cluster: Cluster, me: AgentFacts, policy: Policy, ahead_s: float) -> None:
        self.cluster = cluster
        self.serial = me.link
        self.offset = cluster.random.uniform(0.0, 1000.0)
        """Of its monotonic clock."""
        self.ahead_s = ahead_s
        """Of its wall clock."""
        self.state = AgentState(replace(me, started_at=self.wall(), started_now=self.clock()), policy)
        self.client = Client(cluster)
        self.client.agent = self
        self.mirror = Mirror(self)
        self.keeper = Keeper(self)
        self.job = JobWriter(
            self.client,
            KEYS,
            self.keeper,  # type: ignore[arg-type] - the simulated one
            lease_ttl_s=policy.lease_ttl_s,
            followed=self.mirror,
            is_process_alive=self._is_process_alive,
            now=self.clock,
        )
        self.ranks = Ranks(self)
        self.saver = LastSaver(self)
        self.memory: dict[StateId, Replica] = {}
        self._taken = (0, 0)
        """The last group that took copies, and how many."""
        """Copies in the order of their making."""
        self.is_dead = False
        self.is_host_dead = False
        """Nobody says that it is gone."""
        self.is_asked_to_stop = False
        """By a signal, of which it may not be notified yet."""
        self.is_paused = False
        self.is_host_paused = False
        """Its workers too."""
        self.dies_at_call: Literal["before", "after"] | None = None
        self.hooks: dict[str, Callable[[], None]] = {}
        """What happens as soon as such an effect has been given out."""
        self.lost: dict[str, str] = {}
        """Effects whose answer does not come, and what becomes of them."""
        self.exit: fx.Exit | None = None
        self.gone_at: float | None = None
        self._waiting: list[Callable[[], None]] = []
        self._inbox: list[ev.Event] = []
        self._arrives_at = 0.0
        self._alarm: float | None = None
        self._is_writing = False
        self.recorder = Recorder()
        self._is_recording = False
        self._ports = 0
        self.decided_from: ClusterView | None = None
        """What the last write rests on."""

    @property
    def name(self) -> str:
        return self.state.node_id

    @property
    def is_gone(self) -> bool:
        return self.is_dead or self.exit is not None

    @property
    def starts(self) -> int:
        """How often workers were started."""
        return self.ranks.starts

    @property
    def running(self) -> int:
        """Workers of this group live; 0: none."""
        return self.ranks.number

    def clock(self) -> float:
        return self.cluster.now + self.offset

    def wall(self) -> float:
        """Seconds since 1970, as its node has it."""
        return self.cluster.now + self.ahead_s

    def reserve_port(self) -> None:
        self._ports += 1
        reserved = ev.PortReserved(self._ports)
        self.later(self.cluster.random.uniform(0.0, 0.1), lambda: self.put(reserved))

    # Time

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Something in this process happens later: never, if it is dead by then; when it wakes, if it sleeps."""
        self.cluster.after(delay_s, lambda: self._happen(action))

    def _happen(self, action: Callable[[], None]) -> None:
        if self.is_gone:
            return
        if self.is_paused:
            self._waiting.append(action)
        else:
            action()

    def pause(self, *, host: bool = False) -> None:
        self.is_paused = True
        self.is_host_paused = host
        self.cluster.network.update()

    def wake(self) -> None:
        """What fell due meanwhile happens now."""
        self.is_paused = self.is_host_paused = False
        self.cluster.network.update()
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self.cluster.after(self.cluster.random.uniform(0.0, 0.01), lambda action=action: self._happen(action))
        self.ranks.wake()

    def jump(self, seconds: float) -> None:
        """The clock jumps forward."""
        self.offset += seconds
        self.ahead_s += seconds
        self.cluster.has_jumped = True
        self._happen(lambda: self.put(ev.Ticked()))

    # Events

    def post(self, event: ev.Event, delay_s: float = 0.0) -> None:
        """Put an event into the inbox, after those before it: they are taken in that order, also after a sleep."""
        self._arrives_at = max(self._arrives_at, self.cluster.now + delay_s + self.cluster.random.uniform(0.0, 0.003))
        self._inbox.append(event)
        self.later(self._arrives_at - self.cluster.now, lambda: self.put(self._inbox.pop(0)))

    def put(self, event: ev.Event) -> None:
        """One turn of the loop."""
        if self.is_gone:
            return
        was_leaving, had_id = self.state.leaving is not None, self.state.holder is None
        try:
            self.state, effects = step(self.state, event, self.clock())
        except ArithmeticError as error:  # of numbers that grow as long as a job lasts
            raise AssertionError(f"{self.name} dies of {error!r}") from error
        self._record()
        self.cluster.trace(self, event, effects)
        self.cluster.transcript.on_turn(self)
        if self.state.leaving is not None and self.state.leaving.code == _USAGE and not was_leaving:
            self.cluster.invariants.on_refused(self)
        if had_id and self.state.holder is not None:
            self.cluster.invariants.on_gone()
        for effect in effects:
            self._act(effect)
            for name in self._names(effect):
                self.hooks.pop(name, _nothing)()
        self._set_alarm()

    def _set_alarm(self) -> None:
        now = self.clock()
        due = wake_at(self.state, now)
        if due == self._alarm:
            return
        self._alarm = due
        if due is not None:
            self.later(max(0.0, due - now) + 1e-6, lambda: self._ring(due))

    def _ring(self, due: float) -> None:
        if due == self._alarm:
            self._alarm = None
            self.put(ev.Ticked())

    # Effects

    def _names(self, effect: fx.Effect) -> list[str]:
        """By which scenarios name it: its class, and of a status also each part that is new."""
        names = [type(effect).__name__]
        if isinstance(effect, fx.WriteStatus):
            status = effect.status
            before = self.state.status.of(status.group, status.identity)
            names += [f"{names[0]}.{part}" for part in PARTS if getattr(status, part) != getattr(before, part)]
        return names

    def _act(self, effect: fx.Effect) -> None:  # noqa: C901 - one a kind of effect
        self.cluster.transcript.on_act(self, effect)
        match effect:
            case fx.WatchKeys():
                self.mirror.follow(effect)
            case fx.HoldLinks():
                self.cluster.network.hold(self, effect)
            case fx.StartWorkers(node_rank=node_rank) | fx.MoveWorkers(node_rank=node_rank):
                self.ranks.act(effect)
                if node_rank == 0:  # the port is this group's now
                    self.reserve_port()
            case fx.SetUpWorkers():
                self.ranks.act(effect)
            case fx.SaveSnapshot():
                self.saver.act(effect)
            case fx.AnswerPublish():
                self.saver.on_verdict(effect)
                self.ranks.act(effect)
            case fx.SendRestorePoint() | fx.RequestHandoff() | fx.TerminateWorkers() | fx.KillWorkers():
                self.ranks.act(effect)
            case fx.SetHangThreshold():
                pass  # see watcher.py
            case fx.Exit():
                self.cluster.invariants.on_exit(self)
                self.exit, self.gone_at = effect, self.cluster.now
                self.cluster.invariants.on_gone()
                self.cluster.tell(f"{self.name}: {describe_exit(effect)}")
                self.cluster.network.update()
            case fx.WriteResult(result):
                self._do(replace(effect, result=summarize(self.recorder, self.state, result)))
            case _:
                self._do(effect)

    def _do(self, effect: fx.StoreEffect) -> None:
        assert not self._is_writing, f"{self.name} has two writes under way"
        self._is_writing = True
        self.decided_from = self.state.view
        if isinstance(effect, fx.Evict):
            until = self.state.lease_until
            assert until is not None and self.clock() < until, f"{self.name} may be given up, and evicts"  # noqa: PT018
        self.later(self.cluster.random.uniform(0.0, self.cluster.latency_s), lambda: self._run(effect))

    def lose(self, effect: str, how: str) -> None:
        """The answer to the next effect of this kind is lost."""
        self.lost[effect] = how

    def _run(self, effect: fx.StoreEffect) -> None:
        fates = [self.lost.pop(name, None) for name in self._names(effect)]
        self.client.fate = next((fate for fate in fates if fate is not None), None)
        answer = self.job.run(effect)
        slow = 1.0 if answer.outcome is ev.Outcome.UNKNOWN else self.cluster.latency_s
        self.later(self.cluster.random.uniform(0.0, slow), lambda: self._answer(answer))

    def _answer(self, answer: ev.WriteAnswered) -> None:
        self._is_writing = False
        self.cluster.transcript.on_answer(self, is_known=answer.outcome is not ev.Outcome.UNKNOWN)
        self.post(answer)

    def _is_process_alive(self, node: Node) -> bool | None:
        """Pids can be looked at within one host; each simulated node id is a host of its own."""
        if node.host != self.state.me.host:
            return None
        return any(each.state.me.pid == node.pid and not each.is_gone for each in self.cluster.agents)

    # Incidents

    def _record(self) -> None:
        """Announce what is new, and write the incidents that are due, beside the writes of the core."""
        self.recorder, sentences, write = observe_turn(self.recorder, self.state, self.clock())
        for sentence in sentences:
            self.cluster.tell(f"{self.name}: {sentence}")
        if write is None:
            return
        assert not self._is_recording, f"{self.name} has two writes of incidents under way"
        self._is_recording = True
        self.later(self.cluster.random.uniform(0.0, self.cluster.latency_s), lambda: self._run_record(write))
        self.hooks.pop("WriteIncident", _nothing)()

    def _run_record(self, write: IncidentWrite) -> None:
        self.client.fate = self.lost.pop("WriteIncident", None)
        outcome, revision = self.job.write_incidents(write)
        slow = 1.0 if outcome is ev.Outcome.UNKNOWN else self.cluster.latency_s
        self.later(self.cluster.random.uniform(0.0, slow), lambda: self._note_recorded(outcome, revision))

    def _note_recorded(self, outcome: ev.Outcome, revision: int) -> None:
        self._is_recording = False
        self.recorder = note_answer(self.recorder, outcome, revision, self.clock())
        self._record()
        if outcome is ev.Outcome.UNKNOWN:  # the loop of a real agent turns more often
            self.later(_LOOP_S, self._record)

    # Copies in memory

    def hold_copy(self, held: Replica) -> None:
        number, point = held.copy.group, self.ranks.restore_point
        self.memory.pop(held.copy, None)
        self.memory[held.copy] = held
        self._taken = (number, self._taken[1] + 1 if self._taken[0] == number else 1)
        kept = {*[copy for copy in self.memory if copy.group == number][-_BUFFERS:]}
        if self._taken[1] < _SAFE_COPIES and point is not None and point.copy is not None:
            kept.add(point.copy)
        self.memory = {copy: each for copy, each in self.memory.items() if copy in kept}

    def add_parts(self, copy: StateId, ranks: Iterable[int]) -> None:
        """Neighbours' parts of a copy that is held here; if it still is."""
        held = self.memory.get(copy)
        if held is not None:
            self.memory[copy] = msgspec.structs.replace(held, parts=tuple(sorted({*held.parts, *ranks})))
