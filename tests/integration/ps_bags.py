"""A script with common steps, on a model with embedding bags and dense parameters.

`ps_bags.py DIRECTORY`: worker 0 writes the final rows and parameters there. `trained()` computes the same in one
process, with `torch.nn.EmbeddingBag` and a torch optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from trainer_runtime import ps

DIM, IDS, BATCH, STEPS = 8, 200, 24, 30
SETTINGS = {"name": "bags", "initial": "normal", "scale": 0.3, "seed": 7}
Make = Callable[[], nn.Module]


def net(bags: nn.Module) -> nn.Sequential:
    """Return the model: bags and a head."""
    torch.manual_seed(1)
    return nn.Sequential(bags, nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bags of five ids, and their targets."""
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(0, IDS, (BATCH, 5), generator=chance)
    return ids, torch.sin(ids.sum(1, keepdim=True).float())


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimizer of both variants, with a learning rate that changes."""
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def trained(rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows and parameters after training in one process. `rows`: initial rows."""
    bags = nn.EmbeddingBag(IDS, DIM, mode="sum")
    model = net(bags)
    with torch.no_grad():
        bags.weight.copy_(rows)
    optimizer, schedule = optimizer_of(model)
    for step in range(STEPS):
        ids, wanted = batch(step)
        loss = functional.mse_loss(model(ids), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return [each.detach() for each in model.parameters()]


def main() -> None:
    """Run as a server or a worker."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    ps.init(ps.SYNC)
    if ps.is_server():
        ps.init_server()
        ps.run_server()
        return
    me, workers = ps.worker_index(), ps.worker_num()
    bags = ps.EmbeddingBag(DIM, mode="sum", **SETTINGS)
    model = net(bags)
    ps.init_worker()
    alone, schedule = optimizer_of(model)
    optimizer = ps.distributed_optimizer(alone, model)
    for step in range(STEPS):
        ids, wanted = batch(step)
        loss = functional.mse_loss(model(ids[me::workers]), wanted[me::workers])
        optimizer.zero_grad()  # between forward and backward: the lookup must still get its gradient
        loss.backward()
        optimizer.step()
        schedule.step()
    if ps.is_first_worker():
        with torch.no_grad():
            found = [bags(torch.arange(IDS).view(-1, 1)), *(each.detach() for each in model.parameters())]
        torch.save(found, directory / "found.pt")
    ps.stop_worker()


if __name__ == "__main__":
    main()
