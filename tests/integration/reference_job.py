"""A training script with all that real ones have, whose every result is compared with an undisturbed run's.

Dropout, BatchNorm, Adam, a schedule, accumulation, a loader with two persistent workers, random augmentation, an
evaluation after each epoch, and a data set that no world divides. It can be told to kill itself, once, at a moment that
has a name, and to leave something out of its State, to show that the comparison would notice.

    DIRECTORY/ledger.{group}.{rank}   the samples of each committed step, by this rank
    DIRECTORY/trace.jsonl             the steps that rank 0 has committed
    DIRECTORY/weights.pt              the result
    DIRECTORY/killed.{moment}         it has come
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr
from trainer_runtime import writer
from trainer_runtime.agent_channel import AgentChannel

SAMPLES = 119
GLOBAL_BATCH = 24
STEPS_PER_EPOCH = 5
MICRO_BATCHES = 3
MOMENTS = ("forward", "all-reduce", "optimizer", "before commit", "write", "before rename", "unanswered")


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Points of two noisy classes, moved a little at random each time they are looked at."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._points = torch.randn(SAMPLES, 8, generator=generator)
        self._classes = (self._points.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = tr.sample_rng(index)
        moved = self._points[index] + 0.1 * torch.randn(8, generator=rng)
        kept = (torch.rand(32, generator=rng) > 0.2).float() / 0.8
        return moved, self._classes[index], kept


class Net(nn.Module):
    """Whose noise belongs to the rank; or, where the world changes, to the sample."""

    def __init__(self, *, any_world: bool) -> None:
        super().__init__()
        self.any_world = any_world
        self.first = nn.Linear(8, 32)
        # The statistics of a batch depend on how a batch is cut into shares, and so on the world.
        self.norm = nn.GroupNorm(4, 32) if any_world else nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(32, 2)

    def forward(self, points: Tensor, kept: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(points)))
        return self.second(hidden * kept if self.any_world and self.training else self.dropout(hidden))


class Death:
    """Kills this process at moments with names, each in a step of its own, once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._directory = options.directory
        self._steps = {moment: options.die_at + 2 * place for place, moment in enumerate(options.die_in)}
        self._rank = options.die_as
        self.state: tr.State | None = None

    def come(self, moment: str) -> None:
        """It is this moment: die if its step has come."""
        mark = self._directory / f"killed.{moment}"
        is_due = self.state is not None and self.state.step + 1 >= self._steps.get(moment, sys.maxsize)
        if not is_due or tr.rank() != self._rank or mark.exists():
            return
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way

    def watch_runtime(self) -> None:
        """Let it come in the runtime as well."""
        place, send = writer.rename_committed, AgentChannel._send

        def dying_place(private: Path) -> bool:
            self.come("before rename")
            return place(private)

        def dying_send(channel: AgentChannel, message: dict[str, object]) -> None:
            send(channel, message)
            if "publish" in message:
                self.come("unanswered")

        writer.rename_committed, AgentChannel._send = dying_place, dying_send  # type: ignore[method-assign]


def main() -> None:
    """Train."""
    options = parse()
    death = Death(options)
    death.watch_runtime()
    tr.init()
    torch.manual_seed(3)
    net = Net(any_world=options.any_world).to(tr.device())
    # Without a new order of its buckets a gradient is summed in the same order after a restart.
    model = DistributedDataParallel(net, find_unused_parameters=True)

    def reduce(group, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - torch reads annotations
        reduced = allreduce_hook(group, bucket)
        death.come("all-reduce")
        return reduced

    model.register_comm_hook(None, reduce)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    optimizer.register_step_pre_hook(lambda *_: death.come("optimizer"))
    loader = tr.DataLoader(
        Samples(), global_batch=GLOBAL_BATCH, micro_batch=micro_batch(), num_workers=2, persistent_workers=True
    )
    noise = torch.Generator().manual_seed(2)
    things = {"model": model, "optimizer": optimizer, "schedule": schedule, "noise": noise, "best": 0.0}
    without = options.without if options.without in things else None
    things.pop(without, None)
    state = tr.State(save_every=options.save_every, **things)
    state.on_save(lambda _private: death.come("write"))
    state.restore()
    death.state = state
    best = 0.0
    for epoch in state.epochs(options.epochs):
        samples: list[int] = []
        for points, classes, kept in state.steps(loader):
            death.come("forward")
            samples += loader.indices
            with nullcontext() if loader.ends_step else model.no_sync():
                shaken = points if options.any_world else points + 0.01 * torch.randn(points.shape, generator=noise)
                guessed = model(shaken, kept)
                (nn.functional.cross_entropy(guessed, classes) * loader.weight).backward()
            if not loader.ends_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            death.come("before commit")
            note(options.directory, state, samples, epoch)
            samples = []
            state.commit()
            if tr.is_main():
                trace(options.directory, state)
            if not (options.directory / "hurry").exists():
                time.sleep(options.step_time_s)
        with tr.phase("evaluation"):
            best = max(best, evaluate(net))
    if tr.is_main():
        torch.save({**net.state_dict(), "best": torch.tensor(best)}, options.directory / "weights.pt")


def micro_batch() -> int:
    """The largest share of a step, in three."""
    share = -(-GLOBAL_BATCH // tr.world_size())
    return -(-share // MICRO_BATCHES)


def evaluate(net: Net) -> float:
    """Share of all samples that are told right."""
    data = Samples()
    net.eval()
    with torch.no_grad():
        right = (net(data._points, torch.ones(1)).argmax(dim=1) == data._classes).float().mean().item()
    net.train()
    return right


def note(directory: Path, state: tr.State, samples: list[int], epoch: int) -> None:
    """Which samples this rank put into the step that is about to be committed."""
    line = {"step": state.step + 1, "epoch": epoch, "samples": samples}
    with (directory / f"ledger.{state.group}.{tr.rank()}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def trace(directory: Path, state: tr.State) -> None:
    """Note a committed step."""
    line = {"t": time.time(), "group": state.group, "step": state.step, "world": tr.world_size(), "loss": 0.0}
    with (directory / "trace.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save_every", type=int, default=4)
    parser.add_argument("--step_time_s", type=float, default=0.0)
    parser.add_argument("--any_world", action="store_true")
    parser.add_argument("--without", choices=["optimizer", "schedule", "noise"])
    parser.add_argument("--die_in", nargs="*", default=(), choices=MOMENTS)
    parser.add_argument("--die_at", type=int, default=4, help="the step of the first of these; then every other one")
    parser.add_argument("--die_as", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
