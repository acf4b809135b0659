"""What one registration costs the agent that leads, by how many nodes are there: the pure core, without a store.

The leader is shown each node's registration in a view of its own, while it waits for more. Figures are the processor
time of that, over the processor time of a reference on the same machine at the same moment.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from benchmarks.meet_ours import config_of

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.lifecycle import step, wake_at
from agent.core.model import Leader, Node, Spec
from agent.core.state import AgentState
from agent.runtime.collective import initial_state
from agent.store.api import KeyValue, Snapshot
from agent.store.keys import JobKeys, Views, decode, encode

FEW, MANY = 50, 200
"""Nodes of the two sizes that are compared."""
_LAST = 30
"""So many registrations are measured: those that lead up to the size."""
_TRIES = 5
_JOB = "job"


@dataclass(frozen=True)
class LeaderCosts:
    """Processor seconds of one registration."""

    few_s: float
    """With `FEW` nodes."""
    many_s: float
    """With `MANY` nodes."""
    reference_s: float
    """Of decoding `MANY` node records once: what a leader could not do without if it remembered nothing."""

    @property
    def growth(self) -> float:
        """How many times as much it costs with `MANY` nodes as with `FEW`: 4 if each node costs the same."""
        return self.many_s / self.few_s

    @property
    def over_reference(self) -> float:
        """How many times as much it costs with `MANY` nodes as the reference."""
        return self.many_s / self.reference_s


def measure(tries: int = _TRIES) -> LeaderCosts:
    """Measure in turns. Of several tries the cheapest counts."""
    leader, nodes = _agents(MANY)
    found = [
        (_registration_s(leader, nodes[:FEW]), _registration_s(leader, nodes), _reference_s(nodes))
        for _ in range(tries)
    ]
    few_s, many_s, reference_s = (min(column) for column in zip(*found, strict=True))
    return LeaderCosts(few_s, many_s, reference_s)


def _agents(count: int) -> tuple[AgentState, list[Node]]:
    """The leader, which is the oldest node; and all nodes by age. The job needs twice as many: it goes on waiting."""
    states = []
    for number in range(count):
        port = 20000 + number
        state = initial_state(config_of("127.0.0.1:1", _JOB, number, 2 * count), port, page="")
        states.append(replace(state, port=port))
    return states[0], [state.node for state in states]


def _registration_s(leader: AgentState, nodes: list[Node]) -> float:
    """The median of the last registrations."""
    keys = JobKeys(_JOB)
    me = leader.me
    spec = Spec(
        run=me.run,
        np_min=me.np_min,
        np_max=me.np_max,
        first_group=1,
        fresh=False,
        secret=me.secret,
        changed_by=me.node_id,
        changed_at=0.0,
    )
    leads = Leader(node_id=me.node_id, incarnation=me.incarnation)
    items = {
        keys.spec: KeyValue(keys.spec, encode(spec), 1, 1, 0),
        keys.leader: KeyValue(keys.leader, encode(leads), 2, 2, 1),
    }
    views = Views(keys, is_whole=True)
    state = replace(leader, watched=fx.WatchKeys(me.node_id, is_whole=True), lease_until=1e9)
    costs = []
    for revision, node in enumerate(nodes, start=3):
        key = keys.node(node.node_id)
        items[key] = KeyValue(key, encode(node), revision, revision, revision)
        snapshot = Snapshot.of(revision, tuple(items[name] for name in sorted(items)))
        now = float(revision)
        began_s = time.thread_time()
        state, effects = step(state, ev.ViewChanged(views.of(snapshot)), now)
        wake_at(state, now)
        costs.append(time.thread_time() - began_s)
        assert not any(isinstance(effect, fx.StoreEffect) for effect in effects), effects
    assert state.view is not None
    assert len(state.view.nodes) == len(nodes), "the leader has not taken in all of them"
    return statistics.median(costs[-_LAST:])


def _reference_s(nodes: list[Node]) -> float:
    keys = JobKeys(_JOB)
    items = [KeyValue(keys.node(node.node_id), encode(node), 1, 1, 1) for node in nodes]
    costs = []
    for _ in range(_LAST):
        began_s = time.thread_time()
        for item in items:
            decode(item, Node)
        costs.append(time.thread_time() - began_s)
    return statistics.median(costs)
