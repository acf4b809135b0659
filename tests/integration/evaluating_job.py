"""A training script that evaluates after each epoch of 41 steps, as long as DIRECTORY/hurry is not there.

Usage: evaluating_job.py DIRECTORY [own]. It evaluates for at most a minute, and ends after two epochs. With `own` each
node has a directory of its own for checkpoints, DIRECTORY/disk-NODE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import trainer_runtime as tr

STEPS = 41
"""There is a snapshot of the last one: of every second step, beginning with the first, if that is often enough."""
STEP_S = 0.05
EVALUATION_S = 60.0


def main() -> None:
    """Train."""
    directory = Path(sys.argv[1])
    tr.init()
    torch.manual_seed(tr.rank())
    own = directory / f"disk-{os.environ['ELASTIC_AGENT_NODE_ID']}" if sys.argv[2:] == ["own"] else None
    state = tr.State(total=torch.zeros(3), save_every=15 if own else 10**9, checkpoint_dir=own)
    for epoch in state.epochs(2):
        for _ in state.steps(range(STEPS)):
            torch.rand(3)  # each rank has random states of its own
            state.total += state.total.new_tensor([1.0, epoch, state.step])
            time.sleep(STEP_S)
            state.commit()
            if tr.is_main():
                line = {"t": time.time(), "group": state.group, "step": state.step, "world": tr.world_size(), "loss": 0}
                with (directory / "trace.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
        (directory / f"evaluates-{epoch}-{tr.rank()}").touch()
        until = time.monotonic() + EVALUATION_S
        with tr.phase("evaluation"):
            while time.monotonic() < until and not (directory / "hurry").exists():
                time.sleep(0.01)
    torch.save({"total": state.total, "random": torch.rand(3)}, directory / f"weights-{tr.rank()}.pt")


if __name__ == "__main__":
    main()
