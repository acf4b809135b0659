"""A node's container is killed in the middle of training: the whole product, as a user runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chaos.conftest import ComposeJob, MakeJob, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

STEPS = 90
KILL_AFTER_STEP = 25
STEP_TIME_S = 0.15
LEASE_S = 59.0


def replace(job: ComposeJob, victim: str) -> None:
    """Another machine takes the place: a new container, which has another host name."""
    docker("rm", "-f", "-v", victim)
    job.up(nodes=2)
    assert victim not in job.nodes()


def restart(_job: ComposeJob, victim: str) -> None:
    """The machine comes back under its name."""
    docker("start", victim)


@pytest.mark.parametrize(
    ("rank", "bring_back"),
    [
        pytest.param(0, replace, id="master-is-replaced"),
        pytest.param(1, restart, id="other-comes-back", marks=pytest.mark.long("the next test; scripts/chaos")),
    ],
)
def test_killed_container(
    make_job: MakeJob,
    reference: Path,
    rank: int,
    bring_back: Callable[[ComposeJob, str], None],
) -> None:
    """The survivor waits, goes on when a node is there again, and ends with the weights of an undisturbed run."""
    job = make_job(STEP_TIME_S)
    job.up(nodes=2)
    job.wait_for_step(KILL_AFTER_STEP)
    victim = job.node_of_rank(rank)
    (survivor,) = set(job.running()) - {victim}
    docker("kill", "-s", "KILL", victim)

    reason = job.wait_for_state("waiting")
    assert "1 of 2" in reason, reason
    assert job.running() == [survivor]
    before = job.trace()
    assert before[-1].step < STEPS, "the kill came too late to disturb anything"

    bring_back(job, victim)
    assert job.finish() == [0, 0], job.log_text()

    after = job.trace()[len(before) :]
    assert {line.group for line in after}.isdisjoint(line.group for line in before)
    assert after[0].step > 1, "the job began again from nothing"
    assert [line.step for line in after] == list(range(after[0].step, STEPS + 1))
    assert after[0].step <= before[-1].step + 1, "steps were left out"
    first_losses = {line.step: line.loss for line in before}
    assert not [line for line in after if first_losses.get(line.step, line.loss) != line.loss], (
        "repeated with another loss"
    )

    weights, expected = torch.load(job.fetch("weights.pt")), torch.load(reference)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected), "not bit-identical"


def test_a_container_that_is_started_again_does_not_wait_for_its_own_lease(make_job: MakeJob) -> None:
    """Nobody else is there to evict the dead one: its port, which is refused, says that it is gone."""
    job = make_job(STEP_TIME_S, 1, detect_within_s=60)
    job.up(nodes=1)
    job.wait_for_step(KILL_AFTER_STEP)
    (node,) = job.running()
    docker("kill", "-s", "KILL", node)
    docker("start", node)
    assert job.joined_after(node) < LEASE_S / 2
    assert job.finish() == [0], job.log_text()
    steps = [line.step for line in job.trace()]
    assert steps[-1] == STEPS
