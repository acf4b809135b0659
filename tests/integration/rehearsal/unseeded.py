"""A training script that draws other samples at each start."""

from __future__ import annotations

import torch
from torch import nn

import trainer_runtime as tr

tr.init()
torch.seed()
model = nn.parallel.DistributedDataParallel(nn.Linear(10, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
state = tr.State(model=model, opt=opt, save_every=3)
for _epoch in state.epochs(6):
    for _ in state.steps(range(10)):
        opt.zero_grad()
        model(torch.randn(4, 10)).square().mean().backward()
        opt.step()
        state.commit()
