"""Many faults and changes of size at random, one after another, of one job whose script uses `State.run`."""

from __future__ import annotations

import functools
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from integration.conftest import PATIENCE_S, Job
from integration.moving_job import SAMPLES, STEPS_PER_EPOCH
from integration.test_moves import WARM_WITHIN_S, are_set_up, command, ledgers, pid_of

from agent.rehearse.cluster import read_trace, wait_for

CHANGES = 50
EPOCHS = 2500
STEP_TIME_S = 0.05
MANY = "--max_restarts=200"
WITHIN_S = 2400.0
MOVES = 300


@pytest.mark.timeout(WITHIN_S)
@pytest.mark.long("test_moves.py: each kind of change by itself")
@pytest.mark.parametrize("seed", [1, 2])
def test_lost_ranks_are_replaced_at_random_times(job: Callable[..., Job], alone: Alone, seed: int) -> None:
    """Two nodes that must both be there: only the killed rank gets another process, and the bits are the same."""
    chance = random.Random(seed)
    running = job(MANY, "--standby=hot")
    running.epochs, running.step_time_s = EPOCHS, STEP_TIME_S
    for name in ("a", "b"):
        running.start(name, "2", command(running))
    group = running.wait_for_step(8, world=2)
    for _ in range(CHANGES):
        wait_for(lambda: are_set_up(running), WARM_WITHIN_S, "processes that have set up")
        lost, stays = chance.sample(["a", "b"], 2)
        group = wait_for_another_step(running, chance.randrange(1, 4))
        pids = {name: pid_of(running, name) for name in ("a", "b")}
        running.nodes[lost].kill_worker()
        group = running.wait_for_step(1, after_group=group, world=2)
        assert pid_of(running, stays) == pids[stays]
        assert pid_of(running, lost) != pids[lost]
    running.finish()
    for name, tensor in torch.load(running.weights).items():
        assert torch.equal(tensor, alone(2)[name])


@pytest.mark.timeout(WITHIN_S)
@pytest.mark.long("test_moves.py: each kind of change by itself")
@pytest.mark.parametrize("seed", [1, 2])
def test_nodes_come_and_go_at_random_times(job: Callable[..., Job], alone: Alone, seed: int) -> None:
    """Three nodes, of which one to three must be there; each sample counts once an epoch in what became the result."""
    chance = random.Random(seed)
    running = job(MANY, "--hang_timeout=8")
    running.epochs, running.step_time_s = EPOCHS, STEP_TIME_S
    names = ["a", "b", "c"]
    for name in names:
        running.start(name, "1:3", command(running, setup_s=1.0))
    group = running.wait_for_step(8, world=3)
    for _ in range(CHANGES):
        what = chance.choice(["worker", "worker", "stopped", "node", "leave", "scale"])
        victim = chance.choice(names)
        group = wait_for_another_step(running, chance.randrange(1, 4))
        before = {name: pid_of(running, name) for name in names}
        if what == "scale":
            running.scale(str(chance.choice([1, 2])))
            group = running.wait_for_step(1, after_group=group)
            running.scale("1:3")
        elif what in {"node", "leave"}:
            running.nodes[victim].kill() if what == "node" else running.nodes[victim].terminate()
            running.nodes[victim].wait(PATIENCE_S)
            group = running.wait_for_step(1, after_group=group)
            running.start(victim, "1:3", command(running, setup_s=1.0))
        elif what == "worker":
            running.nodes[victim].kill_worker()
        else:
            running.nodes[victim].workers()[0].send_signal(signal.SIGSTOP)
        group = running.wait_for_step(1, after_group=group, world=3)
        if what != "scale":
            assert {name: pid_of(running, name) for name in names if name != victim} == {
                name: pid for name, pid in before.items() if name != victim
            }, (what, victim)
    running.finish()
    assert_each_sample_counts_once(running)
    for name, tensor in torch.load(running.weights).items():
        torch.testing.assert_close(tensor, alone(1)[name], rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(WITHIN_S)
@pytest.mark.long("test_moves.py: a few moves of each process")
def test_what_a_process_holds_does_not_grow_with_its_moves(job: Callable[..., Job]) -> None:
    """One of two nodes leaves and comes back, again and again."""
    running = job()
    running.epochs, running.step_time_s = 100 * EPOCHS, STEP_TIME_S
    for name in ("a", "b"):
        running.start(name, "1:2", command(running))
    group = running.wait_for_step(3, world=2)
    stays = next(node["node_id"] for node in running.status()["nodes"] if node["ranks"] == [0])
    process = psutil.Process(pid_of(running, stays))
    held = []
    for move in range(MOVES):
        running.scale("1" if move % 2 == 0 else "1:2")
        group = running.wait_for_step(1, after_group=group, world=1 + move % 2)
        with process.oneshot():
            held.append((process.memory_info().rss >> 20, process.num_threads(), process.num_fds()))
    assert pid_of(running, stays) == process.pid
    keys = [line["keys"] for line in ledgers(running)[process.pid]]
    print("MB, threads, descriptors at each tenth move", held[::10], "keys at most", max(keys))
    rest = held[10:]
    assert max(rss for rss, _, _ in rest) <= 1.05 * rest[0][0]
    assert max(rss for rss, _, _ in rest[-100:]) <= 1.01 * max(rss for rss, _, _ in rest[-200:-100])
    assert max(threads for _, threads, _ in rest) <= 2 + rest[0][1]
    descriptors = [each for _, _, each in rest]  # in the middle of a move some more are open
    assert min(descriptors[-20:]) <= 2 + min(descriptors[:20])
    assert max(keys) < 5000
    for node in running.living():
        node.kill()


Alone = Callable[[int], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, etcd: object) -> Alone:
    """The weights of an undisturbed run, by number of nodes."""

    @functools.cache
    def weights(nodes: int) -> dict[str, torch.Tensor]:
        directory = Path(tmp_path_factory.mktemp("undisturbed"))
        with Job(directory, etcd.endpoint, directory.name) as undisturbed:
            undisturbed.epochs, undisturbed.step_time_s = EPOCHS, 0.0
            undisturbed.hurry.touch()
            for name in "abc"[:nodes]:
                undisturbed.start(name, str(nodes), command(undisturbed))
            undisturbed.finish()
            return dict(torch.load(undisturbed.weights))

    return weights


def wait_for_another_step(job: Job, steps: int) -> int:
    """Return the number of the group that makes it."""
    last = read_trace(job.trace)[-1].step
    wait_for(lambda: read_trace(job.trace)[-1].step >= last + steps, PATIENCE_S, f"step {last + steps}")
    return read_trace(job.trace)[-1].group


def assert_each_sample_counts_once(job: Job) -> None:
    """Of each step that was taken more than once, the last time counts."""
    lines = [line for ledger in ledgers(job).values() for line in ledger]
    last = {
        step: max(line["group"] for line in lines if line["step"] == step) for step in {line["step"] for line in lines}
    }
    epochs: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(job.epochs)}
    for line in lines:
        if line["group"] == last[line["step"]]:
            epochs[line["epoch"]].update(line["indices"])
    assert set(last) == set(range(1, STEPS_PER_EPOCH * job.epochs + 1))
    assert all(counts == Counter(range(SAMPLES)) for counts in epochs.values())
