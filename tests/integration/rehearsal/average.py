"""A training script that leaves an average of the weights out of State."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import trainer_runtime as tr

tr.init()
torch.manual_seed(0)
net = nn.Linear(4, 1)
model = DistributedDataParallel(net)
ema = AveragedModel(net)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = tr.DataLoader(torch.randn(160, 4), global_batch=8)
state = tr.State(model=model, opt=opt, data=loader, save_every=3)

for _epoch in state.epochs(6):
    for points in state.steps(loader):
        opt.zero_grad()
        (model(points).square().mean() * loader.weight).backward()
        opt.step()
        ema.update_parameters(net)
        state.commit()
