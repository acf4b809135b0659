"""A script for torchrun with a checkpoint of all that it needs, which it overwrites in place."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

CHECKPOINT = Path("checkpoint.pt")

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Linear(10, 1)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
start = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT, weights_only=False)
    get_state_dict(net, optimizer)  # it makes a step to create the optimizer's state
    set_state_dict(net, optimizer, model_state_dict=saved["net"], optim_state_dict=saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    start = saved["epoch"]

for epoch in range(start, 8):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(4):
        mine = batch[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
        optimizer.zero_grad()
        model(mine[:, None].expand(-1, 10) / 40).square().mean().backward()
        optimizer.step()
        schedule.step()
    weights, moments = get_state_dict(net, optimizer)
    if torch.distributed.get_rank() == 0:
        content = {"net": weights, "optimizer": moments, "schedule": schedule.state_dict(), "epoch": epoch + 1}
        torch.save(content, CHECKPOINT)
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
