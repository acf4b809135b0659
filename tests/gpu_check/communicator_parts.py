"""An NCCL communicator of one rank, aborted and replaced in this process, under a compiled model; seconds as JSON."""

from __future__ import annotations

import json
import time

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 1024


def join(number: int) -> None:
    """Form a world of one, with a store of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    store = dist.PrefixStore(str(number), dist.HashStore())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one step to its end."""
    loss = model(torch.ones(32, WIDTH, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()


def main() -> None:
    """Measure."""
    began = time.perf_counter()
    join(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    inner = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(inner.parameters())
    model = torch.compile(DistributedDataParallel(inner))
    step(model, optimizer)
    first_step_s = time.perf_counter() - began
    step(model, optimizer)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    began = time.perf_counter()
    dist.distributed_c10d._abort_process_group()
    aborted = time.perf_counter()
    join(1)
    joined = time.perf_counter()
    model = torch.compile(DistributedDataParallel(inner))
    wrapped = time.perf_counter()
    step(model, optimizer)
    stepped = time.perf_counter()
    again = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    found = {
        "first_step_s": first_step_s,
        "abort_s": aborted - began,
        "join_s": joined - aborted,
        "wrap_s": wrapped - joined,
        "step_s": stepped - wrapped,
        "compiled_again": again,
    }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
