"""What the tiny programs have in common: data, a model, and notes of what each step was made of.

A sample is its own number, so a note tells which samples went into a step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SAMPLES = 95
"""Not a multiple of the batch of a step."""
BATCH = 2
"""Of one rank; a step takes two."""
EPOCHS = 3
STEPS_PER_EPOCH = 12
"""In a world of 2."""
SAVE_EVERY = 4
SLOW_FROM = STEPS_PER_EPOCH + SAVE_EVERY + 2
"""From this step on each takes its time, until DIRECTORY/hurry is there."""

DIRECTORY = Path(os.environ.get("TEST_DIRECTORY", "."))
STEP_TIME_S = float(os.environ.get("TEST_STEP_TIME_S", "0"))
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GROUP = int(os.environ.get("ELASTIC_AGENT_GROUP", "0"))


class Numbers(Dataset[dict[str, Tensor]]):
    """Points that can be learnt from."""

    def __init__(self) -> None:
        self._points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index), "x": self._points[index], "labels": self._points[index].sum()}


class Net(nn.Module):
    """With dropout, so that it needs its random states, and statistics that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor, number: Tensor) -> dict[str, Tensor]:
        if self.training:
            pending.extend(number.tolist())
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(-1), labels)}


pending: list[int] = []
"""Samples of the step at work."""


def step_done(step: int) -> None:
    """Note an optimizer step, counted from 1, and what this rank put into it."""
    line = {"step": step, "samples": sorted(pending)}
    with (DIRECTORY / f"ledger.{GROUP}.{RANK}").open("a") as file:
        file.write(json.dumps(line) + "\n")
    pending.clear()
    if RANK == 0:
        trace = {"t": time.time(), "group": GROUP, "step": step, "world": WORLD, "loss": 0.0}
        with (DIRECTORY / "trace.jsonl").open("a") as file:
            file.write(json.dumps(trace) + "\n")
    if step >= SLOW_FROM and not (DIRECTORY / "hurry").exists():
        time.sleep(STEP_TIME_S)


def finish(model: nn.Module) -> None:
    """What a script does after the training: it must not be done before."""
    with (DIRECTORY / f"finished.{RANK}").open("a") as file:
        file.write(f"{GROUP}\n")
    state = model.state_dict()
    state = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
    torch.save(state, DIRECTORY / f"weights.{RANK}")
