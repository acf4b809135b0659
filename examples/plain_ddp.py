"""Learn handwritten digits with nothing but PyTorch: a script as written for `torchrun`.

    torchrun --nproc_per_node=2 examples/plain_ddp.py
    elastic-agent run --np=2 examples/plain_ddp.py

It keeps a checkpoint of its own, one per epoch, so a restart repeats the epoch that was interrupted.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 48
TRAINED_ON = 1440


def load_data() -> tuple[Tensor, Tensor]:
    """Return images (1797, 64) in [0, 1] and their digits (1797), in an order that is always the same."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


def save(path: Path, **parts: object) -> None:
    """Replace the checkpoint atomically: a reader sees the old one or the new one."""
    private = path.with_name(path.name + ".new")
    torch.save(parts, private)
    private.replace(path)


def train_epoch(
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    step_time_s: float,
) -> None:
    """Take one step for each batch of the epoch."""
    images, digits = data
    order = torch.randperm(TRAINED_ON, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(GLOBAL_BATCH):
        mine = batch[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), digits[mine]).backward()
        optimizer.step()
        time.sleep(step_time_s)


def main() -> None:
    """Train, and print the accuracy on the held-out images."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits, without trainer_runtime.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("plain_ddp.pt"))
    parser.add_argument("--step_time_s", type=float, default=0.0, help="seconds to wait after each step, for demos")
    parser.add_argument("--out", type=Path, help="write the final weights here")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    images, digits = load_data()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    start_epoch = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        start_epoch = saved["epoch"]
    is_main = dist.get_rank() == 0
    if is_main:
        print(f"{dist.get_world_size()} workers, from epoch {start_epoch}", flush=True)

    for epoch in range(start_epoch, options.epochs):
        train_epoch(epoch, model, optimizer, (images, digits), options.step_time_s)
        if is_main:
            save(options.checkpoint, net=net.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch + 1)
            print(f"epoch {epoch}  done", flush=True)

    with torch.no_grad():
        accuracy = (net(images[TRAINED_ON:]).argmax(dim=1) == digits[TRAINED_ON:]).float().mean().item()
    if is_main and options.out:
        torch.save(net.state_dict(), options.out)
    dist.destroy_process_group()
    if is_main:
        print(f"accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
