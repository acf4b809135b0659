"""A script of a parameter-server job that counts: each step of a worker adds 1 to its own id and to shared ids.

It runs until a file `enough` exists, and then prints its count and that of the servers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from trainer_runtime import ps

SHARED = range(1000, 1050)


def main() -> None:
    """Run as a server or a worker."""
    enough = Path(sys.argv[1])
    ps.init(ps.SYNC if "sync" in sys.argv else ps.ASYNC)
    if ps.is_server():
        ps.init_server(keep_every_s=0.5)
        ps.run_server()
        return
    torch.set_num_threads(1)
    model = torch.nn.Sequential(ps.SparseEmbedding(1, initial="zeros", name="counts"))
    ps.init_worker(timeout_s=60)
    optimizer = ps.distributed_optimizer(ps.Sum(), model)
    mine = ps.worker_index()
    ids = torch.tensor([mine, *SHARED])
    steps, slowest = 0, 0.0
    while not enough.exists():
        began = time.monotonic()
        model(ids).sum().backward()
        optimizer.step()
        steps += 1
        slowest = max(slowest, time.monotonic() - began)
        print(f"step {steps}", flush=True)
    with torch.no_grad():
        found = int(model(torch.tensor([mine])).item())
    print(f"counted {steps}, servers have {found}, slowest {slowest:.3f}", flush=True)
    ps.stop_worker()


if __name__ == "__main__":
    main()
