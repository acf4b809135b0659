"""Nodes and workers that end or hang."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from chaos.cluster import Cluster, run
from chaos.fault import COLD_S, PAST_ITS_LEASE_S, SAVE_EVERY, SILENT_S, Hold, Recovery, Wait, fault, one, some
from chaos.ledger import first_step_after, replayed_steps

_TO_A_CHECKPOINT = 2 * SAVE_EVERY
"""The next one may be written, and not committed yet."""


@fault("node-killed", "a node is killed, and started again under its name")
def node_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    yield from _killed(cluster, one(cluster, chance))


@fault("node-replaced", "a node is killed, and another takes its place")
def node_replaced(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1)
    cluster.replace(victim)


@fault("rank-0-killed", "the node of rank 0 is killed")
def rank_0_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    yield from _killed(cluster, cluster.node_of_rank(0))


@fault("leader-killed", "the node of the leader is killed")
def leader_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    yield from _killed(cluster, cluster.leader())


def _killed(cluster: Cluster, victim: str) -> Iterator[Wait]:
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1)
    cluster.start(victim)


@fault("two-killed", "two of three nodes are killed at once", most_lost=_TO_A_CHECKPOINT, most_groups=3)
def two_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victims, known = some(cluster, chance, 2), cluster.ledger.newest_group
    cluster.kill(*victims)
    committed = cluster.committed_step()
    cluster.start(*victims)
    yield Recovery(soon_s=COLD_S)
    found = first_step_after(cluster.ledger.lines, known)
    assert found > committed, f"it began with step {found}, and step {committed} was committed"


@fault("all-killed", "all nodes are killed at once", most_lost=_TO_A_CHECKPOINT, most_groups=4)
def all_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    victims, known = cluster.running(), cluster.ledger.newest_group
    cluster.kill(*victims)
    committed = cluster.committed_step()
    cluster.start(*victims)
    yield Recovery(soon_s=COLD_S)
    found = first_step_after(cluster.ledger.lines, known)
    assert found == committed + 1, f"it began with step {found}, and step {committed} was committed"


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
    yield Recovery()


@fault("all-asked-to-leave", "all nodes get SIGTERM at once, and the job is started later", most_lost=0)
def all_asked_to_leave(cluster: Cluster, _: Random) -> Iterator[Wait]:
    nodes, known = cluster.running(), cluster.ledger.newest_group
    run("docker", "stop", *nodes)
    codes = run("docker", "inspect", "-f", "{{.State.ExitCode}}", *nodes).split()
    assert set(codes) == {"0"}, f"told to leave, they ended with {codes}"
    cluster.start(*nodes)
    yield Recovery(soon_s=COLD_S)
    replayed = [group for group, steps in replayed_steps(cluster.ledger.lines).items() if steps and group > known]
    assert not replayed, f"groups {replayed} repeated steps"


@fault("one-asked-to-leave", "a node gets SIGTERM, and is started later", most_lost=0)
def one_asked_to_leave(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    run("docker", "kill", "-s", "TERM", victim)
    yield Recovery(cluster.nodes - 1)
    code = run("docker", "wait", victim).strip()
    assert code == "0", f"told to leave, it ended with {code}"
    cluster.start(victim)
