"""What N agents that have met cost at rest, when they lose one of them, and when etcd does not answer for a while.

They are those of `meeting.py`, on one etcd of one member. What etcd sends and is asked is read from its own metrics.
"""

from __future__ import annotations

import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from agent.core.model import Group, Leader
from agent.core.records import Stored
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.store.api import KeyRange
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys, decode, group_in

HEADINGS = ("agents", "what", "n", "median", "worst")
_LOSSES = 3
_WITHIN_S = 60.0
_NOTICED_WITHIN_S = 5.0
_QUIET_S = 1.0
_TRIES = 5
_LOOK_S = 0.005
_REQUESTS = r"grpc_server_msg_received_total"
_SENT_BYTES = r"etcd_network_client_grpc_sent_bytes_total"
_LEASES = r"etcd_debugging_lease_(?:renewed|granted)_total"


@dataclass
class Stay:
    """One job of N agents, after they have met."""

    agents: int
    values: dict[str, list[float]] = field(default_factory=dict)
    """By what was measured, with its unit."""

    def note(self, what: str, value: float) -> None:
        """Add a value."""
        self.values.setdefault(what, []).append(value)


@dataclass
class _Used:
    """What was used in a time."""

    seconds: float = 0.0
    agents_s: float = 0.0
    etcd_s: float = 0.0
    requests: float = 0.0
    sent_bytes: float = 0.0


class Watcher:
    """Watches the agents of one job.

    Args:
        etcd: where they have met.
        job_id: of their job.
        pids: of the processes that play them.
        agents: how many there are.
        rest_s: how long they rest; after each loss half of that.
    """

    def __init__(self, etcd: EmbeddedEtcd, job_id: str, pids: Sequence[int], agents: int, rest_s: float) -> None:
        self._etcd = etcd
        self._keys = JobKeys(job_id)
        self._store = EtcdStore((etcd.endpoint,), home=self._keys.prefix)
        self._etcd_process = psutil.Process(etcd.pid)
        self._processes = [psutil.Process(pid) for pid in pids]
        self._agents = agents
        self._rest_s = rest_s

    def watch(self, outage_s: float) -> Stay:
        """Measure them at rest, as three members are lost, and after etcd was frozen.

        `outage_s`: for how many seconds it is frozen. 0: it is not.
        """
        stay = Stay(self._agents)
        self._rest(stay)
        for _ in range(_LOSSES):
            self._lose_one(stay, "a member")
        if outage_s:
            self._freeze_etcd(stay, outage_s)
            self._lose_one(stay, "then the leader")
        return stay

    def _rest(self, stay: Stay) -> None:
        time.sleep(self._rest_s / 2)
        with self._measured() as used:
            time.sleep(self._rest_s)
        stay.note("at rest: requests a second", used.requests / used.seconds)
        stay.note("at rest: etcd, ms of CPU a second", 1e3 * used.etcd_s / used.seconds)
        stay.note("at rest: an agent, ms of CPU a second", 1e3 * used.agents_s / used.seconds / self._agents)
        stay.note("at rest: etcd, MB resident", self._etcd_process.memory_info().rss / 1e6)

    def _lose_one(self, stay: Stay, who: str) -> None:
        """A member's lease ends: the group goes on without it. Its agent registers again, and is not let in."""
        self._wait_until_quiet()
        group = self._group().value
        victim = group.members[len(group.members) // 2].node_id if who == "a member" else self._leader()
        for _ in range(_TRIES):
            with self._measured() as used:
                began = time.monotonic()
                (item,) = self._store.read((KeyRange(self._keys.node(victim)),)).items
                self._store.revoke(item.lease_id)
                is_replaced = self._comes_true(lambda: self._group().value.number > group.number, _NOTICED_WITHIN_S)
                took_s = time.monotonic() - began
                time.sleep(self._rest_s / 2)
            if is_replaced:  # else it had registered again before the leader looked
                break
        else:
            raise RuntimeError(f"{victim} lost its place {_TRIES} times, and no other group was formed")
        stay.note(f"{who} is lost: s until the next group", took_s)
        stay.note(f"{who} is lost: MB sent by etcd", used.sent_bytes / 1e6)
        stay.note(f"{who} is lost: an agent, ms of CPU", 1e3 * used.agents_s / self._agents)
        stay.note(f"{who} is lost: etcd, ms of CPU", 1e3 * used.etcd_s)

    def _wait_until_quiet(self) -> None:
        """Wait until nothing has been written for a moment: what the last change brought is over."""
        last, since, give_up_at = 0, time.monotonic(), time.monotonic() + _WITHIN_S
        while time.monotonic() < since + _QUIET_S:
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"not within {_WITHIN_S:g} s: {_QUIET_S:g} s without a write")
            revision = self._store.read(()).revision
            if revision != last:
                last, since = revision, time.monotonic()
            time.sleep(_LOOK_S)

    def _freeze_etcd(self, stay: Stay, outage_s: float) -> None:
        group, there = self._group().value, self._nodes()
        self._etcd_process.suspend()
        try:
            time.sleep(outage_s)
        finally:
            self._etcd_process.resume()
        began = time.monotonic()
        before = self._counted(_LEASES)
        self._wait(lambda: self._counted(_LEASES) >= before + self._agents, "a lease for each agent")
        self._wait(lambda: self._nodes() == there, "all nodes")
        stay.note(f"etcd frozen for {outage_s:g} s: s until all are back", time.monotonic() - began)
        self._wait_until_quiet()
        stay.note("then: nodes that are missing", there - self._nodes())
        stay.note("then: groups that came of it", self._group().value.number - group.number)

    def _group(self) -> Stored[Group]:
        group = group_in(self._store.read((KeyRange(self._keys.shared, is_prefix=True),)).by_key, self._keys)
        assert group is not None
        return group

    def _leader(self) -> str:
        (item,) = self._store.read((KeyRange(self._keys.leader),)).items
        return decode(item, Leader).value.node_id

    def _nodes(self) -> int:
        return len(self._store.read((KeyRange(self._keys.nodes, is_prefix=True),)).items)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        if not self._comes_true(condition, _WITHIN_S):
            raise RuntimeError(f"not within {_WITHIN_S:g} s: {what}")

    def _comes_true(self, condition: Callable[[], bool], within_s: float) -> bool:
        give_up_at = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > give_up_at:
                return False
            time.sleep(_LOOK_S)
        return True

    @contextmanager
    def _measured(self) -> Iterator[_Used]:
        used = _Used()
        began, before = time.monotonic(), self._so_far()
        yield used
        used.agents_s, used.etcd_s, used.requests, used.sent_bytes = (
            now - then for now, then in zip(self._so_far(), before, strict=True)
        )
        used.seconds = time.monotonic() - began

    def _so_far(self) -> tuple[float, float, float, float]:
        agents_s = sum(_cpu_s(each) for each in self._processes)
        return agents_s, _cpu_s(self._etcd_process), self._counted(_REQUESTS), self._counted(_SENT_BYTES)

    def _counted(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self._etcd.endpoint}/metrics", timeout=_WITHIN_S) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def rows(found: Sequence[Stay]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    cells = []
    for agents in sorted({each.agents for each in found}):
        mine = [each for each in found if each.agents == agents]
        for what in mine[0].values:
            values = [value for each in mine for value in each.values.get(what, ())]
            numbers = (f"{statistics.median(values):.3g}", f"{max(values):.3g}")
            cells.append((str(agents), what, str(len(values)), *numbers))
    return cells
