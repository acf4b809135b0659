"""What snapshots of a sharded model cost: `sharded_job.py OUT MEGABYTES STEP_S STEPS` writes seconds as JSON.

Runs on two nodes, each of which also holds the other one's part. A step sleeps, meets in an all-reduce, and takes the
optimizer's step. Rank 0 writes what it has measured; the first steps, in which the interval of snapshots is settled,
are left out. STEPS are measured, and more until there is an interval of snapshots among them: on a busy machine it is
long.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sized import build_optimizer, build_transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainer_runtime as tr
from trainer_runtime.contract import CONTROL_FD, SNAPSHOT_FD, ControlPage
from trainer_runtime.snapshot_page import read_slots

_UNMEASURED_STEPS = 30
_LEAST_SNAPSHOTS = 2
_NEVER = 10**9


def main() -> None:
    """Train without arithmetic, with snapshots as often as the agents' options allow."""
    out, megabytes, step_s, steps = sys.argv[1:]
    tr.init()
    page = ControlPage(int(os.environ[CONTROL_FD]))
    torch.manual_seed(0)
    model = build_transformer(int(megabytes))
    mesh = init_device_mesh("cpu", (tr.world_size(),))
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = build_optimizer(model)
    state = tr.State(model=model, optimizer=optimizer, save_every=_NEVER)
    state.restore()
    memory = int(os.environ[SNAPSHOT_FD])
    steps_s, own_s, snapshots, handed_on = [], [], set[int](), dict[int, float]()
    is_last = torch.zeros(1)
    while not is_last:
        measured = [step for step in snapshots if step > _UNMEASURED_STEPS]
        are_all = len(steps_s) + 1 >= _UNMEASURED_STEPS + int(steps) and len(measured) >= _LEAST_SNAPSHOTS
        is_last = torch.full((1,), float(are_all and tr.is_main()))
        began = time.perf_counter()
        time.sleep(float(step_s))
        dist.all_reduce(is_last)
        met = time.perf_counter()
        optimizer.step()
        state.commit()
        ended = time.perf_counter()
        steps_s.append(ended - began)
        own_s.append(ended - met)
        snapshots |= {slot.step for slot in read_slots(memory)}
        if page.replicated:
            handed_on[page.replicated] = page.replicating_us / 1e6
    found = {
        "first_step": _UNMEASURED_STEPS + 1,
        "steps_s": steps_s[_UNMEASURED_STEPS:],
        "own_s": own_s[_UNMEASURED_STEPS:],
        "snapshots": sorted(step for step in snapshots if step > _UNMEASURED_STEPS),
        "handed_on_s": [took_s for step, took_s in handed_on.items() if step > _UNMEASURED_STEPS],
    }
    if tr.is_main():
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
