"""Staged failures in a job of three nodes: the report names the right rank, node and cause, and the result is right.

The incident's record is what `explain`, `history`, `report` and the page are made from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cases import some
from integration import counting, failing_job, pausing_job, slow_job
from integration.conftest import PATIENT, Job, open_store

from agent.core.incident import Incident
from agent.observe.messages import cause_of, describe, describe_hang
from agent.rehearse.cluster import Timeout, wait_for
from agent.store.api import KeyRange
from agent.store.keys import JobKeys, decode

HASTE = ("--hang_floor=6", "--hang_factor=5", "--hang_first=60")
"""A hang is told after 6 s, and ended after 12 s at the latest."""
PATIENCE_S = 120.0


class Failing(Job):
    """A job whose node b fails in a way of choice."""

    kind = "none"
    count = 400

    @property
    def command(self) -> list[str]:
        return [failing_job.__file__, str(self.directory), str(self.count), self.kind]

    def incidents(self) -> list[Incident]:
        """All that were recorded, by group."""
        store = open_store(self.server)
        try:
            keys = JobKeys(self.job_id)
            items = store.read((KeyRange(keys.incidents, is_prefix=True),)).items
            return sorted((decode(item, Incident).value for item in items), key=lambda each: each.group)
        finally:
            store.close()

    def incident(self, cause: str, *, after_group: int = 0) -> Incident:
        """Wait for an incident of that cause, until it is known whole."""

        def found() -> Incident | None:
            known = (i for i in self.incidents() if i.cause == cause and i.group > after_group)
            return next((i for i in known if i.phases.is_complete), None)

        try:
            return wait_for(found, PATIENCE_S, f"an incident: {cause}")  # type: ignore[no-any-return]
        except Timeout as timeout:
            raise AssertionError(f"{timeout}; {self.incidents()}; {self.log_text()}") from None

    def assert_result(self) -> None:
        """The training ended with what it would have ended with."""
        value = float((self.directory / "result").read_text())
        assert math.isclose(value, counting.expected(self.count), rel_tol=1e-12), self.log_text()


@pytest.fixture
def failing(etcd: Any, tmp_path: Path) -> Iterator[Callable[..., Failing]]:  # noqa: ANN401 - the etcd fixture
    made: list[Failing] = []

    def make(kind: str, *options: str) -> Failing:
        directory = tmp_path / kind
        directory.mkdir()
        job = Failing(directory, etcd.endpoint, f"{os.getpid()}-{tmp_path.name}-{kind}", (*PATIENT, *options))
        job.kind = kind
        made.append(job)
        return job

    yield make
    for job in made:
        job.__exit__(None, None, None)


def start_three(job: Failing) -> None:
    for name in "abc":
        job.join(name, "3")


def the_cause(incident: Incident) -> Any:  # noqa: ANN401 - a Failure
    first = incident.ended[0]
    assert first.node_id == failing_job.NODE, cause_of(incident)
    rank = [place.node_id for place in incident.members].index(failing_job.NODE)
    assert first.failure.rank == rank, "the group after has the same members in the same order"
    return first.failure


ENDS: dict[str, tuple[str, dict[str, object]]] = {
    "exception": ("ValueError: the sample 17 is damaged", {"exit_code": 1, "signal": None}),
    "kill": ("was killed by SIGKILL", {"signal": 9}),
    "segfault": ("was killed by SIGSEGV", {"signal": 11}),
}


@pytest.mark.parametrize("kind", some(["exception"], of=ENDS))
def test_a_worker_that_ends_is_named_with_its_reason(failing: Callable[..., Failing], kind: str) -> None:
    """And those that die of it are no causes."""
    said, how = ENDS[kind]
    job = failing(kind)
    start_three(job)
    incident = job.incident("failed")
    failure = the_cause(incident)
    assert {name: getattr(failure, name) for name in how} == how
    assert said in describe(incident.reason)
    assert said in job.ask("explain", str(incident.group))
    assert all(each.failure.is_peer_lost for each in incident.ended[1:]), incident.ended
    if kind == "segfault":
        assert "disturb" in failure.tail, "the stack of the crash"
    assert incident.step <= failing_job.STEP
    assert incident.replayed_steps == failing_job.STEP - incident.step
    job.finish()
    job.assert_result()
    assert incident.phases.total_s < PATIENCE_S


HANGS = {
    "collective": ("waits for others at failing_job.py:", "in disturb"),
    "sleep": ("sleeps at failing_job.py:", "in disturb"),
    "lock": ("at failing_job.py:", "in disturb"),
    "stop": ("is stopped by a signal",),
}


@pytest.mark.long("integration/test_hangs.py")
@pytest.mark.parametrize("kind", some(["collective"], of=HANGS))
def test_a_stalled_rank_is_named_although_all_stall(failing: Callable[..., Failing], kind: str) -> None:
    """The others wait for it in a collective; none of them is blamed, and no agent ends."""
    job = failing(kind, *HASTE)
    start_three(job)
    incident = job.incident("failed")
    failure = the_cause(incident)
    assert failure.exit_code is None
    assert failure.signal is None
    for part in HANGS[kind]:
        assert failure.hang is not None
        assert part in describe_hang(failure.hang)
        assert part in describe(incident.reason)
    job.finish()
    job.assert_result()
    assert [each.cause for each in job.incidents()] == ["start", "failed"]
    assert job.status()["restarts"] == 1


@pytest.mark.long
def test_no_pause_of_a_whole_training_is_taken_for_a_hang(failing: Callable[..., Failing]) -> None:
    """Three minutes of it, with a floor that protects none of the pauses."""
    job = failing("pauses", "--hang_floor=1", "--hang_first=30")
    for name in "ab":
        job.start(name, "2", [pausing_job.__file__, str(job.directory)])
    for node in job.nodes.values():
        assert node.wait(500.0) == 0, job.log_text()
    steps = float(pausing_job.EPOCHS * pausing_job.STEPS)
    assert [float((job.directory / f"done-{rank}").read_text()) for rank in (0, 1)] == [steps, steps]
    assert "made no step" not in job.log_text()
    assert [each.cause for each in job.incidents()] == ["start"]


@contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """A control group (version 1) under our own."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    line = next((line for line in lines if f":{controller}:" in line), None)
    if line is None:
        pytest.skip(f"there is no {controller} controller of version 1 here")
    group = Path(f"/sys/fs/cgroup/{controller}{line.split(':', 2)[2]}") / f"elastic-agent-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(pid)
        wait_for(lambda: not (group / "cgroup.procs").read_text(), PATIENCE_S, "nothing is left in the control group")
        group.rmdir()


@pytest.mark.long("test_causes.py: what is said of a worker that its control group's limit has killed")
def test_a_worker_that_the_memory_limit_kills_is_named(failing: Callable[..., Failing]) -> None:
    """Its agent, in the same control group, lives on."""
    job = failing("memory")
    with control_group("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        node = job.join(failing_job.NODE, "3")
        (group / "cgroup.procs").write_text(str(node.process.pid))  # what it starts later is born there
        job.join("a", "3")
        job.join("c", "3")
        failure = the_cause(job.incident("failed"))
        assert failure.signal == 9
        assert "out of memory" in failure.why
        job.finish()
        job.assert_result()


@pytest.mark.long("unfit-node.txt")
def test_a_worker_that_nothing_can_kill_makes_its_node_unfit(failing: Callable[..., Failing]) -> None:
    """The rest go on without it, its agent stays, and it trains again once that worker is gone."""
    job = failing("none", "--kill_timeout=10")
    job.count = 2500
    with control_group("freezer") as group:
        for name in "abc":
            job.join(name, "2:3")
        first = job.wait_for_step(40, world=3)
        for worker in job.nodes["b"].workers():
            (group / "cgroup.procs").write_text(str(worker.pid))
        (group / "freezer.state").write_text("FROZEN")
        try:
            job.nodes["a"].kill_worker()
            without = job.wait_for_step(50, after_group=first, world=2)
            assert job.nodes["b"].process.poll() is None
            note = next(node["note"] for node in job.status()["nodes"] if node["node_id"] == "b")
            assert "survive SIGKILL" in note
            assert "b is unfit" in next(describe(each.reason) for each in job.incidents() if each.group == without)
        finally:
            (group / "freezer.state").write_text("THAWED")
        job.wait_for_step(60, after_group=without, world=3)
        job.finish()
    job.assert_result()


@pytest.mark.long("agent-killed.txt; integration/test_losses.py")
@pytest.mark.parametrize("how", some(["kill"], of=["kill", "silence"]))
def test_a_node_that_is_lost_is_named_and_charged_to_nobody(failing: Callable[..., Failing], how: str) -> None:
    """Those who died of its end are listed as what they are."""
    job = failing("none", "--detect_within=8")
    job.count = 1200
    start_three(job)
    job.wait_for_step(40)
    # A killed node is missed before the other comes: a wait comes between. A silent one is replaced by a spare.
    if how == "kill":
        job.nodes["c"].kill()
        job.wait_for_state("waiting")
        job.join("d", "3")
    else:
        job.join("d", "3")
        wait_for(lambda: "d" in {node["node_id"] for node in job.status()["nodes"]}, PATIENCE_S, "the spare")
        job.nodes["c"].silence()
    incident = job.incident("start" if how == "kill" else "lost", after_group=1)
    lost = next(each for each in job.incidents() if each.cause in {"wait", "lost"})
    assert describe(lost.reason).startswith("lost c")
    assert all(each.failure.is_peer_lost for each in lost.ended)
    assert incident.totals.incidents == incident.group - 1
    wait_for(lambda: job.status()["restarts"] == 0, PATIENCE_S, "nobody is charged")
    job.nodes["c"].kill()
    del job.nodes["c"]
    job.finish()
    job.assert_result()


@pytest.mark.long("slow.txt; test_of_two_ranks_the_slow_one_is_reported in integration/test_hangs.py")
def test_a_slow_rank_is_distinguished_from_those_that_it_delays(failing: Callable[..., Failing]) -> None:
    """All of them take steps at the pace of the slowest; nothing is changed for it."""
    job = failing("slow")
    for name in "abc":
        job.start(name, "3", [slow_job.__file__, "120"])
    job.finish()
    said = [line for node in job.nodes.values() for line in node.text().splitlines() if " is slow: " in line]
    assert said, job.log_text()
    assert all(" on b is slow: " in line for line in said), said
    assert [each.cause for each in job.incidents()] == ["start"]


def test_a_job_ends_with_what_its_incidents_have_cost(failing: Callable[..., Failing]) -> None:
    """In the last line of each agent, and in `status`."""
    job = failing("exception")
    start_three(job)
    job.finish()
    for node in job.nodes.values():
        assert "1 incident cost" in node.text().splitlines()[-1], node.text()
        assert "goodput" in node.text().splitlines()[-1]


@pytest.mark.long("budget-in-full.txt")
def test_budget_counts_restarts(failing: Callable[..., Failing]) -> None:
    """Two restarts are two restarts: with 2, the third failure ends the job, on all nodes with the same code."""
    job = failing("none", "--max_restarts=2")
    script = job.directory / "fails.py"
    script.write_text(
        "import os, sys\nopen('starts','a').write(os.environ['ELASTIC_AGENT_GROUP']+'\\n')\nsys.exit(7)\n"
    )
    for name in "ab":
        job.start(name, "2", [str(script)])
    assert {node.wait(PATIENCE_S) for node in job.nodes.values()} == {76}
    groups = (job.directory / "starts").read_text().split()
    assert sorted(set(groups), key=int) == ["1", "2", "3"]
    last = job.incidents()[-1]
    assert (last.cause, last.group, last.members) == ("failed", 4, ())


CREEPING = """
import time
import torch
import trainer_runtime as tr

tr.init()
state = tr.State(value=torch.zeros(()))
for _ in state.epochs(1):
    for made, _ in enumerate(state.steps(range(100))):
        if made:
            time.sleep(3600)
        state.commit()
"""


@pytest.mark.long("budget-hangs.txt")
def test_hangs_that_come_with_one_new_step_each_run_out_of_the_budget(failing: Callable[..., Failing]) -> None:
    job = failing("creeping", "--max_restarts=1", "--hang_timeout=3")
    script = job.directory / "creeping.py"
    script.write_text(CREEPING)
    job.start("a", "1", [str(script)])
    assert job.nodes["a"].wait(PATIENCE_S) == 76, job.log_text()
    assert "after step 2 " in job.nodes["a"].text().splitlines()[-1]
    assert [each.step for each in job.incidents() if each.members] == [0, 1]


@pytest.mark.long("test_json_is_printed_by_every_command in integration/test_operator.py")
def test_history_is_json_for_programs(failing: Callable[..., Failing]) -> None:
    """What a program reads is what was recorded."""
    job = failing("kill")
    start_three(job)
    incident = job.incident("failed")
    told = json.loads(job.ask("history", "--json"))
    assert any(each["group"] == incident.group and each["cause"] == "failed" for each in told), told
    job.finish()
