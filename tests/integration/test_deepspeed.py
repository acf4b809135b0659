"""Jobs whose script uses DeepSpeed: they go on from memory and from checkpoints, and no bit changes.

DeepSpeed is not among the packages for tests. `DS_BUILD_OPS=0 DS_ACCELERATOR=cpu .venv/bin/python -m pip install
deepspeed==0.19.8` installs it; the tests then need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cases import some
from integration.conftest import PATIENCE_S, Job
from integration.test_snapshots_job import (
    MOST_LOST,
    assert_identical,
    away_from_checkpoints,
    committed,
    lost_steps,
    steps_of,
    with_frequent_snapshots,
)
from ranks import run

from agent.rehearse.cluster import read_trace, wait_for

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: see the module")

JOB = Path(__file__).with_name("deepspeed_job.py")
STEPS = 100

Make = Callable[..., Job]

CASES: list[Any] = [(stage, 2, "fp32") for stage in range(4)]
CASES += [(stage, 1, "bf16") for stage in range(4)]  # DeepSpeed refuses fp16 on most CPUs


def losses(job: Job, rank: int) -> dict[int, float]:
    """The loss of each step, as the last group that made it had it."""
    path = job.trace if rank == 0 else job.directory / f"trace-{rank}.jsonl"
    return {line.step: line.loss for line in read_trace(path)}


def begin(job: Job, step_time_s: str, *options: str) -> None:
    """Start two nodes."""
    for name in ("a", "b"):
        job.start(name, "2", [str(JOB), str(job.directory), str(STEPS), step_time_s, *options])


@pytest.mark.parametrize(("stage", "accumulation", "dtype"), some([(2, 2, "fp32"), (3, 2, "fp32")], of=CASES))
def test_killed_workers_and_agents_change_no_bit(job: Make, stage: int, accumulation: int, dtype: str) -> None:
    """A worker is killed, then both agents: the job goes on from memory, and then from the last checkpoint."""
    options = (str(stage), str(accumulation), dtype)
    undisturbed, running = job(), with_frequent_snapshots(job, "--max_restarts=2")
    begin(undisturbed, "0", *options)
    begin(running, "0.15", *options)
    running.wait_for_step(25, world=2)
    wait_for(lambda: away_from_checkpoints(read_trace(running.trace)[-1]), 60, "a step between two checkpoints")
    running.nodes["b"].kill_worker()
    group = running.wait_for_step(1, after_group=1, world=2)
    assert lost_steps(running, group) <= MOST_LOST, running.log_text()
    assert "from memory" in running.log_text()
    wait_for(
        lambda: (saved := committed(running)) is not None and saved.copy.group == group,
        60,
        f"a checkpoint of group {group}; {running.log_text()}",
    )
    for name in ("a", "b"):
        running.nodes[name].kill()
    saved = committed(running)
    assert saved is not None
    begin(running, "0.15", *options)
    group = running.wait_for_step(1, after_group=group, world=2)
    assert min(steps_of(running, group)) == saved.copy.step + 1
    running.finish()
    undisturbed.finish()
    for rank, name in enumerate(("weights.pt", "weights-1.pt")):
        assert losses(running, rank) == losses(undisturbed, rank)
        assert_identical(running.directory / name, undisturbed.directory / name)


def test_another_number_of_ranks_is_refused_in_one_line(job: Make) -> None:
    running = with_frequent_snapshots(job)
    begin(running, "0.15", "2")
    running.wait_for_step(5, world=2)
    running.scale("1")
    codes = [node.wait(PATIENCE_S) for node in running.nodes.values()]
    assert all(codes), running.log_text()
    said = (
        "State cannot restore engine: 2 ranks saved what DeepSpeed has divided among them, and this group has 1; train"
    )
    shown = [line for line in running.log_text().splitlines() if said in line and line.startswith("[rank0]")]
    assert len(shown) == 1, running.log_text()
    assert {line.world for line in read_trace(running.trace)} == {2}


def test_a_job_that_was_refused_another_number_of_ranks_goes_on_with_the_right_one(job: Make) -> None:
    running = with_frequent_snapshots(job)
    begin(running, "0.15", "2")
    group = running.wait_for_step(5, world=2)
    running.scale("1")
    assert all(node.wait(PATIENCE_S) for node in running.nodes.values())
    begin(running, "0.15", "2")
    assert all(node.wait(PATIENCE_S) for node in running.nodes.values())
    assert "elastic-agent reset lets it continue" in running.log_text()
    running.ask("reset", "--yes")
    begin(running, "0.15", "2")
    running.wait_for_step(6, after_group=group, world=2)


WITHIN_ACCUMULATION = """
import os, sys
import torch
import trainer_runtime as tr
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

tr.init()
net = torch.nn.Linear(2, 2)
config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
optimizer = torch.optim.Adam(net.parameters())
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
try:
    tr.State(engine=engine, optimizer=optimizer)
except ValueError as error:
    print(error, flush=True)
state = tr.State(engine=engine)
state.restore()
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
state.commit()
"""


def test_a_commit_within_an_accumulation_and_the_optimizer_beside_the_engine_are_refused(tmp_path: Path) -> None:
    ((code, lines),) = run(WITHIN_ACCUMULATION, tmp_path, world=1, group=1)
    assert code == 1
    assert any(line.startswith("State cannot save optimizer: it belongs to engine, which saves it") for line in lines)
    assert "RuntimeError: commit() after micro-batch 1 of 2 of engine: commit only after the engine.step()" in lines[-1]
