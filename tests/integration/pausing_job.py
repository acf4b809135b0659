"""A training with all the pauses of a real one, in none of which it says that no step is to be expected.

Usage: pausing_job.py DIRECTORY. Three minutes: a step takes a quarter of a second, the first one fifty times that,
each evaluation forty times, each checkpoint twenty times.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_runtime as tr

STEP_S = 0.25
EPOCHS, STEPS = 5, 80


def main() -> None:
    """Train."""
    tr.init()
    state = tr.State(value=torch.zeros(()), save_every=10**9)
    time.sleep(50 * STEP_S)
    for _ in state.epochs(EPOCHS):
        for number in state.steps(range(STEPS)):
            time.sleep(STEP_S)
            share = torch.ones(()) / tr.world_size()
            dist.all_reduce(share)
            state.value = state.value + share
            if number == STEPS // 2:
                time.sleep(20 * STEP_S)  # a checkpoint that all wait for
            state.commit()
        if tr.is_main():
            time.sleep(40 * STEP_S)  # an evaluation, for which the others wait in a collective
        dist.barrier()
    (Path(sys.argv[1]) / f"done-{tr.rank()}").write_text(str(state.value.item()))


if __name__ == "__main__":
    main()
