"""What a snapshot in memory costs the training: `snapshot_job.py OUT MEGABYTES RUNS` writes seconds as JSON.

Runs under an agent. The state is that of a transformer with AdamW, which has more layers the larger it is: parameters
and two moments are so many megabytes. Of each snapshot it is measured how long `commit()` holds up the training, and
how long it takes until it is whole; a step waits before its optimizer for what is not whole by then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from sized import build_optimizer, build_transformer

import trainer_runtime as tr
from trainer_runtime.contract import SNAPSHOT_FD
from trainer_runtime.snapshot_page import read_slots

_STEP_S = 0.05
_UNMEASURED = 6
"""The first ones take memory that the next ones have."""
_NEVER = 10**9
_WHOLE_WITHIN_S = 120.0


def wait_until_whole(memory: int, step: int) -> None:
    """Raises `TimeoutError`."""
    give_up_at = time.monotonic() + _WHOLE_WITHIN_S
    while all(slot.step != step for slot in read_slots(memory)):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"there is no snapshot of step {step} after {_WHOLE_WITHIN_S:g} s")
        time.sleep(0.0005)  # the precision of the figure


def main() -> None:
    """Train without arithmetic, with as many snapshots as the agents' options allow."""
    out, megabytes, runs = sys.argv[1:]
    tr.init()
    model = build_transformer(int(megabytes))
    optimizer = build_optimizer(model)
    state = tr.State(model=model, optimizer=optimizer, save_every=_NEVER)
    state.restore()
    memory = int(os.environ[SNAPSHOT_FD])
    taken = []
    while len(taken) < _UNMEASURED + int(runs):
        time.sleep(_STEP_S)  # the time that a step computes
        optimizer.step()
        assert state._snapshots is not None
        is_due = state.step + 1 >= state._snapshots._next
        began = time.perf_counter()
        state.commit()
        if is_due:
            held_s = time.perf_counter() - began
            wait_until_whole(memory, state.step)
            taken.append({"held_s": held_s, "whole_s": time.perf_counter() - began})
    each = [model.state_dict(), *optimizer.state_dict()["state"].values()]
    tensors = [tensor for part in each for tensor in part.values()]
    found = {
        "tensors": len(tensors),
        "megabytes": sum(tensor.nbytes for tensor in tensors) / 1e6,
        "taken": taken[_UNMEASURED:],
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
