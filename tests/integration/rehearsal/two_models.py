"""Two models against each other, an average and a queue of one's results, all of it in State; nothing is seeded."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import trainer_runtime as tr

tr.init()
maker, judge = nn.Linear(4, 2), nn.Linear(2, 1)
making, judging = DistributedDataParallel(maker), DistributedDataParallel(judge)
average, queue = AveragedModel(maker), torch.zeros(4, 2)
of_maker = torch.optim.Adam(making.parameters(), lr=1e-3)
of_judge = torch.optim.Adam(judging.parameters(), lr=1e-3)
loader = tr.DataLoader(torch.randn(160, 2, generator=torch.Generator().manual_seed(1)), global_batch=8)
state = tr.State(
    making=making,
    judging=judging,
    of_maker=of_maker,
    of_judge=of_judge,
    average=average,
    queue=queue,
    data=loader,
    save_every=3,
)

for _epoch in state.epochs(6):
    for real in state.steps(loader):
        made = making(torch.randn(len(real), 4))
        of_judge.zero_grad()
        (judging(made.detach()).mean() - judging(real).mean()).backward()
        of_judge.step()
        if state.step % 2:
            of_maker.zero_grad()
            (-judge(made).mean()).backward()
            of_maker.step()
            average.update_parameters(maker)
        with torch.no_grad():
            queue.mul_(0.9).add_(0.1 * maker.weight.mean())
        state.commit()
