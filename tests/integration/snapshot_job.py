"""Train a little on noise of each rank's own, and say in the end what it has come to.

Arguments: the step after which to end without a word, as a rank does that is killed; and the last step.
"""

from __future__ import annotations

import os
import random
import sys

import torch
from torch import nn

import trainer_runtime as tr

killed_after, last = int(sys.argv[1]), int(sys.argv[2])
tr.init(timeout_s=150)
torch.manual_seed(tr.rank())
random.seed(tr.rank())
torch.set_num_threads(1)
with torch.random.fork_rng():
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = tr.State(model=model, opt=opt, drawn=[], save_every=1000)
state.restore()
sys.stdout.write(f"from {state.step} {net[1].running_mean.tolist()}\n")
sys.stdout.flush()
for _ in state.epochs(1):
    for _item in state.steps(range(last)):
        opt.zero_grad()
        model(torch.randn(5, 3) + 1).sum().backward()
        opt.step()
        state.commit()
        if state.step == killed_after:
            os._exit(1)
weights = [value.tolist() for value in net.state_dict().values()]
sys.stdout.write(f"became {weights} {random.random()} {torch.rand(1).item()}\n")
