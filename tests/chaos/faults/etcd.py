"""An etcd whose members are away, or full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random

from chaos.cluster import ETCD, Cluster, CommandFailed, run
from chaos.fault import LONG_S, PAST_ITS_LEASE_S, Undisturbed, Wait, fault


@fault("etcd-leader-killed", "the member of etcd that leads is killed", most_lost=0, most_groups=0)
def etcd_leader_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    with _etcd_without(cluster, cluster.etcd_leader()):
        before = cluster.committed_step()
        yield Undisturbed(LONG_S)
        assert cluster.committed_step() > before, "nothing was committed with the members that were left"
    yield Undisturbed(PAST_ITS_LEASE_S)


@fault("etcd-two-killed", "two members of etcd are killed, for 30 s", most_lost=0, most_groups=0)
def etcd_two_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    with _etcd_without(cluster, *chance.sample(ETCD, 2)):
        yield from _away(cluster, 30.0)
    yield Undisturbed(PAST_ITS_LEASE_S)


@fault("etcd-stopped", "all members of etcd are stopped, for 60 s", most_lost=0, most_groups=0)
def etcd_stopped(cluster: Cluster, _: Random) -> Iterator[Wait]:
    with _etcd_without(cluster, *ETCD):
        yield from _away(cluster, 60.0)
    yield Undisturbed(PAST_ITS_LEASE_S)


@fault("etcd-paused", "all members of etcd are frozen, for 15 s", most_lost=0, most_groups=0)
def etcd_paused(cluster: Cluster, _: Random) -> Iterator[Wait]:
    members = [cluster.container(name) for name in ETCD]
    run("docker", "pause", *members)
    try:
        yield from _away(cluster, LONG_S)
    finally:
        run("docker", "unpause", *members)
    yield Undisturbed(PAST_ITS_LEASE_S)


def _away(cluster: Cluster, seconds: float) -> Iterator[Wait]:
    yield Undisturbed(seconds)
    with contextlib.suppress(CommandFailed):
        cluster.etcdctl("--command-timeout=1s", "get", "/")
        raise AssertionError("etcd answers all the same")


@contextlib.contextmanager
def _etcd_without(cluster: Cluster, *names: str) -> Iterator[None]:
    members = [cluster.container(name) for name in names]
    run("docker", "kill", "-s", "KILL", *members)
    try:
        yield
    finally:
        run("docker", "start", *members)
        cluster.wait_for_etcd()


@fault("etcd-full", "etcd is out of space, and says so to whoever writes", most_lost=0, most_groups=0)
def etcd_full(cluster: Cluster, _: Random) -> Iterator[Wait]:
    with contextlib.suppress(CommandFailed):  # the last one is refused
        cluster.observe(
            "export ETCDCTL_API=3; head -c 1000000 /dev/zero | tr '\\0' x >/tmp/filling; "
            "for number in $(seq 64); do etcdctl --endpoints=etcd-1:2379 put /filling/$number </tmp/filling; done"
        )
    assert "NOSPACE" in cluster.etcdctl("alarm", "list"), "etcd has room for all that"
    yield Undisturbed(LONG_S)
    revision = cluster.etcdctl("get", "/filling/1", "-w", "fields").split('"Revision" : ')[1].split()[0]
    cluster.etcdctl("del", "--prefix", "/filling/")
    cluster.etcdctl("compact", revision)
    cluster.etcdctl("defrag")
    cluster.etcdctl("alarm", "disarm")
    yield Undisturbed(PAST_ITS_LEASE_S)
