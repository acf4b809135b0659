"""What a save costs the training: `saving_job.py OUT MEGABYTES RUNS` writes seconds as JSON. Runs under an agent.

In turns: a `commit()` with a save due, `torch.save`, `torch.distributed.checkpoint.async_save`, each of the same
weights, which an optimizer changes in each step. Of ours and of async_save both is measured: how long it holds up the
training, and until the save is whole; nobody saves while another one does. What holds up the training is the call, and
what the next optimizer's step takes longer than the others.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import trainer_runtime as tr
from trainer_runtime.contract import CHECKPOINT_DIR

_PARTS = 16
_STEP_S = 0.3
"""What a step computes before the optimizer's."""
_SAVE_EVERY = 40
"""Steps between saves. Few scripts save more often than every ten seconds."""
_WRITTEN_WITHIN_S = 120.0


def build_weights(megabytes: int) -> nn.Module:
    """Parameters of so many megabytes in all."""
    each = megabytes * 10**6 // 4 // _PARTS
    return nn.ParameterList([nn.Parameter(torch.rand(each)) for _ in range(_PARTS)])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Its seconds, and what it returned."""
    began = time.perf_counter()
    returned = call()
    return time.perf_counter() - began, returned


class Training:
    """Steps of an optimizer that changes all weights."""

    def __init__(self, weights: nn.Module) -> None:
        for each in weights.parameters():
            each.grad = torch.zeros_like(each)
        self.optimizer = torch.optim.SGD(weights.parameters(), lr=0.1, foreach=False, fused=True)

    def step(self) -> float:
        """Take a step; return the seconds that the optimizer's took."""
        time.sleep(_STEP_S)
        return timed(self.optimizer.step)[0]

    def waited_s(self, usual_s: list[float]) -> float:
        """Take a step; return the seconds that the optimizer's took longer than usual."""
        return max(0.0, self.step() - statistics.median(usual_s))


def train_until_saved(training: Training, state: tr.State, directory: Path) -> tuple[dict[str, Any], list[float]]:
    """Some steps, of which the last but one saves. Return what was measured, and seconds of the optimizer's steps."""
    plain, steps = [], []
    began = time.perf_counter()
    while (state.step + 1) % _SAVE_EVERY:
        steps.append(training.step())
        plain.append(timed(state.commit)[0])
    elapsed = time.perf_counter() - began
    training.step()
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as pool:
        saved = pool.submit(wait_until_saved, directory, state.step + 1)
        stall, _ = timed(state.commit)
        stall += training.waited_s(steps)
        whole = saved.result() - began
    state.commit()
    return {"stall_s": stall, "whole_s": whole, "commits_s": plain, "elapsed_s": elapsed}, steps


def wait_until_saved(directory: Path, step: int) -> float:
    """Return the monotonic time at which a checkpoint of this step was there."""
    give_up_at, end = time.monotonic() + _WRITTEN_WITHIN_S, f"-s{step:09d}"
    while not any(path.name.endswith(end) for path in directory.glob("*")):  # a private name has more after it
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"step {step} was not saved: {sorted(path.name for path in directory.iterdir())}")
        time.sleep(0.01)  # the precision of the figure
    return time.monotonic()


def main() -> None:
    """Save, in turns."""
    out, megabytes, runs = sys.argv[1:]
    tr.init()
    weights = build_weights(int(megabytes))
    training = Training(weights)
    state = tr.State(model=weights, optimizer=training.optimizer, save_every=_SAVE_EVERY)
    state.restore()
    state.commit()  # the first one examines what is to be saved
    directory, scratch = Path(os.environ[CHECKPOINT_DIR]), Path(out).with_suffix(".files")
    scratch.mkdir()
    found: list[dict[str, Any]] = []
    for run in range(int(runs)):
        measured, steps = train_until_saved(training, state, directory)
        found.append({"how": "elastic-agent", **measured})
        took_s, _ = timed(lambda: torch.save(weights.state_dict(), scratch / "weights.pt"))
        found.append({"how": "torch.save", "stall_s": took_s, "whole_s": took_s})
        where = scratch / str(run)
        began = time.perf_counter()
        stall_s, future = timed(lambda where=where: dcp.async_save({"m": weights.state_dict()}, checkpoint_id=where))
        ended: list[float] = []
        future.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))
        stall_s += training.waited_s(steps)
        future.result()
        found.append({"how": "async_save", "stall_s": stall_s, "whole_s": ended[0] - began})
        shutil.rmtree(where)
    shutil.rmtree(scratch)
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
