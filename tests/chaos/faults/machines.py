"""Machines that lack memory, or have a wrong clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from chaos.cluster import Cluster, run
from chaos.fault import SAVE_EVERY, Recovery, Wait, fault, one, some

_NODE_MB = 768
"""Half as much again as its processes have: to take what is left takes a fraction of a second."""
_PLENTY_MB = 64 << 10
_WITHOUT_STANDBY_S = 5.0
"""The kernel kills the standby first, as it is told to, so the next rank starts Python and torch."""
_CLOCK_ERROR_S = 60.0


@fault("out-of-memory", "a worker takes more memory than its node may, and is killed for it", failures=1)
def out_of_memory(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    _limit_memory(victim, _NODE_MB)
    cluster.observe(f"echo {2 * _NODE_MB} >/ledger/eat.{victim}")
    yield Recovery(soon_s=_WITHOUT_STANDBY_S)
    _limit_memory(victim, _PLENTY_MB)
    first = cluster.record("shared/group")["reason"]["first"]
    assert first["node_id"] == victim, first
    assert "out of memory" in first.get("why", ""), first


def _limit_memory(node: str, megabytes: int) -> None:
    run("docker", "update", f"--memory={megabytes}m", f"--memory-swap={megabytes}m", node)


@fault(
    "clock-wrong", "a node's clock is an hour off, and another node is killed", most_lost=3 * SAVE_EVERY, most_groups=6
)
def clock_wrong(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    wrong, victim = some(cluster, chance, 2)
    ahead_s = chance.choice((-3600, 3600))
    cluster.observe(f"echo {ahead_s} >/ledger/clock.{wrong}")
    _start_with_clock(cluster, wrong, ahead_s)
    yield Recovery()
    cluster.wait_until_settled()
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1)
    cluster.start(victim)
    yield Recovery(cluster.nodes)
    cluster.wait_until_settled()
    cluster.observe(f"rm /ledger/clock.{wrong}")
    _start_with_clock(cluster, wrong, 0)
    yield Recovery(cluster.nodes - 1)


def _start_with_clock(cluster: Cluster, node: str, ahead_s: float) -> None:
    run("docker", "restart", "-t", "0", node)
    told = float(cluster.inside(node, "python -c 'import time; print(time.time())'"))
    assert abs(told - time.time() - ahead_s) < _CLOCK_ERROR_S, f"its clock says {told}, not {ahead_s} s more than ours"
