"""A training script whose weight is known beforehand, and which a test can hold at a named moment of a save.

Usage: held_saves.py DIRECTORY STEPS STEP_TIME_S. While DIRECTORY/hold names a moment, the saving of step 20 or later
stands still there, and DIRECTORY/held says which step that is. The training goes on until the next save is due.
Once DIRECTORY/hurry is there a step takes no time of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr
from trainer_runtime import writer
from trainer_runtime.agent_channel import AgentChannel
from trainer_runtime.record import CommittedCheckpoint

RATE = 0.01
MOMENTUM = 0.9

Done = TypeVar("Done")


def expected(steps: int) -> float:
    """What `steps` steps make of a weight of zero."""
    weight = velocity = 0.0
    for step in range(steps):
        velocity = velocity * MOMENTUM + weight - step
        weight -= RATE * velocity
    return weight


def make() -> tuple[torch.nn.Linear, torch.optim.SGD]:
    """Return what is trained: one weight, of zero."""
    net = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(net.weight)
    return net, torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take one step towards its number."""
    optimizer.zero_grad()
    (0.5 * (model(torch.ones(1, 1, dtype=torch.float64)) - step) ** 2).sum().backward()
    optimizer.step()


def held(moment: str, directory: Path, action: Callable[..., Done], step_of: Callable[..., int]) -> Callable[..., Done]:
    """Let an action wait for as long as its moment is to be held."""

    def wait_and_act(*arguments: object) -> Done:
        hold, step = directory / "hold", step_of(*arguments)
        while step >= 20 and hold.exists() and hold.read_text() == moment:
            (directory / "held").write_text(str(step))
            time.sleep(0.01)
        return action(*arguments)

    return wait_and_act


def hold_saves(directory: Path) -> None:
    """Make it possible to hold a save before it is committed, and before it is renamed."""

    def step_of(_channel: AgentChannel, asked: CommittedCheckpoint, *_: object) -> int:
        return asked.copy.step

    def step_in(private: Path) -> int:
        return int(private.name.split("-s")[-1].split(".")[0])

    AgentChannel.publish = held("before commit", directory, AgentChannel.publish, step_of)  # type: ignore[method-assign]
    writer.rename_committed = held("before rename", directory, writer.rename_committed, step_in)


def main() -> None:
    """Train."""
    directory, steps, step_time_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    hold_saves(directory)
    tr.init()
    net, optimizer = make()
    model = DistributedDataParallel(net)
    state = tr.State(model=model, optimizer=optimizer, save_every=5, keep=3)
    for _ in state.epochs(1):
        for number in state.steps(range(steps)):
            train(model, optimizer, number)
            state.commit()
            if tr.is_main():
                line = {"t": time.time(), "group": state.group, "step": state.step, "world": tr.world_size(), "loss": 0}
                with (directory / "trace.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if not (directory / "hurry").exists():
                time.sleep(step_time_s)
    if tr.is_main():
        (directory / "result").write_text(repr(net.weight.item()))


if __name__ == "__main__":
    main()
