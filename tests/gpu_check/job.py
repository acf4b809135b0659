"""Train in double precision on the GPU, over gloo: `job.py DIRECTORY STEPS STEP_S`.

Each step takes the same batch whatever the number of ranks. So the loss of each step does not depend on how many there
were, but for the order of sums. Rank 0 appends each step to `DIRECTORY/trace-PID`, in the format of `TraceLine`.

The file `DIRECTORY/cause-FAULT` brings a fault about once, on the last rank, which writes `DIRECTORY/caused-FAULT`.
Faults: `assert` (an index out of bounds in a kernel), `endless` (a kernel that does not end), `kill` (SIGKILL in the
middle of a kernel).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_runtime as tr

BATCH = 48
WIDTH = 512
ENDLESS_CYCLES = 1 << 62
NEVER = 10**9


def build() -> nn.Module:
    """A network with two hidden layers."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))
    return nn.Sequential(*layers).double().to(tr.device())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (48, 64) float64, and classes (48), of a step."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 64, dtype=torch.float64, generator=random)
    return inputs.to(tr.device()), (inputs[:, :10].argmax(dim=1)).to(tr.device())


def fail_if_asked(directory: Path) -> None:
    """Bring a fault about if one is asked for."""
    for asked in directory.glob("cause-*"):
        fault = asked.name.removeprefix("cause-")
        asked.unlink()
        (directory / f"caused-{fault}").write_text(
            json.dumps({"t": time.time(), "pid": os.getpid(), "rank": tr.rank()})
        )
        fail(fault)


def fail(fault: str) -> None:
    """Bring the fault about. Returns only where the next use of the GPU fails or does not return."""
    if not torch.cuda.is_available():  # at the smoke size there is no kernel
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "assert":
            raise IndexError("index out of bounds")
        while True:
            signal.pause()
    if fault == "assert":
        table = torch.zeros(4, device=tr.device())
        table[torch.full((4,), 100, device=tr.device())].sum().item()
    torch.cuda._sleep(ENDLESS_CYCLES)  # type: ignore[no-untyped-call]
    if fault == "kill":
        time.sleep(0.2)  # so that the kernel runs
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    directory, steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tr.init()
    rank, world = tr.rank(), tr.world_size()
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = tr.State(model=model, optimizer=optimizer, save_every=NEVER)
    state.restore()
    with (directory / f"trace-{os.getpid()}").open("a", buffering=1) as trace:
        while state.step < steps:
            if rank == world - 1:
                fail_if_asked(directory)
            inputs, classes = batch_of(state.step)
            share = slice(rank, None, world)
            loss = nn.functional.cross_entropy(model(inputs[share]), classes[share], reduction="sum") / BATCH
            optimizer.zero_grad()
            (loss * world).backward()  # DDP takes the mean over ranks
            optimizer.step()
            whole = loss.detach()
            torch.distributed.all_reduce(whole)
            step = state.step + 1
            line = {"t": time.time(), "group": state.group, "step": step, "world": world, "loss": whole.item()}
            if tr.is_main():  # before the commit: a step that is not replayed has a line
                trace.write(json.dumps(line) + "\n")
            state.commit()
            time.sleep(step_s)


if __name__ == "__main__":
    main()
