"""What it costs agents to meet, in figures that say the same on a fast machine and on a slow or busy one.

Each figure is a ratio within one run, or a count. Of several tries the cheapest counts: what else the machine does can
only add processor time.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from benchmarks.meeting import meet

from agent.local_etcd.embedded import EmbeddedEtcd

FEW, MANY = 16, 64
"""Agents of the two sizes that are compared. More than these would measure the machine's overload."""
_TRIES = 2
_METRIC = "grpc_server_started_total"
_BY_TIME = ('"Check"', '"LeaseKeepAlive"')
"""Requests of a lease's renewals: the longer a meeting takes, the more there are."""


@dataclass(frozen=True)
class MeetingCosts:
    """Per agent or client, where not said otherwise."""

    few_cpu_s: float
    """Processor time with `FEW` agents."""
    many_cpu_s: float
    """Processor time with `MANY` agents."""
    bare_cpu_s: float
    """Processor time of a bare client, with `MANY` of them."""
    requests: float
    """Requests to etcd with `MANY` agents, without those of renewals."""

    @property
    def growth(self) -> float:
        """How many times as much an agent costs among `MANY` as among `FEW`."""
        return self.many_cpu_s / self.few_cpu_s

    @property
    def over_bare(self) -> float:
        """How many times as much an agent costs as a bare client."""
        return self.many_cpu_s / self.bare_cpu_s


def measure(tries: int = _TRIES) -> MeetingCosts:
    """Measure in turns, each try on an etcd of its own. Raises `RuntimeError` if agents do not meet."""
    few, many, bare, requests = [], [], [], []
    for _ in range(tries):
        few.append(_try("meet_ours.py", FEW)[0])
        bare.append(_try("meet_bare.py", MANY)[0])
        cpu_s, asked = _try("meet_ours.py", MANY)
        many.append(cpu_s)
        requests.append(asked)
    return MeetingCosts(min(few), min(many), min(bare), min(requests))


def _try(program: str, count: int) -> tuple[float, float]:
    """Processor seconds, and requests, of each agent."""
    with EmbeddedEtcd(port=0) as etcd:
        before = _requests(etcd.endpoint)
        _, cpu_s = meet(program, etcd.endpoint, count)
        return cpu_s / count, (_requests(etcd.endpoint) - before) / count


def _requests(endpoint: str) -> float:
    """How many etcd has been sent so far, without those of renewals."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    counted = [line for line in lines if line.startswith(_METRIC) and not any(name in line for name in _BY_TIME)]
    return sum(float(line.rpartition(" ")[2]) for line in counted)
