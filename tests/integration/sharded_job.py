"""A training script with a sharded model (FSDP2), whose result does not depend on the number of ranks.

Usage: sharded_job.py DIRECTORY STEPS STEP_TIME_S [WIDTH]. A step takes no time of its own once DIRECTORY/hurry is
there. WIDTH is that of the hidden layer: each of four ranks has about 40 bytes of state for each of its units.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import trainer_runtime as tr


def main() -> None:
    """Train."""
    directory, steps, step_time_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tr.init()
    torch.manual_seed(0)
    width = int(sys.argv[4]) if len(sys.argv) > 4 else 32
    net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    mesh = init_device_mesh("cpu", (tr.world_size(),))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    state = tr.State(model=net, optimizer=optimizer, schedule=schedule, save_every=10)
    for _ in state.epochs(1):
        for step in state.steps(range(steps)):
            made = torch.Generator().manual_seed(step)
            points, wanted = torch.randn(12, 8, generator=made), torch.randn(12, 4, generator=made)
            mine = slice(tr.rank(), None, tr.world_size())
            nn.functional.mse_loss(net(points[mine]), wanted[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state.commit()
            if tr.is_main():
                line = {"t": time.time(), "group": state.group, "step": state.step, "world": tr.world_size(), "loss": 0}
                with (directory / "trace.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if not (directory / "hurry").exists():
                time.sleep(step_time_s)
    weights = {key: part.full_tensor() for key, part in net.state_dict().items() if isinstance(part, DTensor)}
    if tr.is_main():
        torch.save(weights, directory / "weights.pt")


if __name__ == "__main__":
    main()
