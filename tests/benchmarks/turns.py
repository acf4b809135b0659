"""What one event costs the agent that leads, by how many nodes train: the pure core, with the records that it reads.

A job of N nodes is led through its first group, with records as agents write them. Then one record changes at a time.
Measured is the processor time of the loop's turn: taking up the changed records, deciding, looking at what is to be
announced and recorded, and asking when to look again. What is sent to etcd is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.meet_ours import config_of

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.incident import TransitionReport
from agent.core.lifecycle import step, wake_at
from agent.core.member_status import MemberStatus
from agent.core.model import Leader, Node
from agent.core.records import Record
from agent.core.saved_states import Inventory
from agent.core.state import AgentState
from agent.observe.incident_recorder import Recorder, note_answer, observe_turn
from agent.runtime.collective import initial_state, observer
from agent.store.api import KeyValue, Snapshot
from agent.store.keys import JobKeys, Views, encode

_JOB = "job"
_FAR_S = 1e9
HEADINGS = ("nodes", "event", "n", "median ms", "p99 ms", "a node, µs")


@dataclass(frozen=True)
class Turn:
    """The costs of one kind of event."""

    nodes: int
    event: str
    ms: tuple[float, ...]


def measure(sizes: Sequence[int], times: int) -> list[Turn]:
    """Measure each kind of event so many times with each number of nodes."""
    return [turn for size in sizes for turn in _Led(size).measure(times)]


class _Led:
    """A leader, and the records that it sees."""

    def __init__(self, count: int) -> None:
        states = [_initial(number, count) for number in range(count + 1)]
        self._keys = JobKeys(_JOB)
        self._views = Views(self._keys, is_whole=True)
        self._items: dict[str, KeyValue] = {}
        self._revision = 0
        self._now = 0.0
        self._recorder = Recorder()
        self._watch = observer(config_of("127.0.0.1:1", _JOB, 0, count))
        self._state = replace(states[0], watched=fx.WatchKeys(states[0].me.node_id, is_whole=True), lease_until=_FAR_S)
        self.spare = states.pop().node
        self.nodes = [state.node for state in states]

    def measure(self, times: int) -> list[Turn]:
        """Measure each kind of event."""
        count = len(self.nodes)
        self._begin()
        reports = iter(self.nodes[1:])
        kinds: dict[str, Callable[[], float]] = {
            "a lease was renewed": lambda: self._turn(ev.LeaseRenewed(_FAR_S)),
            "a node reports its first step": lambda: self._report(next(reports)),
            "a node registers": lambda: self._come_and_go(self.spare)[0],
            "a spare node leaves": lambda: self._come_and_go(self.spare)[1],
            "a member is lost": lambda: self._lose(self.nodes[count // 2]),
        }
        return [
            Turn(count, event, tuple(1e3 * cost() for _ in range(min(times, count - 1))))
            for event, cost in kinds.items()
        ]

    def _begin(self) -> None:
        """Form the first group, and let it begin."""
        me = self._state.me
        self._turn(self._shown())  # the first view of an agent that was not restarted does not show it
        self._put(self._keys.leader, Leader(node_id=me.node_id, incarnation=me.incarnation), lease_id=1)
        for node in self.nodes:
            self._put(self._keys.node(node.node_id), node, lease_id=len(self._items) + 1)
        self._turn(self._shown())
        while (written := self._write()) is not None:
            if isinstance(written, fx.WriteGroup):
                for node in self.nodes:
                    self._put_status(node)
                self._turn(self._shown())
        assert self._state.group is not None
        assert len(self._state.group.members) == len(self.nodes)

    def _put_status(self, node: Node, **reported: object) -> None:
        assert self._state.group is not None
        who = {"group": self._state.group.number, "node_id": node.node_id, "incarnation": node.incarnation}
        inventory = Inventory(**who, copies=())
        transition = TransitionReport(**who, stopped_s=0.0, before=0, ended=(), step_s=0.0, clocks=(), **reported)
        status = MemberStatus(**who, inventory=inventory, transition=transition)
        self._put(self._keys.status(status), status)

    def _report(self, node: Node) -> float:
        self._put_status(node, entered_s=0.1, joined_s=0.2, set_up_s=0.3, loaded_s=0.4, stepped_s=0.5)
        return self._turn()

    def _come_and_go(self, node: Node) -> tuple[float, float]:
        self._put(self._keys.node(node.node_id), node, lease_id=_SPARE)
        came = self._turn()
        self._drop(self._keys.node(node.node_id))
        return came, self._turn()

    def _lose(self, node: Node) -> float:
        """The next group is decided, and not written: the node is back with its old record."""
        key, before = self._keys.node(node.node_id), self._state
        item = self._items[key]
        self._drop(key)
        cost = self._turn()
        assert isinstance(self._state.pending, fx.WriteGroup), self._state.pending
        assert len(self._state.pending.group.members) == len(self.nodes) - 1
        self._items[key] = item
        self._state = before
        self._turn()
        return cost

    def _write(self) -> fx.StoreEffect | None:
        """Carry out what the leader writes; None: it has nothing to write."""
        pending = self._state.pending
        if pending is None:
            return None
        records: dict[str, Record] = {}
        match pending:
            case fx.CreateSpec(spec):
                records[self._keys.spec] = spec
            case fx.Register(node) | fx.UpdateNode(node, _):
                records[self._keys.node(node.node_id)] = node
            case fx.WriteGroup(group):
                records[self._keys.group] = group
            case fx.WriteRestorePoint(restore_point):
                records[self._keys.restore_point] = restore_point
            case fx.WriteStatus(status):
                records[self._keys.status(status)] = status
            case _:
                raise AssertionError(pending)
        for key, record in records.items():
            self._put(key, record)
        self._turn(self._shown())
        self._turn(ev.WriteAnswered(pending, ev.Outcome.DONE, self._revision))
        return pending

    def _put(self, key: str, record: Record, lease_id: int = 0) -> None:
        self._revision += 1
        old = self._items.get(key)
        created, lease = (old.create_revision, old.lease_id) if old is not None else (self._revision, lease_id)
        self._items[key] = KeyValue(key, encode(record), created, self._revision, lease)

    def _drop(self, key: str) -> None:
        self._revision += 1
        del self._items[key]

    def _shown(self) -> ev.ViewChanged:
        return ev.ViewChanged(self._views.of(Snapshot(self._revision, self._items.copy())))

    def _turn(self, event: ev.Event | None = None) -> float:
        """Processor seconds of one turn of the leader. Without an event: of taking up what has changed, too."""
        self._now += 1.0
        began_s = time.thread_time()
        self._state, _ = step(self._state, event or self._shown(), self._now)
        self._recorder, _, write = observe_turn(self._recorder, self._state, self._now)
        self._watch(self._state, self._now)
        wake_at(self._state, self._now)
        cost_s = time.thread_time() - began_s
        if write is not None:
            self._recorder = note_answer(self._recorder, ev.Outcome.DONE, self._revision, self._now)
        return cost_s


_SPARE = 10**6


def _initial(number: int, count: int) -> AgentState:
    port = 20000 + number
    state = initial_state(config_of("127.0.0.1:1", _JOB, number, count), port, page="")
    return replace(state, me=replace(state.me, np_min=1), port=port)


def rows(found: Sequence[Turn]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    return [
        (
            str(each.nodes),
            each.event,
            str(len(each.ms)),
            f"{statistics.median(each.ms):.2f}",
            f"{_p99(each.ms):.2f}",
            f"{1e3 * statistics.median(each.ms) / each.nodes:.2f}",
        )
        for each in found
    ]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.99 * len(values)))]
