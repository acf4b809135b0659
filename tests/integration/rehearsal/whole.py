"""A training script with all that real ones have, and nothing left out of State."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr


class Waves(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points and what they are to be mapped to, a little different each time."""

    def __len__(self) -> int:
        return 131

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.full((10,), index / 131) + 0.1 * torch.randn(10, generator=tr.sample_rng(index))
        return point, point.sum().sin().reshape(1)


tr.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
model = DistributedDataParallel(net)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.StepLR(opt, step_size=7, gamma=0.8)
scaler = torch.amp.GradScaler(device="cpu", growth_interval=5)
noise = torch.Generator().manual_seed(3)
loader = tr.DataLoader(Waves(), global_batch=12, micro_batch=3)
state = tr.State(model=model, opt=opt, sched=sched, scaler=scaler, noise=noise, data=loader, save_every=3)

for _epoch in state.epochs(8):
    for points, targets in state.steps(loader):
        noisy = points + 0.01 * torch.randn(points.shape, generator=noise)
        loss = nn.functional.mse_loss(model(noisy), targets) * loader.weight
        scaler.scale(loss).backward()
        if loader.ends_step:
            scaler.step(opt)
            scaler.update()
            sched.step()
            opt.zero_grad()
            state.commit(loss=loss)
