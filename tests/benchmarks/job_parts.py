"""What both training scripts share, so that they do the same work: the model, a step, and the trace of finished steps.

The scripts find it beside themselves. It imports nothing of ours: one of them runs under launchers that have no more
than torch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

STEP_TIME_S = 0.02
"""What a step takes beside its own arithmetic: as much as a small model on an accelerator."""
BATCH = 16


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True, help="append a JSON line for each finished step")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the script's own file, if it saves by itself")
    return parser.parse_args()


def set_up() -> None:
    """Take as long as a script whose set-up takes that long."""
    time.sleep(float(os.environ.get("BENCH_SETUP_S", "0")))


def build_net() -> nn.Module:
    """Equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
    """One optimizer step, at the pace of all steps."""
    time.sleep(STEP_TIME_S)
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


class Trace:
    """Notes each finished step: when, by which process, in which world."""

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.begin_group(rank, world)

    def begin_group(self, rank: int, world: int) -> None:
        """Note that this process has entered another group."""
        self._who = {"pid": os.getpid(), "rank": rank, "world": world}

    def finish(self, step: int) -> None:
        """Note it; a line is one write, so lines of several processes do not mix."""
        os.write(self._file, json.dumps({"t": time.time(), "step": step, **self._who}).encode() + b"\n")
