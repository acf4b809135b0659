"""Real cores on a store in memory: one clock, one seed, faults at any moment.

What runs is the agents' own code: `lifecycle.step`, `JobStore` and the codec. Simulated are time, the order in
which things happen, the workers, and the lease keeper. After every step the invariants are checked:

1. one group per number, and numbers only grow;
2. no worker of a group starts on a node where one of another group lives;
3. at most one agent believes that it leads, as far as etcd can see.

A failing run prints its seed: `Cluster(seed)` does the same thing again.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from agent.core import events as ev
from agent.core.lifecycle import step, wake_at
from agent.core.model import Group, Node, Policy, Spec, Timing
from agent.core.state import AgentState, Me
from agent.errors import StoreUnavailable
from agent.store.api import Compare, Delete, Lease, Put, Snapshot, TransactionResult
from agent.store.job import JobStore
from agent.store.keys import JobKeys, encode, view_of
from agent.store.memory import MemoryStore

POLICY = Policy(
    lease_ttl_s=4.0, settle_s=1.0, stop_grace_s=2.0, kill_timeout_s=10.0, max_restarts=1000, elastic_timeout_s=None
)
KEYS = JobKeys("job")


class Keeper:
    """The lease that an agent holds; renewed by the cluster for as long as the agent lives."""

    def __init__(self) -> None:
        self.lease: Lease | None = None

    def hold(self, lease: Lease) -> None:
        self.lease = lease

    def drop(self) -> None:
        self.lease = None


class LossyStore(MemoryStore):
    """Some answers to writes get lost: the write landed, did not land, or lands later."""

    @classmethod
    def of(cls, backing: MemoryStore, cluster: Cluster) -> LossyStore:
        lossy = cls()
        client = backing.client()
        lossy._data, lossy._connection = client._data, client._connection
        lossy.cluster = cluster  # type: ignore[attr-defined]
        return lossy

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        chance: random.Random = self.cluster.random  # type: ignore[attr-defined]
        if chance.random() >= self.cluster.loss:  # type: ignore[attr-defined]
            return super().transact(compares, writes)
        match chance.choice(["landed", "lost", "later"]):
            case "landed":
                super().transact(compares, writes)
            case "later":
                land = functools.partial(super().transact, compares, writes)
                self.cluster.late.append((self.cluster.now + chance.uniform(0, 3), land))  # type: ignore[attr-defined]
        raise StoreUnavailable("the answer was lost")


@dataclass
class Agent:
    """One simulated agent with its workers."""

    state: AgentState
    store: MemoryStore
    job: JobStore
    keeper: Keeper
    effects: list[ev.StoreEffect] = field(default_factory=list)
    starts: int = 0
    """How often workers were started."""
    running: int = 0
    """Workers of this group live; 0: none."""
    exited: set[int] = field(default_factory=set)
    is_stopping: bool = False
    copy: Snapshot | None = None
    """What the mirror last delivered; None: everything is to be read again."""
    is_paused: bool = False
    exit: ev.Exit | None = None
    said: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.state.node_id

    def forget_copy(self) -> None:
        self.copy = None


class Cluster:
    """A job's agents, its store, and whatever befalls them."""

    def __init__(self, seed: int, *, np: tuple[int, int], loss: float = 0.0) -> None:
        self.loss = loss
        """Share of writes whose answer is lost."""
        self.late: list[tuple[float, Callable[[], object]]] = []
        self.random = random.Random(seed)
        self.np = np
        self.now = 1000.0
        self.store = MemoryStore(clock=lambda: self.now)
        self.agents: list[Agent] = []
        self.dead: list[Agent] = []
        self.groups: dict[int, bytes] = {}
        self.is_backup = False
        """The store shows an old state until it is mended."""
        self.last_step = 0

    # What happens to the cluster

    def start(self, name: str, *, fresh: bool = False, chosen: bool = True) -> Agent:
        serial = len(self.agents) + len(self.dead)
        me = Me(
            job_id="job",
            node_id=name,
            is_node_id_chosen=chosen,
            incarnation=f"i{serial}",
            address="10.0.0.1",
            nproc=1,
            link=serial + 1,
            host=f"host-{name}",
            pid=serial,
            pid_started=serial,
            run=f"run{serial}",
            secret="secret",
            np_min=self.np[0],
            np_max=self.np[1],
            fresh=fresh,
            started_at=0.0,
            timing=Timing(detect_within_s=5.0, lease_ttl_s=4.0, link_heartbeat_s=0.5, settle_s=1.0),
        )
        store, keeper = LossyStore.of(self.store, self), Keeper()
        job = JobStore(
            store,
            KEYS,
            keeper,  # type: ignore[arg-type] - the simulated one
            lease_ttl_s=POLICY.lease_ttl_s,
            refresh_view=lambda: agent.forget_copy(),  # noqa: PLW0108 - made below
            is_process_alive=self._is_process_alive,
        )
        agent = Agent(AgentState(me, POLICY, port=1), store, job, keeper)
        self.agents.append(agent)
        return agent

    def kill(self, agent: Agent) -> None:
        """The node is gone: its agent and its workers, without a word."""
        self.agents.remove(agent)
        self.dead.append(agent)

    def fail_worker(self, agent: Agent, *, peer_lost: bool = False) -> None:
        if agent.running and 0 not in agent.exited:
            tail = "Connection closed by peer" if peer_lost else "boom"
            self._exit_worker(agent, 1, tail)

    def ask_to_stop(self, agent: Agent) -> None:
        """SIGTERM."""
        self._feed(agent, ev.StopAsked(15))

    def freeze(self, seconds: float) -> None:
        """The store answers nobody for so long; then leases that nobody renewed are over."""
        for agent in self.agents:
            agent.store.disconnect()
        self.run(seconds)
        for agent in self.agents:
            agent.store.reconnect()

    def wipe(self) -> None:
        """The store is there again at once, but empty."""
        self.store.wipe()
        for agent in self.agents:
            agent.copy = None

    def scale(self, np: tuple[int, int]) -> None:
        spec = view_of(self.store.read(KEYS.whole()), KEYS, is_whole=True).spec
        if spec is None:
            return
        new = msgspec.structs.replace(spec.value, revision=spec.value.revision + 1, np_min=np[0], np_max=np[1])
        self.store.transact([Compare(KEYS.spec, mod_revision=spec.mod_revision)], [Put(KEYS.spec, encode(new))])
        self.np = np

    def finish_workers(self) -> None:
        """Every worker of the current group ends well."""
        group = self.group
        for agent in self.agents:
            if group is not None and agent.running == group.number:
                self.finish_worker(agent)

    def finish_worker(self, agent: Agent) -> None:
        """This agent's worker ends well."""
        if agent.running and 0 not in agent.exited:
            self._exit_worker(agent, 0, "")

    # Looking at it

    @property
    def group(self) -> Group | None:
        stored = view_of(self.store.read(KEYS.whole()), KEYS, is_whole=True).group
        return stored.value if stored is not None else None

    @property
    def spec(self) -> Spec | None:
        stored = view_of(self.store.read(KEYS.whole()), KEYS, is_whole=True).spec
        return stored.value if stored is not None else None

    @property
    def max_group(self) -> int:
        return max(self.groups)

    @property
    def training(self) -> list[str]:
        """Nodes whose workers live in the current group, in rank order; none unless all members' do."""
        group = self.group
        if group is None:
            return []
        running = {a.name for a in self.agents if a.running == group.number and not a.exited and not a.is_stopping}
        names = [member.node_id for member in group.members]
        return names if running == set(names) else []

    def _is_process_alive(self, node: Node) -> bool | None:
        """Pids can be looked at within one host; each simulated node id is a host."""
        return any(agent.state.me.pid == node.pid for agent in self.agents)

    # Time passes

    def run(self, seconds: float) -> None:
        """Let things happen in a random order for so long."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.random.uniform(0.0, 0.05)
            self._renew()
            self._land()
            for agent in self.random.sample(self.agents, len(self.agents)):
                if not agent.is_paused and agent.exit is None and self.random.random() < 0.5:
                    self._turn(agent)
            self.check()

    def run_until(self, condition: object, within_s: float = 60.0) -> None:
        until = self.now + within_s
        while not condition():  # type: ignore[operator]
            assert self.now < until, self.story()
            self.run(0.05)

    def _land(self) -> None:
        """Writes that were under way for long arrive now."""
        due = [land for at, land in self.late if at <= self.now]
        self.late = [(at, land) for at, land in self.late if at > self.now]
        for land in due:
            with contextlib.suppress(StoreUnavailable):
                land()

    def _renew(self) -> None:
        for agent in self.agents:
            if agent.keeper.lease is not None and not agent.is_paused and agent.exit is None:
                try:
                    agent.store.refresh(agent.keeper.lease.lease_id)
                except StoreUnavailable:
                    continue

    def _turn(self, agent: Agent) -> None:
        """One thing happens to an agent: an answer, a view, a stop of its workers, or nothing."""
        kind = self.random.choice(["store", "view", "workers", "tick"])
        if kind == "store" and agent.effects:
            self._feed(agent, agent.job.run(agent.effects.pop(0)))
        elif kind == "view":
            self._see(agent)
        elif kind == "workers" and agent.is_stopping:
            self._worker_gone(agent)
        elif kind == "tick":
            due = wake_at(agent.state, self.now - 1.0)
            if due is None or due <= self.now:
                self._feed(agent, ev.Ticked())

    def _see(self, agent: Agent) -> None:
        watch = agent.state.watched
        is_whole = watch is not None and watch.is_whole
        try:
            now = agent.store.read(KEYS.whole() if is_whole else KEYS.followed(agent.name))
        except StoreUnavailable:
            agent.copy = None
            self._feed(agent, ev.StoreLost())
            return
        agent.copy = now if is_whole or agent.copy is None else self._partly(agent.copy, now)
        self._feed(agent, ev.Viewed(view_of(agent.copy, KEYS, is_whole=is_whole)))

    def _partly(self, old: Snapshot, now: Snapshot) -> Snapshot:
        """Each key on its own: a watch of several ranges brings their changes in any order."""
        known = {item.key: item for item in old.items}
        latest = {item.key: item for item in now.items}
        for key in sorted(known.keys() | latest.keys()):
            if self.random.random() < 0.5:
                known.pop(key, None)
                known |= {key: latest[key]} if key in latest else {}
        return Snapshot(old.revision, tuple(known[key] for key in sorted(known)))

    def _feed(self, agent: Agent, event: ev.Event) -> None:
        agent.state, effects = step(agent.state, event, self.now)
        for effect in effects:
            self._act(agent, effect)

    def _act(self, agent: Agent, effect: ev.Effect) -> None:
        match effect:
            case ev.Say(sentence):
                agent.said.append(f"{self.now:.2f} {sentence}")
            case ev.Watch():
                agent.copy = None
            case ev.Link() | ev.TellResume() | ev.TellVerdict():
                pass
            case ev.StartWorkers(group):
                assert agent.running == 0, f"workers of {agent.running} live when {group.number} starts"
                agent.running, agent.exited, agent.is_stopping = group.number, set(), False
                agent.starts += 1
            case ev.TerminateWorkers() | ev.KillWorkers():
                agent.is_stopping = True
            case ev.Exit():
                assert agent.running == 0, "an agent must not leave workers behind"
                agent.exit = effect
            case _:
                agent.effects.append(effect)

    def _exit_worker(self, agent: Agent, code: int, tail: str) -> None:
        agent.exited.add(0)
        self.last_step += code == 0
        group = agent.running
        self._feed(agent, ev.WorkerExited(group, 0, code, None, tail, self.last_step, self.now))
        agent.is_stopping = True

    def _worker_gone(self, agent: Agent) -> None:
        gone, agent.running, agent.is_stopping = agent.running, 0, False
        if not agent.exited:
            self._feed(agent, ev.WorkerExited(gone, 0, None, 15, "", 0, self.now))
        self._feed(agent, ev.WorkersGone(gone))

    # Invariants

    def check(self) -> None:
        group = self.group
        if group is not None:
            record = encode(group)
            assert self.groups.setdefault(group.number, record) == record, f"group {group.number} was rewritten"
            assert group.number == max(self.groups) or self.is_backup, "group numbers only grow"
        leaders = [a for a in self.agents if a.state.is_leader and self._is_current(a)]
        assert len(leaders) <= 1, "two leaders"

    def _is_current(self, agent: Agent) -> bool:
        leader = view_of(self.store.read(KEYS.whole()), KEYS, is_whole=True).leader
        return leader is not None and leader.value.incarnation == agent.state.me.incarnation

    def story(self) -> str:
        lines = [f"{agent.name}: {sentence}" for agent in self.agents for sentence in agent.said]
        return "\n".join([f"now {self.now:.2f}, group {self.group}", *lines])
