"""Real jobs, broken in the middle of training; what counts is the result: the very weights of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import some
from integration.conftest import PATIENCE_S, Job

from agent.rehearse.cluster import read_trace, wait_for

Make = Callable[..., Job]
Reference = Callable[[int], Path]


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference between two files of weights, relative to the largest weight."""
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[k] - second[k]).abs().max() / second[k].abs().max()) for k in first)


def assert_identical(one: Path, other: Path) -> None:
    assert largest_difference(one, other) == 0.0


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_twenty_killed_workers_are_twenty_recoveries(job: Make, reference: Reference) -> None:
    """Any rank, any moment; each time the training goes on, and it ends with the same weights."""
    running = job("--max_restarts=20", "--progress_window=0.1")
    running.epochs, running.step_time_s = 30, 0.03
    chance = random.Random(20)
    for name in ("a", "b"):
        running.join(name, "2")
    group = running.wait_for_step(100)  # so that it is known what a step takes
    for _ in range(20):
        here = read_trace(running.trace)[-1].step
        running.wait_for_step(min(here + chance.randrange(1, 15), running.steps - 1), after_group=group - 1)
        running.nodes[chance.choice("ab")].kill_worker()
        group = running.wait_for_step(1, after_group=group)
    assert running.status()["group"] == 21, "a kill is one change of group, no more"
    running.finish()
    assert_identical(running.weights, reference(running.epochs))


@pytest.mark.long("test_killed_container in chaos/test_compose.py")
@pytest.mark.parametrize("victim", some(["rank 0"], of=["rank 0", "rank 1", "leader"]))
def test_a_lost_node_is_waited_for_and_replaced_by_another(job: Make, reference: Reference, victim: str) -> None:
    running = job()
    running.join("m", "2")
    running.join("n", "2")
    group = running.wait_for_step(15)
    nodes = running.status()["nodes"]
    roles = {
        "rank 0": next(n["node_id"] for n in nodes if n["ranks"] == [0]),
        "rank 1": next(n["node_id"] for n in nodes if n["ranks"] == [1]),
        "leader": next(n["node_id"] for n in nodes if n["is_leader"]),
    }
    lost = roles[victim]
    running.nodes[lost].kill()
    reason = running.wait_for_state("waiting")
    assert "waiting for 1 of 2 nodes" in reason
    assert f"lost {lost}" in reason
    running.join("a-replacement", "2")
    running.wait_for_step(1, after_group=group)
    survivor = next(n["node_id"] for n in nodes if n["node_id"] != lost)
    ranks = {n["node_id"]: n["ranks"] for n in running.status()["nodes"]}
    assert ranks == {survivor: [0], "a-replacement": [1]}
    running.finish()
    assert_identical(running.weights, reference(running.epochs))


@pytest.mark.long(
    "test_an_elastic_job_goes_on_and_takes_newcomers_last in simulation/test_seeded_scenarios.py; chaos/test_compose.py"
)
def test_an_elastic_job_goes_on_with_the_rest_and_a_newcomer_comes_last(job: Make, reference: Reference) -> None:
    running = job()
    for name in ("m", "n", "o"):
        running.join(name, "1:3")
    group = running.wait_for_step(10, world=3)
    before = {n["node_id"]: n["ranks"] for n in running.status()["nodes"]}
    first = next(name for name, ranks in before.items() if ranks == [0])
    lost = next(name for name, ranks in before.items() if ranks == [2])
    running.nodes[lost].kill()
    group = running.wait_for_step(1, after_group=group, world=2)
    running.join("a", "1:3")
    running.wait_for_step(1, after_group=group, world=3)
    after = {n["node_id"]: n["ranks"] for n in running.status()["nodes"]}
    assert after[first] == [0], "rank 0 stays where it is"
    assert after["a"] == [2], "though its name sorts first"
    running.finish()
    assert largest_difference(running.weights, reference(running.epochs)) < 1e-3, (
        "another order of summation, nothing else"
    )


@pytest.mark.long("integration/test_handoffs.py")
def test_scale_up_and_down_while_training(job: Make, reference: Reference) -> None:
    running = job()
    running.join("a", "2")
    running.join("b", "2")
    group = running.wait_for_step(10)
    assert "np 2 -> 3" in running.scale("3")
    running.join("c", "2")
    group = running.wait_for_step(1, after_group=group, world=3)
    assert "the job's np is 3; --np=2 given here is not used" in running.nodes["c"].text()
    running.scale("2")
    group = running.wait_for_step(1, after_group=group, world=2)
    status = running.status()
    assert (status["np"], status["cause"]) == ("2", "scale: np is now 2")
    assert {n["node_id"]: n["ranks"] for n in status["nodes"]}["c"] == [], "the newest is a spare now"
    running.finish()
    assert largest_difference(running.weights, reference(running.epochs)) < 1e-3


@pytest.mark.long("fails-again-and-again.txt, host-vanishes-beside-a-spare.txt")
def test_a_spare_takes_the_place_of_a_lost_node(job: Make, reference: Reference) -> None:
    running = job()
    running.join("a", "2")
    running.join("b", "2")
    group = running.wait_for_step(5)
    running.join("spare", "2")
    wait_for(lambda: len(running.status()["nodes"]) == 3, PATIENCE_S, "the spare")
    running.nodes["b"].kill()
    running.wait_for_step(1, after_group=group, world=2)
    running.finish()
    assert_identical(running.weights, reference(running.epochs))


@pytest.mark.long("integration/test_logs.py")
def test_logs_of_every_group_are_kept(job: Make) -> None:
    running = job()
    running.join("a", "1")
    group = running.wait_for_step(5)
    running.nodes["a"].kill_worker()
    running.wait_for_step(5, after_group=group)
    running.finish()
    logs = sorted(running.directory.glob("log/*/*/group-*/rank-00000.a.log"))
    assert [log.parent.name for log in logs] == ["group-000001", "group-000002"]
    assert all("workers, from step" in log.read_text() for log in logs)
