"""A parameter-server job: a small model with an embedding, trained with random data. It runs until it is stopped.

`ps_job.py DIRECTORY`. Each process appends lines of JSON with monotonic times to a file of its own there, as `worker-0`
or `server-1`: a worker one for each finished step, a server one when it is ready.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()
"""Time before the slow imports."""

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

from trainer_runtime import ps  # noqa: E402

STEP_TIME_S = 0.02
"""Duration of a step in addition to its own arithmetic, as in the other benchmark jobs."""
_IDS = 10_000
_BATCH = (64, 8)
_KEEP_EVERY_S = 0.5


class Net(nn.Module):
    """An embedding with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = ps.EmbeddingBag(16)
        self.head = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, 1)."""
        return self.head(self.bag(ids))  # type: ignore[no-any-return]


def note(directory: str, name: str, **said: float) -> None:
    """Append a line with a single write."""
    with (Path(directory) / name).open("ab", buffering=0) as file:
        file.write(json.dumps({"pid": os.getpid(), **said}).encode() + b"\n")


def main() -> None:
    """Run as a server or a worker."""
    directory = sys.argv[1]
    imported = time.monotonic()
    torch.set_num_threads(1)
    ps.init()
    if ps.is_server():
        ps.init_server(keep_every_s=_KEEP_EVERY_S)
        note(directory, f"server-{ps.server_index()}", began=BEGAN, imported=imported, ready=time.monotonic())
        ps.run_server()
        return
    model = Net()
    ps.init_worker()
    optimizer = ps.distributed_optimizer(torch.optim.Adam(model.parameters(), 1e-3), model)
    name = f"worker-{ps.worker_index()}"
    while True:
        time.sleep(STEP_TIME_S)
        model(torch.randint(_IDS, _BATCH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(directory, name, t=time.monotonic())


if __name__ == "__main__":
    main()
