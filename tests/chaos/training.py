"""The training that is broken on purpose. Its result depends on nothing but the number of its steps.

Each sample's gradient is rounded to a grid on which sums are exact, so that neither the number of ranks, nor the order
in which they are summed, changes a bit of the weights. The ranks meet in an all-reduce in every step.

With `state.run` processes outlive changes of their group; with `--plain` each group has new ones.

    LEDGER/{group}.{rank}     who took which samples into a step, when, and whether it got as far as the commit
    LEDGER/digests            of the weights at the end of each epoch
    LEDGER/weights.pt         the result, and after how many steps
    LEDGER/stop               put there to end the training after an epoch: the first that ends at this step or later
    LEDGER/eat.{host}         put there to have a rank of this host take so many megabytes
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainer_runtime as tr

SAMPLES = 119
GLOBAL_BATCH = 24
_GRID = 2.0**-24
"""Gradients are below 2**8, so sums of a batch take less than the 53 bits of a float64."""


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points of two noisy classes, moved a little at random each time they are looked at."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._points = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        self._classes = (self._points.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        moved = 0.1 * torch.randn(8, generator=tr.sample_rng(index), dtype=torch.float64)
        return self._points[index] + moved, self._classes[index]


def exact_gradient(net: nn.Module, points: Tensor, classes: Tensor) -> Tensor:
    """The sum of this rank's samples' gradients; each is found by itself, so its bits are the same in any batch."""
    total = torch.zeros(sum(parameter.numel() for parameter in net.parameters()), dtype=torch.float64)
    for point, known in zip(points, classes, strict=True):
        loss = nn.functional.cross_entropy(net(point[None]), known[None])
        parts = torch.autograd.grad(loss, list(net.parameters()))
        total += torch.cat([(part / _GRID).round().flatten() for part in parts]) * _GRID
    return total


def use_gradient(net: nn.Module, gradient: Tensor) -> None:
    """Give each parameter its part."""
    parameters = list(net.parameters())
    for parameter, part in zip(parameters, gradient.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


class Ledger:
    """What this rank has done."""

    def __init__(self, directory: Path, state: tr.State) -> None:
        self._directory = directory
        self._state = state
        self._place = (-1, -1)
        self._who: dict[str, object] = {}

    def begin(self, epoch: int, samples: list[int]) -> None:
        """A step is about to be committed."""
        place = (self._state.group, tr.rank())
        if place != self._place:
            self._place = place
            self._who = {"host": socket.gethostname(), "pid": os.getpid(), "world": tr.world_size()}
            print(
                f"group {place[0]} rank {place[1]} pid {os.getpid()} begins after step {self._state.step}", flush=True
            )
        self._write(step=self._state.step + 1, epoch=epoch, samples=samples)

    def finish(self) -> None:
        """It was, in the group in which it began: the commit may have led into the next one."""
        self._write(step=self._state.step)

    def _write(self, **what: object) -> None:
        line = {"t": time.clock_gettime(time.CLOCK_BOOTTIME), **self._who, **what}
        group, rank = self._place
        with (self._directory / f"{group}.{rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Rest:
    """A step takes its time before the ranks meet, after that, before the commit, or at its end, in turn.

    So what is broken finds it in each of these places.
    """

    def __init__(self, step: int, step_time_s: float) -> None:
        self._until = time.monotonic() + step_time_s
        self._place = step % 4

    def at(self, place: int) -> None:
        """Take the rest of the time if it is the turn of this place."""
        if place == self._place:
            time.sleep(max(0.0, self._until - time.monotonic()))


def note_digest(directory: Path, step: int, net: nn.Module) -> None:
    """Append it."""
    with (directory / "digests").open("a") as file:
        file.write(f"{step} {digest(net.state_dict())}\n")


def digest(weights: dict[str, Tensor]) -> str:
    """Of every bit."""
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights.values())).hexdigest()


def eat(directory: Path) -> None:
    """Take as much memory as is asked for, once."""
    told = directory / f"eat.{socket.gethostname()}"
    if told.exists():
        size = int(told.read_text()) << 20
        told.unlink()
        torch.ones(size, dtype=torch.uint8)


def is_to_stop(directory: Path, step: int) -> bool:
    """Whether rank 0 finds the word, for this step."""
    told = directory / "stop"
    found = torch.tensor([int(tr.is_main() and told.exists() and step >= int(told.read_text()))])
    if tr.world_size() > 1:
        dist.broadcast(found, 0)
    return bool(found)


def main() -> None:
    """Train until told to stop."""
    options = parse()
    tr.init()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50)
    loader = tr.DataLoader(Samples(), global_batch=GLOBAL_BATCH)
    state = tr.State(model=net, optimizer=optimizer, schedule=schedule, save_every=options.save_every)
    ledger = Ledger(options.ledger, state)

    def train() -> None:
        for epoch in state.epochs(options.epochs):
            for points, classes in state.steps(loader):
                rest = Rest(state.step, options.step_time_s)
                gradient = exact_gradient(net, points, classes)
                rest.at(0)
                if tr.world_size() > 1:
                    dist.all_reduce(gradient)
                rest.at(1)
                use_gradient(net, gradient / GLOBAL_BATCH)
                optimizer.step()
                schedule.step()
                rest.at(2)
                ledger.begin(epoch, loader.indices)
                state.commit()
                ledger.finish()
                rest.at(3)
            eat(options.ledger)
            if tr.is_main():
                note_digest(options.ledger, state.step, net)
            if is_to_stop(options.ledger, state.step):
                break

    if options.plain:
        state.restore()
        train()
    else:
        state.run(train)
    state.save()
    if tr.is_main():
        torch.save({"step": state.step, "weights": net.state_dict()}, options.ledger / "weights.pt")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--epochs", type=int, default=10**9)
    parser.add_argument("--save_every", type=int, default=20)
    parser.add_argument("--step_time_s", type=float, default=0.0)
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction)
    return parser.parse_args()


if __name__ == "__main__":
    main()
