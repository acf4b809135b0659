"""Scripts that use nothing of ours: written for torchrun, with their own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from integration.conftest import PATIENCE_S, ROOT, Job

from agent.rehearse.cluster import wait_for

PLAIN = ROOT / "examples" / "plain_ddp.py"


def run_plain(job: Job, *options: str) -> tuple[Path, list[str]]:
    out, checkpoint = job.directory / "plain.pt", job.directory / "plain-checkpoint.pt"
    return out, [str(PLAIN), "--epochs=6", f"--checkpoint={checkpoint}", f"--out={out}", *options]


def test_a_script_for_torchrun_survives_a_killed_worker_and_a_lost_node(job: Callable[..., Job]) -> None:
    """It repeats the epoch at work, from its own checkpoint, and ends with the weights of an undisturbed run."""
    calm = job("--nproc_per_node=2")
    reference, command = run_plain(calm)
    calm.start("a", "1", command)
    calm.finish()

    broken = job()
    out, command = run_plain(broken, "--step_time_s=0.1")
    checkpoint = broken.directory / "plain-checkpoint.pt"
    broken.start("a", "2", command)
    broken.start("b", "2", command)
    wait_for(checkpoint.exists, PATIENCE_S, f"the first checkpoint; {broken.log_text()}")
    broken.nodes["b"].kill_worker()
    wait_for(lambda: len(broken.nodes["b"].workers()) == 1 and broken.status()["group"] == 2, PATIENCE_S, "group 2")
    saved = checkpoint.stat().st_mtime
    wait_for(lambda: checkpoint.stat().st_mtime > saved, PATIENCE_S, f"another checkpoint; {broken.log_text()}")
    broken.nodes["b"].kill()
    broken.start("c", "2", command)
    broken.finish()
    first, second = (torch.load(path, weights_only=True) for path in (out, reference))
    assert all(torch.equal(first[name], second[name]) for name in first)
