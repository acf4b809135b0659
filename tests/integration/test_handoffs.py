"""Planned changes lose nothing: every step of the training is taken once, whoever comes or goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from cases import some
from integration.conftest import PATIENCE_S, Job

from agent.rehearse.cluster import read_trace, wait_for

Make = Callable[..., Job]


def assert_no_step_is_lost(job: Job, *, changes: int) -> None:
    """Nobody took a step again; what a script does after a commit it does not do after the last one before a change."""
    steps = Counter(line.step for line in read_trace(job.trace))
    assert max(steps.values()) == 1, sorted(step for step, times in steps.items() if times > 1)
    assert len(set(range(1, job.steps + 1)) - steps.keys()) == changes


def test_scaling_up_and_down_loses_no_step(job: Make) -> None:
    running = job()
    running.epochs = 30
    running.join("a", "1")
    group = running.wait_for_step(10)
    running.scale("3")
    running.join("b", "3")
    running.join("c", "3")
    group = running.wait_for_step(1, after_group=group, world=3)
    here = read_trace(running.trace)[-1].step
    running.wait_for_step(here + 5, world=3)
    running.scale("2")
    group = running.wait_for_step(1, after_group=group, world=2)
    assert running.status()["group"] == group
    running.finish()
    assert_no_step_is_lost(running, changes=0)
    logs = [log.read_text() for log in running.directory.glob("**/*rank*.log")]
    assert sum(" from memory\n" in log for log in logs) == 2, "nobody leaves: no checkpoint is needed"


@pytest.mark.long("test_all_nodes_that_are_preempted_at_once_leave_and_the_job_goes_on_later; handoff-drain.txt")
@pytest.mark.parametrize("who", some(["rank 0"], of=["rank 0", "rank 1"]))
def test_a_node_that_is_asked_to_leave_does_so_without_a_lost_step(job: Make, who: str) -> None:
    running = job("--settle=60")  # all of them at once: a later one would be another change
    for name in ("a", "b", "c"):
        running.join(name, "1:3")
    group = running.wait_for_step(10, world=3)
    nodes = running.status()["nodes"]
    leaver = next(n["node_id"] for n in nodes if n["ranks"] == [int(who[-1])])
    running.nodes[leaver].terminate()
    assert running.nodes[leaver].wait(PATIENCE_S) == 0
    running.wait_for_step(1, after_group=group, world=2)
    running.finish()
    assert_no_step_is_lost(running, changes=0)


@pytest.mark.long("integration/test_integrations.py: both nodes are told to leave")
def test_all_nodes_that_are_preempted_at_once_leave_and_the_job_goes_on_later(job: Make) -> None:
    running = job()
    for name in ("a", "b"):
        running.join(name, "2")
    running.wait_for_step(25)
    nodes = list(running.nodes.values())
    for node in nodes:
        node.terminate()
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], running.log_text()
    stopped_at = read_trace(running.trace)[-1].step
    assert stopped_at < running.steps
    for name in ("a", "b"):
        running.join(name, "2")
    running.wait_for_step(stopped_at + 1)
    running.finish()
    assert_no_step_is_lost(running, changes=1)


def test_ranks_leave_as_a_script_does_that_ends(job: Make) -> None:
    """What a script does at its end it does at a handoff."""
    running = job()
    (running.directory / "train.py").write_text(
        "import atexit, time\n"
        "import trainer_runtime as tr\n"
        "tr.init()\n"
        "state = tr.State(save_every=1000)\n"
        "ended = open('ended', 'a', buffering=1)\n"
        "atexit.register(lambda: ended.write(f'atexit {state.step}\\n'))\n"
        "try:\n"
        "    for _ in state.epochs(1):\n"
        "        for _ in state.steps(range(100000)):\n"
        "            time.sleep(0.01)\n"
        "            state.commit()\n"
        "            open('step', 'w').write(str(state.step))\n"
        "finally:\n"
        "    print('last words', end='')\n"
        "    ended.write(f'finally {state.step}\\n')\n"
    )
    node = running.start("a", "1", ["train.py"])
    step, ended = running.directory / "step", running.directory / "ended"
    wait_for(lambda: step.exists() and int(step.read_text() or 0) > 5, PATIENCE_S, "a few steps")
    node.terminate()
    assert node.wait(PATIENCE_S) == 0
    stopped_at = ended.read_text().split()[1]
    assert ended.read_text() == f"finally {stopped_at}\natexit {stopped_at}\n"
    (log,) = running.directory.glob("**/*rank*.log")
    assert "last words" in log.read_text()
