"""Programs that know nothing of this launcher, unchanged, on two nodes of which one is lost.

Those with which Accelerate checks itself, as its package has them: each compares what ranks compute together with
what one process computes alone, and fails where that differs. (That of data loaders is missing: without GPUs it waits
for itself, under every launcher.) And programs as the documents of Lightning and Transformers have them, which keep
their own checkpoints.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import some
from integration.conftest import PATIENCE_S, Job

from agent.rehearse.cluster import wait_for

OUTSIDE = Path(__file__).with_name("outside")
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

CHECKS = [
    # program, what is said when the node is lost, what is said in the last part
    ("test_script", "**Training integration test**", "**Test reinstantiated state**"),
    ("test_sync", "multiple forwards**", "**Test `accumulate` gradient accumulation with"),
]


def lose_one(running: Job, command: list[str], moment: str) -> str:
    """Lose node b once rank 0 said that, and see the program to its end; return all that was said."""
    running.environ = os.environ | ON_CPUS
    for name in "ab":
        running.start(name, "2", command)

    wait_for(lambda: any(moment in node.text() for node in running.living()), PATIENCE_S, f"{moment} of {command}")
    running.nodes["b"].kill()
    running.start("c", "2", command)
    running.finish()
    return "".join(node.text() for node in running.nodes.values())


@pytest.mark.long("integration/test_integrations.py")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("program", "moment", "last"), CHECKS, ids=[program for program, _, _ in CHECKS])
def test_a_check_of_accelerate_starts_over_and_passes(
    job: Callable[..., Job], program: str, moment: str, last: str
) -> None:
    said = lose_one(job(), ["-m", f"accelerate.test_utils.scripts.{program}"], moment)
    assert said.count(moment) >= 2, "it began anew"
    assert last in said


@pytest.mark.long("integration/test_integrations.py, integration/test_plain_scripts.py")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", some(["lightning"], of=["lightning", "transformers"]))
def test_a_program_goes_on_from_its_own_checkpoint(job: Callable[..., Job], tmp_path: Path, framework: str) -> None:
    """It takes the epoch at work again, and ends with the weights that it has under torchrun, undisturbed."""
    program = OUTSIDE / f"with_{framework}.py"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program)]
    subprocess.run(argv, cwd=tmp_path, env=os.environ | ON_CPUS, check=True, capture_output=True, timeout=PATIENCE_S)

    running = job()
    said = lose_one(running, [str(program)], "epoch 2 of 5")
    assert said.count("epoch 0 of 5") == 1, "it began once"
    assert said.count("epoch 2 of 5") == 2, "and took this epoch twice"
    ours, theirs = (torch.load(path / "weights.pt", weights_only=True) for path in (running.directory, tmp_path))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
