"""Real jobs that are broken in the middle of training, and go on from what their agents hold in memory.

Every second step is copied here: snapshots may take any share of time.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from integration.conftest import PATIENCE_S, Job, open_store
from machines import BIN

from agent.core.saved_states import Checkpoint
from agent.core.view import ClusterView
from agent.rehearse.cluster import TraceLine, read_trace, wait_for
from agent.store.keys import JobKeys, view_of

Make = Callable[..., Job]
Reference = Callable[[int], Path]
SAVE_EVERY = 10
"""Steps between two checkpoints of the digits example."""
MOST_LOST = 3
"""With a snapshot after every second step, if a rank dies before its last one is complete."""


def assert_identical(one: Path, other: Path) -> None:
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def with_frequent_snapshots(job: Make, *options: str) -> Job:
    """A job that copies every second step, however long that takes."""
    running = job("--snapshot_overhead=100", *options)
    running.environ["TEST_SNAPSHOT_OVERHEAD"] = "1e6"
    return running


def look(running: Job) -> ClusterView:
    """The job's keys."""
    store, keys = open_store(running.server), JobKeys(running.job_id)
    try:
        return view_of(store.read(keys.whole()), keys, is_whole=True)
    finally:
        store.close()


def committed(running: Job) -> Checkpoint | None:
    """The checkpoint that counts, as it is in etcd."""
    found = look(running).checkpoint
    return found.value if found is not None else None


def steps_of(running: Job, group: int) -> list[int]:
    """The steps that a group has committed, as far as they were noted."""
    return [line.step for line in read_trace(running.trace) if line.group == group]


def away_from_checkpoints(line: TraceLine) -> bool:
    """The last one is some steps away, and so would be what is lost if training went back to it."""
    return 4 <= line.step % SAVE_EVERY <= 8


def wait_for_middle(running: Job, group: int) -> None:
    """Wait until a group has just made a step that is far from any checkpoint, and has made several."""

    def is_there() -> bool:
        last = (read_trace(running.trace) or [None])[-1]
        return (
            last is not None
            and last.group == group
            and away_from_checkpoints(last)
            and len(steps_of(running, group)) > SAVE_EVERY
        )

    wait_for(is_there, PATIENCE_S, f"the middle of group {group}; {running.log_text()}")


def lost_steps(running: Job, group: int) -> int:
    """How many steps of the group before this one repeated."""
    return max(steps_of(running, group - 1)) + 1 - min(steps_of(running, group))


def test_killed_workers_lose_three_steps_at_most_and_change_no_bit(job: Make, reference: Reference) -> None:
    running = with_frequent_snapshots(job)
    running.epochs, running.step_time_s = 5, 0.3
    for name in ("a", "b"):
        running.join(name, "2")
    for group, victim in enumerate("ba", start=1):
        wait_for_middle(running, group)
        running.nodes[victim].kill_worker()
        running.wait_for_step(1, after_group=group)
        assert lost_steps(running, group + 1) <= MOST_LOST, running.log_text()
    running.finish()
    assert_identical(running.weights, reference(running.epochs))
    assert "from memory" in running.log_text()
    newest = committed(running)
    assert newest is not None
    assert (newest.copy.group, newest.copy.step) == (3, running.steps), "the fence lets the last group's saves through"
    directories = {path.name for path in (running.directory / "checkpoints" / running.job_id).iterdir()}
    assert newest.name in directories
    assert len([name for name in directories if not name.startswith(".")]) == 2, "and older ones are deleted as usual"


def test_a_lost_node_loses_three_steps_at_most_and_its_successor_is_given_the_copy(
    job: Make, reference: Reference
) -> None:
    """Of what the lost node's rank alone had, its neighbour has the last; the spare has nothing at all."""
    running = with_frequent_snapshots(job)
    running.epochs, running.step_time_s = 8, 0.3
    for name in ("a", "b"):
        running.join(name, "2")
    wait_for_middle(running, 1)
    running.join("spare", "2")
    wait_for(lambda: len(running.status()["nodes"]) == 3, PATIENCE_S, "the spare")
    wait_for_middle(running, 1)
    running.nodes["a"].kill()  # rank 0
    running.wait_for_step(1, after_group=1, world=2)
    assert lost_steps(running, 2) <= MOST_LOST, running.log_text()
    running.finish()
    assert_identical(running.weights, reference(running.epochs))


@pytest.mark.long("no test in every run; scripts/chaos all-killed")
def test_all_nodes_lost_begin_from_the_last_checkpoint_of_a_group_that_began_from_memory(
    job: Make, reference: Reference
) -> None:
    running = with_frequent_snapshots(job)
    running.epochs, running.step_time_s = 8, 0.3
    for name in ("a", "b"):
        running.join(name, "2")
    wait_for_middle(running, 1)
    running.nodes["b"].kill_worker()
    wait_for_middle(running, 2)
    wait_for(
        lambda: (saved := committed(running)) is not None and saved.copy.group == 2,
        PATIENCE_S,
        f"a checkpoint of group 2; {running.log_text()}",
    )
    for name in ("a", "b"):
        running.nodes[name].kill()
    saved = committed(running)
    assert saved is not None
    assert saved.copy.group == 2
    for name in ("a", "b"):
        running.join(name, "2")
    group = running.wait_for_step(1, after_group=2)
    assert min(steps_of(running, group)) == saved.copy.step + 1
    running.finish()
    assert_identical(running.weights, reference(running.epochs))


@pytest.mark.long("sibling-snapshot.txt")
def test_a_copy_beside_the_history_does_not_win_though_it_is_further(job: Make) -> None:
    """An agent that was stopped comes back: its rank has trained on alone, far ahead of the group that followed."""
    running = with_frequent_snapshots(job, "--detect_within=8")
    running.epochs, running.step_time_s = 1000, 0.02
    running.join("a", "1")
    running.wait_for_step(15)
    running.join("b", "1")
    wait_for(lambda: len(running.status()["nodes"]) == 2, PATIENCE_S, "the spare")
    os.kill(running.nodes["a"].process.pid, signal.SIGSTOP)
    group = running.wait_for_step(1, after_group=1)
    wait_for(lambda: len(steps_of(running, group)) > 2 * SAVE_EVERY, PATIENCE_S, f"more steps; {running.log_text()}")
    os.kill(running.nodes["a"].process.pid, signal.SIGCONT)
    wait_for(lambda: len(running.status()["nodes"]) == 2, PATIENCE_S, f"the stopped one again; {running.log_text()}")
    running.nodes["b"].kill()
    aside, ours = max(steps_of(running, 1)), max(steps_of(running, group))
    assert aside > ours, "else this shows nothing"
    saved = committed(running)
    assert saved is not None
    last = running.wait_for_step(1, after_group=group)
    assert saved.copy.group == group
    (told,) = look(running).inventories
    newest = max(held.copy.step for held in told.copies if held.copy.group == 1 and held.has_common)
    assert newest >= aside - MOST_LOST
    assert min(steps_of(running, last)) == saved.copy.step + 1, running.log_text()


HOOK_ON_RANK_0 = """
import torch
import trainer_runtime as tr

tr.init()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
state = tr.State(model=net)
if tr.is_main():
    state.on_load(lambda _path: None)
state.restore()
for _ in range(3):
    net(torch.ones(2, 3)).sum().backward()
    state.commit()
"""


def test_all_ranks_go_by_rank_0_as_to_whether_there_are_snapshots(tmp_path: Path) -> None:
    """Its hooks keep it from taking any, and the others do not wait for what it would have settled about them."""
    script = tmp_path / "train.py"
    script.write_text(HOOK_ON_RANK_0, encoding="utf-8")
    command = [str(BIN / "elastic-agent"), "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("no snapshots in memory: the script resumes from files of its own, too (state.on_load)") == 1
