"""Networks that lose, or delay, what is said."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from random import Random

from chaos.cluster import ETCD, Cluster
from chaos.fault import LONG_S, PAST_ITS_LEASE_S, SILENT_S, Hold, Recovery, Undisturbed, Wait, fault, one, some

_APART_S = 8.0
"""Its lease lives, and so more is waited for: that it has not ended, and that no step comes."""
_DELAY_S = 0.2
_SLOW_S = 40.0
"""Ranks that meet take a few dozen answers, and as many to stop together before another one joins them."""
_BROKEN_S = 9.0
"""No node is missing, so they wait for one to be, before a broken connection counts as a failure: in `state.run` for
`--detect_within` and a second, 6 s. Without it, for a lease of 4 s, and 0.6 s for etcd to end it. A restart follows."""
_DROPPED = re.compile(r"^ *([1-9]\d*) .* DROP ", re.MULTILINE)


@fault("cut-off", "a node is cut off from all others and from etcd")
def cut_off(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    yield from _cut_from_all(cluster, one(cluster, chance))


@fault("cut-from-etcd", "a node is cut off from etcd only")
def cut_from_etcd(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    with _cut(cluster, victim, _etcds(cluster)):
        yield Recovery(cluster.nodes - 1, within_s=LONG_S)
        yield Hold(PAST_ITS_LEASE_S)


@fault("cut-from-peers", "a node is cut off from the other nodes only")
def cut_from_peers(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    with _cut(cluster, victim, _others(cluster, victim)):
        yield Recovery(cluster.nodes - 1, _APART_S)
        yield Hold(LONG_S)


@fault("deaf", "a node receives nothing, and can send")
def deaf(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    yield from _cut_from_all(cluster, one(cluster, chance), "in")


@fault("mute", "a node can send nothing, and receives")
def mute(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    yield from _cut_from_all(cluster, one(cluster, chance), "out")


def _cut_from_all(cluster: Cluster, victim: str, *ways: str) -> Iterator[Wait]:
    with _cut(cluster, victim, [*_others(cluster, victim), *_etcds(cluster)], *ways):
        yield Recovery(cluster.nodes - 1, SILENT_S)
        yield Hold(PAST_ITS_LEASE_S)


@contextlib.contextmanager
def _cut(cluster: Cluster, node: str, others: list[str], *ways: str) -> Iterator[None]:
    cluster.cut(node, others, ways=ways or ("in", "out"))
    try:
        yield
    finally:
        cluster.mend(node)


@fault("lossy", "a node loses one packet in twenty", most_lost=0, most_groups=0)
def lossy(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    cluster.in_network_of(victim, "iptables -A INPUT -m statistic --mode random --probability 0.05 -j DROP")
    try:
        yield Undisturbed(LONG_S)
        assert _DROPPED.search(cluster.in_network_of(victim, "iptables -nvxL INPUT")), "no packet was lost"
    finally:
        cluster.mend(victim)
    yield Undisturbed(PAST_ITS_LEASE_S)


@fault(
    "slow",
    "connections that a node opens are 200 ms slower each way, and another is killed",
    most_groups=4,  # one is lost, and back; then a rank's connection breaks, and it is back
    failures=1,
)
def slow(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    slowed, victim = some(cluster, chance, 2)
    with cluster.delay(slowed, _DELAY_S):
        assert _answer_s(cluster, slowed) > 1.5 * _DELAY_S, "nothing is slower"
        cluster.kill(victim)
        yield Recovery(cluster.nodes - 1, _SLOW_S)
        cluster.start(victim)
        yield Recovery(cluster.nodes, _SLOW_S)
    yield Hold(PAST_ITS_LEASE_S, _BROKEN_S)  # the end of the delay breaks the connections, if ranks have any there


def _answer_s(cluster: Cluster, node: str) -> float:
    """What an answer from etcd takes there, on a new connection."""
    asked = (
        f"import time, urllib.request as web; t = time.monotonic(); web.urlopen('http://{ETCD[0]}:2379/health').read()"
    )
    return float(cluster.inside(node, f'python -c "{asked}; print(time.monotonic() - t)"'))


def _others(cluster: Cluster, node: str) -> list[str]:
    return [cluster.address(other) for other in cluster.running() if other != node]


def _etcds(cluster: Cluster) -> list[str]:
    return [cluster.address(cluster.container(name)) for name in ETCD]
