"""A DDP training in which the rank on node b is slow in its own part of a step. Usage: slow_job.py STEPS."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr
from trainer_runtime import contract

OWN_S = {"b": 0.3}
"""More than one that is stopped for some seconds comes to in the mean of the steps that are looked at."""
USUAL_S = 0.05


class Slow(torch.nn.Linear):
    """A layer that takes its time."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """As any other, later."""
        time.sleep(OWN_S.get(os.environ[contract.NODE_ID], USUAL_S))
        return super().forward(data)


def main() -> None:
    """Train."""
    tr.init()
    model = DistributedDataParallel(Slow(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    state = tr.State(model=model, optimizer=optimizer, save_every=1000)
    for _ in state.epochs(1):
        for _ in state.steps(range(int(sys.argv[1]))):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).mean().backward()
            optimizer.step()
            state.commit()


if __name__ == "__main__":
    main()
