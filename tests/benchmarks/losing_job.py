"""A training with a state and steps as large and as long as wanted, and no arithmetic. It is ended from outside."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from job_parts import Trace
from sized import build_optimizer, build_transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainer_runtime as tr

_NEVER = 10**9


def main() -> None:
    """Train, from the newest copy on; nothing but snapshots is saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True, help="not used")
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--step_s", type=float, required=True, help="seconds to sleep, as if for forward and backward")
    parser.add_argument("--sharded", action="store_true", help="shard the model over all ranks (FSDP2)")
    options = parser.parse_args()
    tr.init()
    torch.manual_seed(0)
    model = build_transformer(options.megabytes)
    if options.sharded:
        mesh = init_device_mesh("cpu", (tr.world_size(),))
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh)
    optimizer = build_optimizer(model)
    state = tr.State(model=model, optimizer=optimizer, save_every=_NEVER)
    state.restore()
    trace = Trace(options.trace, tr.rank(), tr.world_size())
    while True:
        time.sleep(options.step_s)
        dist.all_reduce(torch.zeros(1))
        optimizer.step()
        state.commit()
        trace.finish(state.step)


if __name__ == "__main__":
    main()
