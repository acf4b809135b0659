"""When an agent or a guardian dies, however it dies, everything that its workers started dies with it."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
from integration.conftest import PATIENCE_S, Job
from waiting import freeze, has_ended

from agent.rehearse.cluster import LocalNode, wait_for

FAMILY = """
import os, subprocess, sys, time

def record(kind):
    with open(f"pids-{os.environ['ELASTIC_AGENT_GROUP']}", "a") as file:
        file.write(f"{kind} {os.getpid()}\\n")
    while True:
        time.sleep(60)

if len(sys.argv) > 1:
    record(sys.argv[1])
subprocess.Popen([sys.executable, __file__, "child"])
subprocess.Popen([sys.executable, __file__, "session"], start_new_session=True)
if os.fork() == 0:                      # a daemon: its parent is gone, its session is its own
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, __file__, "daemon"])
    os._exit(0)
record("worker")
"""


def family_of(job: Job, group: int) -> dict[str, int]:
    """Wait until all four have told their pids."""
    path = job.directory / f"pids-{group}"

    def told() -> dict[str, int] | None:
        pids = dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
        return {kind: int(pid) for kind, pid in pids.items()} if len(pids) == 4 else None

    found: dict[str, int] = wait_for(told, PATIENCE_S, f"the family of group {group}; {job.log_text()}")
    return found


def assert_gone(family: dict[str, int]) -> None:
    def living() -> dict[str, int]:
        return {kind: pid for kind, pid in family.items() if not has_ended(pid)}

    wait_for(lambda: not living(), PATIENCE_S, f"{living()} to be gone")


@pytest.fixture
def family_job(job: Callable[..., Job]) -> Job:
    running = job()
    (running.directory / "family.py").write_text(FAMILY)
    return running


def start(job: Job) -> LocalNode:
    return job.start("a", "1", [str(job.directory / "family.py")])


def test_a_killed_agent_leaves_nothing_behind(family_job: Job) -> None:
    node = start(family_job)
    family = family_of(family_job, 1)
    guardians = {f"guardian {i}": process.pid for i, process in enumerate(node.guardians())}
    assert guardians
    node.process.kill()
    node.process.wait()
    assert_gone(family | guardians)


def test_stopped_processes_are_continued_and_none_outlives_its_agent(family_job: Job) -> None:
    """The guardian and the page's process: no descriptor tells of that."""
    node = family_job.start("a", "1", [str(family_job.directory / "family.py")], options=["--http=0"])
    family = family_of(family_job, 1)
    page = [child for child in psutil.Process(node.process.pid).children() if "agent.web" in child.cmdline()]
    assert len(page) == 1
    children = [*node.guardians(), *page]
    assert len(children) > 1
    for child in children:
        child.suspend()
        told = f"process {child.pid} was stopped by somebody, and goes on"
        wait_for(lambda told=told: told in node.text(), PATIENCE_S, told)
    wait_for(lambda: not any(map(_is_stopped, children)), PATIENCE_S, "all to go on")
    freeze(node.process.pid)
    for child in children:
        freeze(child.pid)
    node.process.kill()
    node.process.wait()
    assert_gone(family | {f"child {child.pid}": child.pid for child in children})


def _is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


def test_a_killed_guardian_leaves_nothing_behind_and_the_job_goes_on(family_job: Job) -> None:
    node = start(family_job)
    family = family_of(family_job, 1)
    node.guardians()[0].kill()
    assert_gone(family)
    family_of(family_job, 2)
    assert node.process.poll() is None


def test_a_killed_worker_takes_its_descendants_along(family_job: Job) -> None:
    start(family_job)
    family = family_of(family_job, 1)
    psutil.Process(family["worker"]).kill()
    assert_gone(family)
    family_of(family_job, 2)


def test_an_agent_that_is_asked_to_leave_takes_everything_along(family_job: Job) -> None:
    node = start(family_job)
    family = family_of(family_job, 1)
    node.terminate()
    assert node.wait(PATIENCE_S) == 0
    assert_gone(family)


@pytest.mark.long("simulation: an agent that is started again at once")
def test_an_agent_restarted_at_once_takes_its_place_back(job: Callable[..., Job]) -> None:
    """Without waiting for its own old lease: pids on one host can be looked at."""
    running = job()
    running.join("a", "2")
    running.join("b", "2")
    group = running.wait_for_step(5)
    running.nodes["a"].process.kill()
    running.nodes["a"].process.wait()
    running.join("a", "2")
    running.wait_for_step(1, after_group=group)
    assert {n["node_id"] for n in running.status()["nodes"]} == {"a", "b"}
    running.finish()
