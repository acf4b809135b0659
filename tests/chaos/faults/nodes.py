"""Nodes and workers that end, or stand still."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from chaos.cluster import Cluster, run
from chaos.fault import ALL_LOST, KILLED_S, PAST_ITS_LEASE_S, SILENT_S, Hold, Recovery, Wait, fault, one, some


@fault("node-killed", "a node is killed, and started again under its name")
def node_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    yield from _killed(cluster, one(cluster, chance))


@fault("node-replaced", "a node is killed, and another takes its place")
def node_replaced(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1, KILLED_S)
    cluster.replace(victim)


@fault("rank-0-killed", "the node of rank 0 is killed")
def rank_0_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    yield from _killed(cluster, cluster.node_of_rank(0))


@fault("leader-killed", "the node of the leader is killed")
def leader_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    yield from _killed(cluster, cluster.leader())


def _killed(cluster: Cluster, victim: str) -> Iterator[Wait]:
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1, KILLED_S)
    cluster.start(victim)


@fault("two-killed", "two of three nodes are killed at once", most_lost=ALL_LOST)
def two_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victims = some(cluster, chance, 2)
    cluster.kill(*victims)
    cluster.start(*victims)
    yield Recovery()


@fault("all-killed", "all nodes are killed at once", most_lost=ALL_LOST)
def all_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    victims = cluster.running()
    cluster.kill(*victims)
    cluster.start(*victims)
    yield Recovery()


@fault("paused", "a node is paused for longer than its lease, and goes on")
def paused(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    run("docker", "pause", victim)
    try:
        yield Recovery(cluster.nodes - 1, SILENT_S)
        yield Hold(PAST_ITS_LEASE_S)
    finally:
        run("docker", "unpause", victim)


@fault("worker-killed", "a worker is killed", failures=1)
def worker_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    pids = dict(cluster.ledger.pids().values())
    cluster.inside(victim, f"kill -KILL {pids[victim]}")
    yield Recovery(soon_s=KILLED_S)


@fault("all-told-to-leave", "all nodes get SIGTERM at once, and the job is started later", most_lost=0)
def all_told_to_leave(cluster: Cluster, _: Random) -> Iterator[Wait]:
    nodes = cluster.running()
    run("docker", "stop", *nodes)
    codes = run("docker", "inspect", "-f", "{{.State.ExitCode}}", *nodes).split()
    assert set(codes) == {"0"}, f"told to leave, they ended with {codes}"
    cluster.start(*nodes)
    yield Recovery()


@fault("one-told-to-leave", "a node gets SIGTERM, and is started later", most_lost=0)
def one_told_to_leave(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    run("docker", "kill", "-s", "TERM", victim)
    yield Recovery(cluster.nodes - 1, KILLED_S)
    code = run("docker", "wait", victim).strip()
    assert code == "0", f"told to leave, it ended with {code}"
    cluster.start(victim)
