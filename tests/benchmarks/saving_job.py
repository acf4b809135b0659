"""What a save costs the training: `saving_job.py OUT MEGABYTES RUNS` writes seconds as JSON. Runs under an agent.

In turns: a `commit()` with a save due, `torch.save`, `torch.distributed.checkpoint.async_save`, each of the same
weights. Of ours and of async_save both is measured: how long the call holds up the training, and until the save is
whole; nobody saves while another one does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import trainer_runtime as tr
from trainer_runtime.contract import CHECKPOINT_DIR

_PARTS = 16
_STEP_S = 0.05
_SAVE_EVERY = 20
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


def train_until_saved(state: tr.State, directory: Path) -> dict[str, Any]:
    """Some steps, of which the last saves."""
    plain = []
    began = time.perf_counter()
    while (state.step + 1) % _SAVE_EVERY:
        time.sleep(_STEP_S)  # the time that a step computes
        plain.append(timed(state.commit)[0])
    elapsed = time.perf_counter() - began
    stall, _ = timed(state.commit)
    began, end = time.monotonic(), f"-s{state.step:09d}"
    while not any(path.name.endswith(end) for path in directory.iterdir()):  # a private name has more after it
        if time.monotonic() > began + _WRITTEN_WITHIN_S:
            raise TimeoutError(f"step {state.step} was not saved: {sorted(path.name for path in directory.iterdir())}")
        time.sleep(0.01)  # the precision of the figure
    return {"stall_s": stall, "whole_s": stall + time.monotonic() - began, "commits_s": plain, "elapsed_s": elapsed}


def main() -> None:
    """Save, in turns."""
    out, megabytes, runs = sys.argv[1:]
    tr.init()
    weights = build_weights(int(megabytes))
    state = tr.State(model=weights, save_every=_SAVE_EVERY)
    state.restore()
    state.commit()  # the first one examines what is to be saved
    directory, scratch = Path(os.environ[CHECKPOINT_DIR]), Path(out).with_suffix(".files")
    scratch.mkdir()
    found: list[dict[str, Any]] = []
    for run in range(int(runs)):
        found.append({"how": "elastic-agent", **train_until_saved(state, directory)})
        took_s, _ = timed(lambda: torch.save(weights.state_dict(), scratch / "weights.pt"))
        found.append({"how": "torch.save", "stall_s": took_s, "whole_s": took_s})
        where = scratch / str(run)
        began = time.perf_counter()
        stall_s, future = timed(lambda where=where: dcp.async_save({"m": weights.state_dict()}, checkpoint_id=where))
        future.result()
        found.append({"how": "async_save", "stall_s": stall_s, "whole_s": time.perf_counter() - began})
        shutil.rmtree(where)
    shutil.rmtree(scratch)
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
