"""A training script that begins each epoch's batches anew after a restart."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr

EPOCHS, BATCHES, BATCH = 8, 16, 8


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's half or whole of each batch, in an order that the epoch decides."""
    images = torch.randn(BATCHES * BATCH, 10, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(BATCH):
        mine = images[batch[tr.rank() :: tr.world_size()]]
        yield mine, mine.sum(dim=1, keepdim=True).sin()


tr.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.StepLR(opt, step_size=7, gamma=0.8)
state = tr.State(model=model, opt=opt, sched=sched, save_every=3)

for epoch in state.epochs(EPOCHS):
    for images, targets in batches(epoch):
        opt.zero_grad()
        nn.functional.mse_loss(model(images), targets).backward()
        opt.step()
        sched.step()
        state.commit()
