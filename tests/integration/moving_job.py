"""A training script with `State.run`: `moving_job.py DIRECTORY EPOCHS STEP_TIME_S SETUP_S`.

It writes, for the test:

    DIRECTORY/trace.jsonl        the steps that rank 0 has committed
    DIRECTORY/ledger.{pid}       a line of JSON for each step of this process: what it trained, as which rank
    DIRECTORY/setup.{pid}        what the process saw of its place before `state.run`
    DIRECTORY/weights.pt         the result
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr

SAMPLES = 119
GLOBAL_BATCH = 24
STEPS_PER_EPOCH = 5
MISDEED = os.environ.get("MISDEED", "")
"""What a rank does wrong: `raise`, `sleep`, `stop`, `stick` (in C) or `hold` (in C, with the interpreter's lock) once,
`catch` each RuntimeError, or `rate`: follow a learning rate that depends on the world in which it has set up. `freeze`:
the first layer is trained from epoch `THAWS_AT` on."""
THAWS_AT = 20


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points of two classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._points = torch.randn(SAMPLES, 8, generator=generator)
        self._classes = (self._points.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._points[index], self._classes[index]


def misbehave(directory: Path, step: int) -> None:
    """Do once, on rank 1 after step 20, what the test wants to see."""
    if MISDEED not in {"raise", "sleep", "stop", "hold", "stick"} or step <= 20 or tr.rank() != 1:
        return
    with suppress(FileExistsError):
        (directory / "misdeed").open("x").write(str(os.getpid()))
        if MISDEED == "raise":
            raise ValueError("a mistake of the script")
        if MISDEED == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if MISDEED in {"hold", "stick"}:
            (ctypes.PyDLL if MISDEED == "hold" else ctypes.CDLL)(None).sleep(1000)
        time.sleep(1000)


def set_up(directory: Path, setup_s: float) -> None:
    """Take as long as a real script takes to read its model and index its data, or fail."""
    if (directory / "bad").exists():
        raise FileNotFoundError(directory / "data")
    time.sleep(setup_s)


def make_schedule(opt: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule of the learning rate, which does not depend on the world unless the test wants that."""
    if MISDEED == "rate":
        world = dist.get_world_size()
        return torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0 / world)
    return torch.optim.lr_scheduler.StepLR(opt, 7, 0.9)


def keys() -> int:
    """Count the keys of the store by which the ranks have met."""
    return int(dist.distributed_c10d._get_default_store().num_keys())


def main() -> None:
    """Train."""
    directory, epochs, step_time_s, setup_s = Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:5])
    tr.init()
    (directory / f"setup.{os.getpid()}").write_text(f"{tr.is_main()} {dist.get_world_size()}")
    set_up(directory, setup_s)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    is_thawing = MISDEED == "freeze"
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, find_unused_parameters=is_thawing)  # several buckets
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = make_schedule(opt)
    loader = tr.DataLoader(Samples(), global_batch=GLOBAL_BATCH, num_workers=2, persistent_workers=True)
    state = tr.State(model=model, opt=opt, schedule=schedule, data=loader, save_every=1000)
    places = []

    @state.on_regroup
    def note_place(rank: int, world_size: int) -> None:
        places.append((rank, world_size))

    def train() -> None:
        for epoch in state.epochs(epochs):
            net[0].requires_grad_(not is_thawing or epoch >= THAWS_AT)
            for points, classes in state.steps(loader):
                group, step = state.group, state.step + 1
                try:
                    opt.zero_grad()
                    misbehave(directory, step)
                    loss = nn.functional.cross_entropy(model(points), classes) * loader.weight
                    loss.backward()
                except RuntimeError:
                    if MISDEED == "catch":
                        continue
                    raise
                opt.step()
                schedule.step()
                line = {
                    "epoch": state.epoch,
                    "group": group,
                    "step": step,
                    "indices": loader.indices,
                    "places": places[-9:],
                    "keys": keys(),
                }
                with (directory / f"ledger.{os.getpid()}").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                state.commit()
                if tr.is_main():
                    line = {"t": time.time(), "group": group, "step": step, "world": tr.world_size()}
                    with (directory / "trace.jsonl").open("a") as file:
                        file.write(json.dumps({**line, "loss": loss.item()}) + "\n")
                if not (directory / "hurry").exists():
                    time.sleep(step_time_s)  # the time that a step computes

    state.run(train)
    if tr.is_main():
        torch.save(net.state_dict(), directory / "weights.pt")


if __name__ == "__main__":
    main()
