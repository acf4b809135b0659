"""A DDP training in plain PyTorch, as written for `torchrun`: it saves its own file after every step.

It is ended from outside.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from job_parts import BATCH, Trace, build_net, parse_options, set_up, take_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint at once: whoever reads sees the old one or the new one."""
    private = path.with_name(path.name + ".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, private)
    private.replace(path)


def main() -> None:
    """Train, from the newest checkpoint on."""
    options = parse_options()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    set_up()
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    trace = Trace(options.trace, dist.get_rank(), dist.get_world_size())
    data = torch.ones(BATCH, 64)
    while True:
        take_step(model, optimizer, data)
        step += 1
        if dist.get_rank() == 0:
            save(options.checkpoint, step, model, optimizer)
        trace.finish(step)


if __name__ == "__main__":
    main()
