"""All nodes of a job are asked to leave while the ranks cannot save: what the agents' memory holds is saved."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cases import some
from integration.conftest import PATIENCE_S, Job
from integration.evaluating_job import STEPS
from integration.test_operator import ask
from integration.test_snapshots_job import (
    MOST_LOST,
    assert_identical,
    committed,
    look,
    steps_of,
    with_frequent_snapshots,
)

from agent.core.effects import SaveSnapshot
from agent.core.saved_states import StateId
from agent.rehearse.cluster import read_trace, wait_for
from agent.workers import snapshot_saver
from agent.workers.reactor import Reactor
from agent.workers.snapshot_saver import SnapshotSaver
from agent.workers.snapshot_store import SnapshotStore

EVALUATING = Path(__file__).with_name("evaluating_job.py")
SHARDED = Path(__file__).with_name("sharded_job.py")

Make = Callable[..., Job]


def evaluate(job: Job, *, nproc: int = 2) -> None:
    """Start a node, and wait until its ranks evaluate."""
    job.start("a", "1", [str(EVALUATING), str(job.directory)], [f"--nproc_per_node={nproc}"])
    for rank in range(nproc):
        wait_for((job.directory / f"evaluates-0-{rank}").exists, PATIENCE_S, f"the evaluation; {job.log_text()}")


def test_a_node_that_leaves_during_an_evaluation_saves_the_last_step(job: Make) -> None:
    undisturbed, running = job(), with_frequent_snapshots(job, "--handoff_wait=1", "--handoff_timeout=1")
    (undisturbed.directory / "hurry").touch()
    evaluate(undisturbed)
    evaluate(running)
    running.nodes["a"].terminate()
    assert running.nodes["a"].wait(PATIENCE_S) == 0
    text = running.log_text()
    assert f"saving step {STEPS} from memory" in text
    assert "given up" not in text
    (running.directory / "hurry").touch()
    evaluate(running)
    running.finish()
    undisturbed.finish()
    assert f"resumed at step {STEPS} from" in running.log_text()
    for rank in range(2):
        assert_identical(*(each.directory / f"weights-{rank}.pt" for each in (running, undisturbed)))


def test_a_node_with_a_disk_of_its_own_saves_there(job: Make) -> None:
    """The node of rank 0, whose disk had the checkpoints, is lost before."""
    running = with_frequent_snapshots(job, "--handoff_wait=1", "--handoff_timeout=1")
    command = [str(EVALUATING), str(running.directory), "own"]
    for name in ("a", "b"):
        running.start(name, "2", command)
    for rank in range(2):
        wait_for((running.directory / f"evaluates-0-{rank}").exists, PATIENCE_S, running.log_text())
    found = committed(running)
    assert found is not None
    assert (found.node, found.copy.step) == (rank_0_of(running), 30)
    lost, left = ("a", "b") if found.node == "a" else ("b", "a")
    running.nodes[lost].kill()
    wait_for(lambda: running.status()["group"] == 2, PATIENCE_S, running.log_text())
    running.nodes[left].terminate()
    assert running.nodes[left].wait(PATIENCE_S) == 0
    saved = committed(running)
    assert saved is not None
    assert saved.node == left, running.log_text()
    assert 30 < saved.copy.step <= STEPS, running.log_text()
    assert (running.directory / f"disk-{left}" / saved.name).is_dir()
    (running.directory / "hurry").touch()
    for name in ("a", "b"):
        running.start(name, "2", command)
    running.finish()
    assert f"resumed at step {saved.copy.step} from {running.directory}/disk-{left}" in running.log_text()


@pytest.mark.parametrize("is_waiting", [False, True], ids=["ranks evaluate", "the job waits for a node"])
def test_a_job_that_is_stopped_while_no_rank_can_save_saves_from_memory(job: Make, *, is_waiting: bool) -> None:
    undisturbed, running = job(), with_frequent_snapshots(job, "--handoff_wait=1", "--handoff_timeout=1")

    def start(job: Job) -> None:
        for name in ("a", "b"):
            job.start(name, "2", [str(EVALUATING), str(job.directory)])

    (undisturbed.directory / "hurry").touch()
    for each in (undisturbed, running):
        start(each)
    for rank in range(2):
        wait_for((running.directory / f"evaluates-0-{rank}").exists, PATIENCE_S, running.log_text())
    if is_waiting:
        running.nodes["b"].kill()
        wait_for(lambda: running.status()["group"] == 2, PATIENCE_S, running.log_text())
    stopped = ask(running, "stop", f"--wait={PATIENCE_S - 30}", "--yes")
    assert stopped.code == 0, stopped
    assert {name: node.wait(PATIENCE_S) for name, node in running.nodes.items()}["a"] == 0
    found = committed(running)
    assert found is not None, running.log_text()
    assert STEPS - MOST_LOST <= found.copy.step <= STEPS
    assert ask(running, "reset", "--yes").code == 0
    (running.directory / "hurry").touch()
    start(running)
    running.finish()
    undisturbed.finish()
    assert f"resumed at step {found.copy.step} from" in running.log_text()
    for rank in range(2):
        assert_identical(*(each.directory / f"weights-{rank}.pt" for each in (running, undisturbed)))


def test_a_job_that_fails_for_good_saves_from_memory_and_continues_after_reset(
    job: Make, reference: Callable[[int], Path]
) -> None:
    running = with_frequent_snapshots(job, "--max_restarts=0")
    for name in ("a", "b"):
        running.join(name, "2")
    running.wait_for_step(40)
    running.nodes["b"].kill_worker()
    assert {name: node.wait(PATIENCE_S) for name, node in running.nodes.items()} == {"a": 137, "b": 137}
    found, reached = committed(running), read_trace(running.trace)[-1].step
    assert found is not None, running.log_text()
    assert reached - MOST_LOST <= found.copy.step <= reached, running.log_text()
    assert ask(running, "reset", "--yes").code == 0
    for name in ("a", "b"):
        running.join(name, "2")
    running.finish()
    assert f"resumed at step {found.copy.step} from" in "".join(node.text() for node in running.nodes.values())
    assert_identical(running.weights, reference(running.epochs))


def rank_0_of(job: Job) -> str:
    """The node of rank 0."""
    return str(next(node["node_id"] for node in job.status()["nodes"] if 0 in node["ranks"]))


def test_an_agent_does_not_wait_for_a_process_that_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk hangs."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(snapshot_saver, "_PROGRAM", "sleeper")
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    events: list[object] = []
    reactor = Reactor("test")
    saver = SnapshotSaver(SnapshotStore(events.append, lambda *_: None), reactor, events.append)
    saver.begin(SaveSnapshot(StateId(run="r", group=1, step=1), 1, None), {"PYTHONPATH": str(tmp_path)})
    assert saver._running is not None
    process = saver._running.process
    saver.close()
    reactor.close()
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)


def signal_all(job: Job) -> None:
    """Send SIGTERM to all processes of all nodes, as systemd and batch systems do."""
    for node in job.nodes.values():
        for process in [*node.descendants(), psutil.Process(node.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("script", some(["sharded"], of=["sharded", "digits"]))
def test_a_signal_to_all_processes_of_all_nodes_loses_what_no_snapshot_has(job: Make, script: str) -> None:
    """There is a snapshot of every second step here, and the last one may not be complete."""
    undisturbed, running = job(), with_frequent_snapshots(job)

    def start(job: Job, step_time_s: str) -> None:
        for name in ("a", "b"):
            if script == "sharded":
                job.start(name, "2", [str(SHARDED), str(job.directory), "60", step_time_s])
            else:
                job.join(name, "2")

    start(running, "0.2")
    running.wait_for_step(25, world=2)
    signal_all(running)
    assert {node.wait(PATIENCE_S) for node in running.nodes.values()} == {0}, running.log_text()
    reached, saved = max(steps_of(running, 1)), committed(running)
    assert saved is not None
    assert reached - MOST_LOST <= saved.copy.step <= reached, running.log_text()
    start(running, "0")
    start(undisturbed, "0")
    running.finish()
    undisturbed.finish()
    assert_identical(running.weights, undisturbed.weights)
    assert min(line.step for line in read_trace(running.trace) if line.group > 1) == saved.copy.step + 1


def test_a_directory_that_cannot_be_made_gives_up_the_steps_and_says_so(job: Make) -> None:
    running = with_frequent_snapshots(job, "--handoff_wait=1", "--handoff_timeout=1")
    evaluate(running, nproc=1)
    blocked = running.directory / "checkpoints"
    blocked.touch()  # nothing can be written below a file
    running.nodes["a"].terminate()
    assert running.nodes["a"].wait(PATIENCE_S) == 0
    text = running.log_text()
    assert f"step {STEPS} was NOT saved" in text
    assert f"{STEPS} steps up to step {STEPS} given up: there is no checkpoint" in text
    assert "Traceback" not in text
    assert look(running).checkpoint is None


def test_a_second_signal_ends_the_agent_while_it_saves(job: Make) -> None:
    running = with_frequent_snapshots(job, "--handoff_wait=1", "--handoff_timeout=1")
    evaluate(running, nproc=1)
    running.nodes["a"].terminate()
    wait_for(lambda: "saving step" in running.log_text(), PATIENCE_S, "the save")
    left = running.nodes["a"].descendants()
    running.nodes["a"].terminate()
    assert running.nodes["a"].wait(PATIENCE_S) == 0
    assert "given up" in running.log_text()
    assert not psutil.wait_procs(left, PATIENCE_S)[1], "and the process that wrote is gone"
