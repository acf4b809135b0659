"""Real cores on a simulated etcd, network and clock: one seed, faults at any moment.

What runs is the agents' own code: `lifecycle.step`, `JobStore` and the codec. Simulated are time, the order in which
things happen, etcd (`etcd.py`), what agents see of it (`mirror.py`), the links between them (`network.py`), their
shells (`agent.py`), the workers with their copies and files (`ranks.py`, `training.py`, `files.py`). What must always
hold is in `invariants.py`, and checked at every write and after every step.

A failing run prints its seed: the same seed does the same thing again.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable

import msgspec
from simulation.agent import Agent
from simulation.etcd import ETCD, KEYS, LOOK_S, Etcd
from simulation.invariants import Invariants
from simulation.network import Network
from simulation.training import Training
from simulation.transcript import Transcript

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import Group, Result, Spec, Timing
from agent.core.policy import Policy
from agent.core.reasons import Doing, Requested
from agent.core.saved_states import Checkpoint, RestorePoint
from agent.core.state import AgentFacts
from agent.store.api import ChangeBatch, Compare, Put
from agent.store.keys import encode

POLICY = Policy(
    lease_ttl_s=4.0,
    settle_s=1.0,
    stop_grace_s=2.0,
    kill_timeout_s=10.0,
    handoff_timeout_s=8.0,
    handoff_wait_s=1.0,
    max_restarts=1000,
    progress_window_s=60.0,
    elastic_timeout_s=None,
)

_HANG_LIMIT_S = 6.0


class Cluster:
    """A job's agents, its store, and whatever befalls them."""

    def __init__(self, seed: int, *, np: tuple[int, int], loss: float = 0.0, policy: Policy = POLICY) -> None:
        self.seed = seed
        self.loss = loss
        """Share of writes whose answer is lost."""
        self.drop = 0.0
        """Share of what is watched that breaks the watch, or is shown twice."""
        self.latency_s = 0.02
        self.random = random.Random(seed)
        self.np = np
        self.policy = policy
        self.now = 1000.0
        self.agents: list[Agent] = []
        """All that have not been killed."""
        self.dead: list[Agent] = []
        self.by_serial: dict[int, Agent] = {}
        self.has_jumped = False
        """An agent's clock has jumped."""
        self.is_stopped = False
        """The operator asked for it."""
        self.log: list[str] = []
        """For people: facts and sentences, with their times."""
        self.steps = 0
        """Things that happened."""
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = 0
        self.is_traced = False
        """Everything goes into the digest; else only what is told."""
        self._digest = hashlib.blake2b(digest_size=16)
        self.transcript = Transcript(self)
        self.etcd = Etcd(self)
        self.network = Network(self)
        self.training = Training(self)
        self.invariants = Invariants(self)

    # Time

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do something later."""
        self._serial += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._serial, action))

    def step(self) -> None:
        """The next thing happens."""
        at, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        self.steps += 1
        action()
        self.invariants.check()

    def run(self, seconds: float) -> None:
        """Let happen what falls due in so long."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.step()
        self.now = until

    def run_until(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        """Let things happen until this holds; it must, in time."""
        until = self.now + within_s
        while not condition():
            assert self._queue[0][0] <= until, f"not within {within_s:g} s\n{self.log_text()}"
            self.step()

    def _watch_leases(self) -> None:
        """Leases end by themselves."""
        if not self.etcd.is_frozen:
            self.etcd.tick()
        self.after(LOOK_S, self._watch_leases)

    # What happens to the cluster

    def start(
        self,
        name: str,
        *,
        fresh: bool = False,
        chosen: bool = True,
        host: str = "",
        nproc: int = 1,
        np: str = "",
        domain: str = "",
        ahead_s: float = 0.0,
    ) -> Agent:
        if not self.by_serial:
            self._watch_leases()
        serial = len(self.by_serial) + 1
        low, _, high = np.partition(":")
        me = AgentFacts(
            job_id="job",
            node_id=name,
            is_node_id_chosen=chosen,
            incarnation=f"i{serial}",
            address="10.0.0.1",
            nproc=nproc,
            link=serial,
            host=f"host-{host or name}",
            pid=serial,
            pid_started=serial,
            run=f"run{serial}",
            secret="secret",
            np_min=int(low) if np else self.np[0],
            np_max=int(high or low) if np else self.np[1],
            fresh=fresh,
            started_at=0.0,
            started_now=0.0,
            timing=Timing(detect_within_s=5.0, lease_ttl_s=4.0, link_heartbeat_s=0.5, settle_s=1.0),
            domain=domain,
        )
        agent = Agent(self, me, self.policy, ahead_s)
        self.agents.append(agent)
        self.by_serial[serial] = agent
        agent.post(ev.Ticked())
        agent.reserve_port()
        return agent

    def kill(self, agent: Agent, *, host: bool = False) -> None:
        """The agent is gone, and its workers; without a sign to others if its host is gone too."""
        if agent not in self.agents:
            return
        self.agents.remove(agent)
        self.dead.append(agent)
        agent.is_dead, agent.is_host_dead, agent.gone_at = True, host, self.now
        self.invariants.on_gone()
        agent.ranks.vanish()
        self.network.update()

    def fail_worker(self, agent: Agent, *, peer_lost: bool = False) -> None:
        agent.ranks.fail(peer_lost=peer_lost)

    def hang(self, agent: Agent, local_rank: int, doing: Doing = "sleeps") -> None:
        """This rank makes no step any more. If nobody looks for that yet, they do from now on."""
        if local_rank in agent.ranks.living:
            agent.ranks.idle[local_rank] = doing
        if not self.training.hang_limit_s:
            self.training.hang_limit_s = _HANG_LIMIT_S
            for each in self.agents:
                each.ranks.watch()

    def ask_to_stop(self, agent: Agent, signal: int = 15) -> None:
        agent.is_asked_to_stop = True
        agent.post(ev.StopAsked(signal))

    def freeze(self, seconds: float) -> None:
        """The store answers nobody for so long; then leases that nobody renewed are over."""
        self.etcd.freeze()
        self.run(seconds)
        self.etcd.thaw(is_new_leader=False)

    def can_talk(self, agent: Agent) -> bool:
        """Whether etcd answers this agent."""
        return not self.etcd.is_frozen and self.network.is_open_both(agent.serial, ETCD)

    def wipe(self) -> None:
        """The store is there again at once, but empty."""
        self.invariants.forget()
        self.etcd.wipe()
        self.transcript.forget()

    def restore_backup(self) -> None:
        """The store is there again at once, as it was when it was saved."""
        self.invariants.forget()
        self.etcd.restore()
        self.transcript.forget()
        self.invariants.result = self.etcd.record(KEYS.result, Result)

    def scale(self, np: tuple[int, int]) -> None:
        self._change_spec(np_min=np[0], np_max=np[1])
        self.np = np

    def pause_job(self, *, by: str) -> None:
        """Nothing changes by itself until it is resumed, by nobody."""
        self._change_spec(paused_by=by)

    def restart_job(self) -> None:
        """The operator wants the group replaced by another of the same members."""
        self._change_spec(restart_after=self.max_group)

    def note_unread(self, times: int) -> None:
        """So many groups in a row had ended of a checkpoint that nobody could read: a night of it in one line."""
        item, group = self.etcd.data.items[KEYS.group], self.group
        assert group is not None
        assert not self.agents, "who lives has seen another record"
        group = msgspec.structs.replace(group, failed_reads=times)
        self.etcd.data.items[KEYS.group] = msgspec.structs.replace(item, value=encode(group))
        self.invariants.groups[group.number] = group

    def exclude(self, *names: str) -> None:
        """The operator lets these nodes have no place in any next group, and all others one."""
        self._change_spec(excluded=names)

    def drain(self, agent: Agent) -> None:
        """The operator asks an agent to leave."""
        spec = self.spec
        if spec is not None:
            self._change_spec(drained=(*spec.drained, agent.state.identity))

    def stop_job(self) -> None:
        """The operator ends the job."""
        self.is_stopped = True
        self._change_spec(ending=Requested(what="stop", by="the operator"))

    def _change_spec(self, **fields: object) -> None:
        item, spec = self.etcd.data.items.get(KEYS.spec), self.spec
        if item is None or spec is None:
            return
        new = msgspec.structs.replace(spec, revision=spec.revision + 1, changed_by="the operator", **fields)
        self.etcd.transact([Compare(KEYS.spec, mod_revision=item.mod_revision)], [Put(KEYS.spec, encode(new))])

    def finish_workers(self) -> None:
        """Every worker of the current group ends well."""
        group = self.group
        for agent in self.agents:
            if group is not None and agent.running == group.number:
                self.finish_worker(agent)

    def finish_worker(self, agent: Agent) -> None:
        """This agent's workers end well."""
        agent.ranks.finish()

    # Looking at it

    def agent(self, name: str) -> Agent:
        """The youngest living agent of that name."""
        return next(agent for agent in reversed(self.agents) if agent.name == name)

    @property
    def group(self) -> Group | None:
        return self.etcd.record(KEYS.group, Group)

    @property
    def spec(self) -> Spec | None:
        return self.etcd.record(KEYS.spec, Spec)

    @property
    def restore_point(self) -> RestorePoint | None:
        return self.etcd.record(KEYS.restore_point, RestorePoint)

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.etcd.record(KEYS.checkpoint, Checkpoint)

    @property
    def max_group(self) -> int:
        return max(self.invariants.groups, default=0)

    @property
    def training_nodes(self) -> list[str]:
        """Nodes whose workers live in the current group, in rank order; none unless all members' do."""
        group = self.group
        if group is None:
            return []
        at_work = {agent.serial for agent in self.agents if agent.ranks.is_at_work(group.number)}
        if not all(member.link in at_work for member in group.members):
            return []
        return [member.node_id for member in group.members]

    @property
    def is_begun(self) -> bool:
        """Whether the current group's ranks train."""
        group = self.group
        return group is not None and self.training.is_begun(group)

    # Telling

    def on_write(self, batch: ChangeBatch, _writer: Agent | None) -> None:
        """Something has landed in etcd."""
        self.transcript.on_write(batch)
        self.invariants.on_write(batch)
        for agent in self.agents:
            agent.mirror.on_change()

    def trace(self, agent: Agent, event: ev.Event, effects: tuple[fx.Effect, ...]) -> None:
        """Note what an agent did, for the comparison of two runs."""
        if not self.is_traced:
            return
        did = ",".join(type(effect).__name__ for effect in effects)
        self._digest.update(f"{self.now:.9f} {agent.serial} {type(event).__name__} {did}\n".encode())

    @property
    def digest(self) -> str:
        """Of all that happened."""
        self._digest.update("\n".join(self.log).encode())
        return self._digest.hexdigest()

    def tell(self, line: str) -> None:
        """Note something for the reader of a failed test; it is compared with nothing."""
        self.log.append(f"{self.now - 1000.0:7.2f} {line}")

    def log_text(self) -> str:
        return "\n".join([*self.log, f"now {self.now - 1000.0:.2f}, group {self.group}"])
