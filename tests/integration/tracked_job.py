"""A training whose loss is logged: `tracked_job.py DIRECTORY STEPS STEP_TIME_S TRACKER`.

It writes `DIRECTORY/trace.jsonl`, a line for each committed step of rank 0, and `DIRECTORY/pid.{rank}`; a file `hurry`
there ends the time that a step takes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr

EVERY = 2


def main() -> None:
    """Train."""
    directory, steps, step_time_s, tracker = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    tr.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = tr.State(model=model, opt=opt, save_every=10)
    if tracker == "tensorboard":
        tr.integrations.log_to_tensorboard(state, directory / "board", every=EVERY)
    else:
        tr.integrations.log_to_mlflow(state, experiment=directory.name, every=EVERY)

    @state.on_regroup
    def note(rank: int, _world: int) -> None:
        (directory / f"pid.{rank}").write_text(str(os.getpid()))

    def train() -> None:
        for _ in state.epochs(1):
            for number in state.steps(range(steps)):
                points = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * number + tr.rank()))
                loss = (model(points) - points.sum(dim=1, keepdim=True)).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                state.commit(loss=loss)
                if tr.is_main():
                    line = {"group": state.group, "step": state.step, "loss": loss.item()}
                    with (directory / "trace.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
                if not (directory / "hurry").exists():
                    time.sleep(step_time_s)

    state.run(train)


if __name__ == "__main__":
    main()
