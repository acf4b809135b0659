"""Nodes that are lost, silent, cut off, asleep or hung: who notices, how soon, and what comes of the training."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cable import Proxy
from cases import some
from integration import counting
from integration.conftest import PATIENCE_S, Job, open_store

from agent.core.model import Group
from agent.core.view import ClusterView
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.observe.messages import describe
from agent.rehearse.cluster import read_trace, wait_for
from agent.store.keys import JobKeys, view_of

TIMING = ("--detect_within=10", "--settle=1", "--link_heartbeat=0.5")
LEASE_S = 9.0
"""At these. Renewed four times in that: a node that a busy machine stops for some seconds keeps its own."""
ETCD_S = 0.5
"""How much later etcd ends a lease, at most."""
SLACK_S = 10.0
"""What a loaded machine may add."""

HANGING_AGENT = """
import sys
if sys.orig_argv[1:3] == ["-m", "agent"]:
    import pathlib, time
    import agent.runtime.collective
    step = agent.runtime.collective.step
    def hang(*arguments):
        while pathlib.Path({flag!r}).exists():
            time.sleep(0.05)
        return step(*arguments)
    agent.runtime.collective.step = hang
"""


class Counting(Job):
    """A cluster on a script whose result is known."""

    count = 3000
    step_time_s = 0.02

    @property
    def command(self) -> list[str]:
        return [counting.__file__, str(self.directory), str(self.count), str(self.step_time_s)]

    def assert_result(self) -> None:
        """The training ended with what it would have ended with."""
        value = float((self.directory / "result").read_text())
        assert math.isclose(value, counting.expected(self.count), rel_tol=1e-12), self.log_text()


class Sight:
    """What etcd shows of a job."""

    def __init__(self, job: Job) -> None:
        self._store = open_store(job.server)
        self._keys = JobKeys(job.job_id)

    def view(self) -> ClusterView:
        return view_of(self._store.read(self._keys.whole()), self._keys, is_whole=True)

    def group(self) -> Group:
        stored = self.view().group
        assert stored is not None
        return stored.value

    def time_to_next_group(self, number: int) -> float:
        """Seconds until there is a group after that number."""
        began_at = time.monotonic()
        wait_for(lambda: self.group().number > number, PATIENCE_S, f"a group after {number}")
        return time.monotonic() - began_at

    def committed(self) -> int:
        """The step of the committed checkpoint; 0: there is none."""
        stored = self.view().checkpoint
        return stored.value.copy.step if stored is not None else 0

    def close(self) -> None:
        self._store.close()


@pytest.fixture
def counted(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Counting]:
    with Counting(tmp_path, etcd.endpoint, f"counting-{tmp_path.name}", TIMING) as job:
        yield job


@pytest.fixture
def sight(counted: Counting) -> Iterator[Sight]:
    found = Sight(counted)
    yield found
    found.close()


def leader_and_others(sight: Sight) -> tuple[str, list[str]]:
    view = sight.view()
    assert view.leader is not None
    leader = view.leader.value.node_id
    return leader, [member.node_id for member in sight.group().members if member.node_id != leader]


@pytest.mark.parametrize("victim", some(["leader"], of=["leader", "other"]))
def test_a_killed_node_is_missed_at_once(counted: Counting, sight: Sight, victim: str) -> None:
    """Its neighbours see the connection close: nobody waits for the lease."""
    for name in ("a", "b", "c"):
        counted.join(name, "1:3", "--detect_within=40")
    number = counted.wait_for_step(10, world=3)
    leader, others = leader_and_others(sight)
    lost = leader if victim == "leader" else others[0]
    counted.nodes[lost].kill()
    assert sight.time_to_next_group(number) < SLACK_S
    assert f"lost {lost}" in describe(sight.group().reason)
    counted.finish()
    counted.assert_result()


@pytest.mark.long("host-vanishes.txt; cut-off in containers")
def test_a_silent_node_is_missed_when_its_lease_ends(counted: Counting, sight: Sight) -> None:
    """Silence alone evicts nobody; within the time promised the lease has ended."""
    for name in ("a", "b"):
        counted.join(name, "1:2")
    number = counted.wait_for_step(10, world=2)
    _, (lost,) = leader_and_others(sight)
    counted.nodes[lost].silence()
    wait_for(lambda: sight.view().suspects, PATIENCE_S, "a suspicion")
    assert sight.group().number == number, "a suspicion is no eviction"
    assert sight.time_to_next_group(number) < LEASE_S + SLACK_S
    counted.nodes.pop(lost).kill()
    counted.finish()
    counted.assert_result()


@pytest.mark.long("node-cut-off.txt; cut-off in containers")
def test_an_agent_cut_off_from_etcd_and_its_neighbour_stops_its_workers(counted: Counting) -> None:
    """Somebody else may have gone on; back in reach it joins again and the result is what it would have been."""
    cable = Proxy(counted.server)
    counted.join("a", "1:2")
    counted.join("b", "1:2", f"--elastic_server={cable.endpoint}")
    number = counted.wait_for_step(10, world=2)
    (before,) = counted.nodes["b"].workers()
    cable.pull()
    wait_for(lambda: "etcd cannot be reached" in counted.nodes["b"].text(), PATIENCE_S, "b's outage")
    counted.nodes.pop("a").kill()
    wait_for(lambda: not before.is_running(), PATIENCE_S, f"b stops its workers; {counted.log_text()}")
    cable.plug_in()
    counted.wait_for_step(1, after_group=number, world=1)
    counted.finish()
    counted.assert_result()


@pytest.mark.long("simulation: pauses in every step of a save; integration/test_runtime_fence.py")
def test_an_agent_that_sleeps_through_its_lease_in_a_save_commits_nothing(counted: Counting, sight: Sight) -> None:
    """keep=1: what the others committed meanwhile is neither replaced nor deleted by the sleeper's worker."""
    (counted.directory / "hold").touch()
    for name in ("a", "b"):
        counted.join(name, "1:2")
    number = counted.wait_for_step(10, world=2)
    held = int(
        wait_for(lambda: text_of(counted.directory / "held"), PATIENCE_S, f"a save that is held; {counted.log_text()}")
    )
    sleeper = sight.group().members[0].node_id
    fell_asleep_at = time.time()
    counted.nodes[sleeper].process.send_signal(signal.SIGSTOP)
    assert sight.time_to_next_group(number) < LEASE_S + SLACK_S
    (counted.directory / "hold").unlink()  # its worker, which is not stopped, goes on and asks
    wait_for(lambda: read_trace(counted.trace)[-1].t > fell_asleep_at + 2 * LEASE_S, PATIENCE_S, "two leases")
    before = int(
        wait_for(lambda: (step := sight.committed()) > held and step, PATIENCE_S, "the other goes on and commits")
    )
    counted.nodes[sleeper].process.send_signal(signal.SIGCONT)
    counted.wait_for_step(before + 1, after_group=number + 1, world=2)
    assert sight.committed() >= before
    counted.finish()
    counted.assert_result()
    committed = sight.view().checkpoint
    assert committed is not None
    assert [path.name for path in checkpoints(counted)] == [committed.value.name], "keep=1: this one, and it is there"


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def checkpoints(job: Job) -> list[Path]:
    """Those that are in place, by name."""
    found = (job.directory / "checkpoints" / job.job_id).iterdir()
    return sorted(path for path in found if not path.name.startswith("."))


@pytest.mark.long("fork-cut-off-group.txt; cut-off in containers")
def test_a_group_that_was_cut_off_has_no_say_in_what_its_successor_resumes_from(
    counted: Counting, sight: Sight
) -> None:
    """It trained on and is far ahead; history went on without it, from the committed checkpoint."""
    counted.count, counted.step_time_s = 1500, 0.01
    cable = Proxy(counted.server)
    counted.join("a", "1:2", f"--elastic_server={cable.endpoint}")
    number = counted.wait_for_step(30, world=1)
    cable.pull()
    wait_for(lambda: sight.view().leader is None, PATIENCE_S, "a's lease ends")
    fork = sight.committed()
    counted.step_time_s = 0.05  # the successor is slower
    counted.join("b", "1:2")
    counted.wait_for_step(1, after_group=number)
    successor = [line.step for line in read_trace(counted.trace) if line.group > number]
    assert successor[0] == fork + 1
    wait_for(lambda: sight.committed() > fork, PATIENCE_S, "the successor commits")
    ahead = max(line.step for line in read_trace(counted.trace) if line.group == number)
    cable.plug_in()
    third = counted.wait_for_step(1, after_group=number + 1, world=2)
    lines = read_trace(counted.trace)
    resumed = next(line.step for line in lines if line.group == third)
    last = max(line.step for line in lines if number < line.group < third)
    # The last step of the successor, which is handed over, is in no trace: a script leaves as it commits that one.
    assert resumed <= last + 2 < ahead, "from the successor's history, not from what was ahead of it"
    counted.finish()
    counted.assert_result()
    assert {path.name.split("-g")[1][:6] for path in checkpoints(counted)} == {f"{third:06d}"}


@pytest.mark.long("agent-paused.txt; test_a_hung_loop_loses_its_lease in contract/test_lease.py")
def test_a_hung_agent_loses_its_place(counted: Counting, sight: Sight) -> None:
    """Its process lives and its threads run, but its loop hangs: that is no reason to keep its lease alive.

    One that is late for half a lease, on a busy machine, keeps its place.
    """
    lease_s, counted.options = 13.0, (*counted.options, "--detect_within=14")
    stuck = counted.directory / "stuck"
    (counted.directory / "sitecustomize.py").write_text(HANGING_AGENT.format(flag=str(stuck)))
    counted.join("a", "1:2")
    counted.wait_for_step(5)
    paths = [str(counted.directory), counted.environ.get("PYTHONPATH", "")]
    counted.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    counted.join("b", "1:2")
    number = counted.wait_for_step(5, world=2)
    stuck.touch()
    late_at = time.time()
    wait_for(lambda: read_trace(counted.trace)[-1].t > late_at + lease_s / 2, PATIENCE_S, "half a lease")
    stuck.unlink()
    wait_for(lambda: read_trace(counted.trace)[-1].t > late_at + 1.5 * lease_s, PATIENCE_S, "a lease, and more")
    assert sight.group().number == number
    stuck.touch()
    assert sight.time_to_next_group(number) < lease_s + lease_s / 8 + ETCD_S + SLACK_S
    assert [member.node_id for member in sight.group().members] == ["a"]
    counted.nodes.pop("b").kill()
    counted.finish()
    counted.assert_result()
