"""A training script whose result is known beforehand, and which a test can hold in the middle of a save.

Usage: counting.py DIRECTORY STEPS STEP_TIME_S. Each step all ranks must take part in; its result does not depend on
their number. It stands still in the save of step 20 or later while DIRECTORY/hold exists, and takes no time of its own
for a step once DIRECTORY/hurry does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_runtime as tr


def expected(steps: int) -> float:
    """What `steps` steps make of zero."""
    value = 0.0
    for step in range(steps):
        value = value * 0.99 + step
    return value


def train(
    state: tr.State, directory: Path, steps: int, step_time_s: float, before_step: Callable[[], None] = lambda: None
) -> None:
    """Count to the end, and write the result."""
    for _ in state.epochs(1):
        for number in state.steps(range(steps)):
            before_step()
            share = torch.tensor(float(number), dtype=torch.float64) / tr.world_size()
            if tr.world_size() > 1:
                dist.all_reduce(share)
            state.value = state.value * 0.99 + share
            state.commit()
            if tr.is_main():
                line = {"t": time.time(), "group": state.group, "step": state.step, "world": tr.world_size(), "loss": 0}
                with (directory / "trace.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if not (directory / "hurry").exists():
                time.sleep(step_time_s)  # the time that a step computes
    if tr.is_main():
        (directory / "result").write_text(repr(state.value.item()))


def main() -> None:
    """Count."""
    directory, steps, step_time_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tr.init()
    state = tr.State(value=torch.zeros((), dtype=torch.float64), save_every=5, keep=1)

    @state.on_save
    def stand_still(private: Path) -> None:
        (private / "note").write_text(f"step {state.step}")
        if state.step >= 20 and (directory / "hold").exists():
            (directory / "held").write_text(str(state.step))
            while (directory / "hold").exists():
                time.sleep(0.01)  # until the test removes the file; it kills this process if it fails

    train(state, directory, steps, step_time_s)


if __name__ == "__main__":
    main()
