"""A coordinator outage is a non-event: the same worker processes train on, and afterwards everything works."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cases import some
from clusters import etcd_cluster, leader_first
from contract.conftest import compact_etcd
from integration.conftest import PATIENCE_S, Coordinator, Job, open_store
from secured_etcd import HOME, QUICK, SECRET, SecuredEtcd

from agent.errors import ConfigError, StoreUnavailable
from agent.rehearse.cluster import read_trace, wait_for
from agent.store.api import Compare, Put, Store
from agent.store.keys import JobKeys

TIMING = ("--detect_within=7", "--settle=1")
LEASE_S = 6.0
"""At these. A node that a busy machine stops for some seconds keeps its own."""


@pytest.fixture(params=some(["1:3"], of=["2", "1:3"]))
def running(request: pytest.FixtureRequest, coordinator: Coordinator, tmp_path: Path) -> Iterator[Job]:
    """Two nodes in the middle of training."""
    with Job(tmp_path, coordinator.endpoint, "outage", TIMING) as job:
        job.epochs, job.step_time_s = 400, 0.05
        job.join("a", request.param)
        job.join("b", request.param)
        job.wait_for_step(10, world=2)
        yield job


def pids(job: Job) -> set[int]:
    return {worker.pid for node in job.living() for worker in node.workers()}


def assert_undisturbed(job: Job, before: set[int], group: int) -> None:
    """The same processes, the same group, and every step taken once."""
    lines = read_trace(job.trace)
    assert pids(job) == before, job.log_text()
    assert lines[-1].group == group, job.log_text()
    steps = [line.step for line in lines if line.group == group]
    assert steps == list(range(steps[0], steps[-1] + 1))


def assert_still_works(job: Job, group: int) -> None:
    """A worker killed afterwards recovers."""
    job.nodes["b"].kill_worker()
    job.wait_for_step(1, after_group=group, world=2)


def train_for(job: Job, seconds: float) -> None:
    """Wait until the job has trained on for so long, by its own trace."""
    until = read_trace(job.trace)[-1].t + seconds
    wait_for(lambda: read_trace(job.trace)[-1].t > until, seconds + PATIENCE_S, f"training goes on; {job.log_text()}")


def settle(job: Job, group: int) -> None:
    """Wait until etcd shows the group with both members and a leader again."""

    def is_whole() -> bool:
        try:
            status = job.status()
        except ConfigError:  # an empty etcd knows no such job yet
            return False
        nodes = [node for node in status["nodes"] if node["ranks"]]
        return status["group"] == group and status["leader"] is not None and len(nodes) == 2

    wait_for(is_whole, PATIENCE_S, f"group {group} to be whole; {job.log_text()}")


FAULTS: dict[str, Callable[[Coordinator, Job], None]] = {}


def fault(do: Callable[[Coordinator, Job], None]) -> Callable[[Coordinator, Job], None]:
    FAULTS[do.__name__] = do
    return do


@fault
def frozen_for_three_leases(coordinator: Coordinator, job: Job) -> None:
    coordinator.freeze()
    train_for(job, 3 * LEASE_S)
    coordinator.thaw()


@fault
def frozen_for_hardly_longer_than_a_lease(coordinator: Coordinator, job: Job) -> None:
    """Twice: an agent that loses its lease again waits before it registers."""
    for leases in (1.1, 1.3):
        coordinator.freeze()
        train_for(job, leases * LEASE_S)
        coordinator.thaw()
        settle(job, job.group)


@fault
def killed_and_restarted(coordinator: Coordinator, job: Job) -> None:
    coordinator.kill()
    train_for(job, 2 * LEASE_S)
    coordinator.restart()


@fault
def restarted_empty(coordinator: Coordinator, job: Job) -> None:
    coordinator.kill()
    train_for(job, 2.0)
    coordinator.restart(empty=True)


@fault
def restored_from_an_old_backup(coordinator: Coordinator, job: Job) -> None:
    """As it was before the job's second group."""
    coordinator.kill()
    shutil.copytree(coordinator.directory / "data", coordinator.directory / "backup")
    coordinator.restart()
    settle(job, job.group)
    job.nodes["a"].kill_worker()
    job.group = job.wait_for_step(1, after_group=job.group, world=2)
    coordinator.kill()
    shutil.rmtree(coordinator.directory / "data")
    shutil.copytree(coordinator.directory / "backup", coordinator.directory / "data")
    coordinator.restart()


@fault
def compacted_in_a_watch_gap(coordinator: Coordinator, job: Job) -> None:
    coordinator.freeze()
    train_for(job, 2.0)
    coordinator.thaw()
    store = open_store(coordinator.endpoint)
    for number in range(50):
        assert store.transact([Compare("/other")], [Put("/other", str(number).encode())]).succeeded
    compact_etcd(coordinator.endpoint, store.read(()).revision)
    store.close()
    train_for(job, 2.0)


@pytest.mark.parametrize("name", some(["restarted_empty"], of=FAULTS))
def test_training_goes_on(coordinator: Coordinator, running: Job, name: str) -> None:
    running.group = running.status()["group"]
    if name != "restored_from_an_old_backup":
        before = pids(running)
        FAULTS[name](coordinator, running)
    else:
        FAULTS[name](coordinator, running)
        before = pids(running)
    settle(running, running.group)
    train_for(running, 1.5 * LEASE_S)
    assert_undisturbed(running, before, running.group)
    assert_still_works(running, running.group)


def test_an_unreadable_record_of_a_node_does_not_stop_the_others(coordinator: Coordinator, running: Job) -> None:
    """It is of another version of elastic-agent."""
    running.group = running.status()["group"]
    with closing(open_store(coordinator.endpoint)) as store:
        store.transact([], [Put(JobKeys(running.job_id).node("foreign"), b'{"v":2}')])
    told = "nodes/foreign cannot be read as version 1", "is left out"
    wait_for(
        lambda: any(all(word in node.text() for word in told) for node in running.living()),
        PATIENCE_S,
        f"the leader tells; {running.log_text()}",
    )
    assert_still_works(running, running.group)


@pytest.mark.long("contract/test_cluster.py; etcd-leader-killed in containers")
@pytest.mark.parametrize("np", some(["1:3"], of=["2", "1:3"]))
@pytest.mark.parametrize("victim", some(["leader"], of=["leader", "follower"]))
def test_one_of_three_etcd_members_is_lost(tmp_path: Path, np: str, victim: str) -> None:
    """Whichever it is, and whichever the agents were connected to: the others go on, and so does the job."""
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(tmp_path / "etcd", 3) as members:
        ordered = leader_first(members)
        doomed = ordered[0] if victim == "leader" else ordered[1]
        servers = [doomed, *(member for member in ordered if member is not doomed)]
        with Job(tmp_path, ",".join(member.endpoint for member in servers), "three", TIMING) as job:
            job.epochs, job.step_time_s = 400, 0.05
            job.join("a", np)
            job.join("b", np)
            job.wait_for_step(10, world=2)
            settle(job, job.status()["group"])
            job.group = job.status()["group"]
            before = pids(job)
            doomed.kill()
            train_for(job, 1.5 * LEASE_S)
            settle(job, job.group)
            assert_undisturbed(job, before, job.group)
            assert_still_works(job, job.group)


def fill(store: Store) -> None:
    """Write without end."""
    while True:
        store.transact([], [Put("/filling", bytes(1 << 20))])


@pytest.mark.long("no test in every run; scripts/chaos etcd-full")
@pytest.mark.skipif(not shutil.which("etcdctl") and os.environ.get("CI") != "true", reason="needs etcdctl on PATH")
def test_an_agent_that_starts_while_etcd_is_full_waits_for_room(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    quota = "--quota-backend-bytes", str(4 << 20)
    with etcd_cluster(tmp_path / "etcd", 1, quota) as (member,), Job(tmp_path, member.endpoint, "full", TIMING) as job:
        with closing(open_store(member.endpoint)) as store:
            with pytest.raises(StoreUnavailable, match="space exceeded"):
                fill(store)
            node = job.join("a", "1")
            waits = "waiting for etcd for", "space exceeded"
            wait_for(lambda: all(word in node.text() for word in waits), PATIENCE_S, f"a wait; {job.log_text()}")
            compact_etcd(member.endpoint, store.read(()).revision)
        for command in ("defrag", "alarm disarm"):
            ask = ["etcdctl", "--endpoints", member.endpoint, *command.split()]
            subprocess.run(ask, env=os.environ | {"ETCDCTL_API": "3"}, check=True, timeout=PATIENCE_S)
        job.wait_for_step(1)


@pytest.mark.long("contract/test_password.py")
def test_a_role_that_is_taken_away_for_a_while_disturbs_nobody(tmp_path: Path) -> None:
    """Who may not read the job keeps no lease, and so all of them end; but nobody takes that for a loss."""
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(tmp_path / "etcd", 1, QUICK) as (member,):
        secured = SecuredEtcd(member)
        user = {"ELASTIC_AGENT_ETCD_USER": "train", "ELASTIC_AGENT_ETCD_PASSWORD": SECRET}
        with Job(tmp_path, member.endpoint, Path(HOME).name, TIMING, os.environ | user) as job:
            job.epochs, job.step_time_s = 400, 0.05
            job.join("a", "1:3")
            job.join("b", "1:3")
            job.wait_for_step(10, world=2)
            settle(job, job.status()["group"])
            job.group = job.status()["group"]
            before = pids(job)
            secured.log_in()
            secured.forbid(HOME)
            wait_for(lambda: not secured.keys(HOME + "nodes/"), PATIENCE_S, "the end of all leases")
            train_for(job, LEASE_S)
            secured.permit(HOME)
            settle(job, job.group)
            train_for(job, 1.5 * LEASE_S)
            assert_undisturbed(job, before, job.group)
            assert_still_works(job, job.group)
        secured.close()
