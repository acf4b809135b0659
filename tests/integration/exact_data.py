"""One epoch and a half on uneven shares, by real ranks: `python exact_data.py WORLD...` prints what each rank saw.

For each step the rank's gradients, averaged by DDP, are compared with those of a single model that is given the whole
batch at once. The samples come from two worker processes that stay, each with noise of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import trainer_runtime as tr
from trainer_runtime import dist

SAMPLES = 22
GLOBAL_BATCH = 10
"""Steps of 10, 10 and 2: in a world of three the last one leaves a rank without a sample."""
BEGINS = ((0, 0), (1, 10))
"""Epoch, and samples done: a whole epoch, and one that goes on in its middle."""


class Noisy(Dataset[Any]):
    """Points with noise from all sources that augmentation code uses, their index and the process that read them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002 - the global one is meant
        noise.append(torch.rand((), generator=tr.sample_rng(index)).item())
        point = torch.tensor(noise, dtype=torch.float64) + index / SAMPLES
        return {"index": index, "point": point, "label": index % 3, "pid": os.getpid()}


def make_loader(**options: Any) -> tr.DataLoader:  # noqa: ANN401 - of a data loader
    """Return a loader over the noisy points."""
    return tr.DataLoader(Noisy(), global_batch=GLOBAL_BATCH, seed=5, **options)


def as_ledger(batch: dict[str, Tensor]) -> list[tuple[int, list[float]]]:
    """Return the samples of a batch as they were loaded, by index."""
    return list(zip(batch["index"].tolist(), batch["point"].tolist(), strict=True))


def main() -> None:
    """Run the worlds one after the other."""
    result = {}
    for world in map(int, sys.argv[1:]):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with ProcessPoolExecutor(world, multiprocessing.get_context("fork")) as ranks:
            result[world] = list(ranks.map(run_rank, range(world), [world] * world, [port] * world))
    print(json.dumps(result))


def run_rank(rank: int, world: int, port: int) -> dict[str, Any]:
    """Train as one rank; return its samples by epoch, its batches a step, and its gradients' largest error."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    tr.init(timeout_s=60)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = DistributedDataParallel(net)
    loader, reference = make_loader(micro_batch=3, num_workers=2, persistent_workers=True), make_loader()
    seen: dict[str, Any] = {"samples": [], "batches": [], "error": 0.0, "without": 0}
    for epoch, done in BEGINS:
        with patch.object(dist, "rank", lambda: 0), patch.object(dist, "world_size", lambda: 1):
            whole_batches = list(reference.begin(epoch, done))
        samples, batches = [], 0
        for batch in loader.begin(epoch, done):
            batches += 1
            with nullcontext() if loader.ends_step else model.no_sync():
                (loader.weight * cross_entropy(model(batch["point"]), batch["label"])).backward()
            samples += [entry for entry in as_ledger(batch) if entry[0] in loader.indices]
            seen["without"] += not loader.indices
            if loader.ends_step:
                seen["batches"].append(batches)
                seen["error"] = max(seen["error"], take_step(net, whole_batches.pop(0)))
                batches = 0
        seen["samples"].append(samples)
    return seen


def take_step(net: nn.Module, whole_batch: dict[str, Tensor]) -> float:
    """Compare the gradients with those of the whole batch, go down them, and return the largest relative error."""
    averaged = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    cross_entropy(net(whole_batch["point"]), whole_batch["label"]).backward()
    worst = 0.0
    for parameter, gradient in zip(net.parameters(), averaged, strict=True):
        assert parameter.grad is not None
        worst = max(worst, float((gradient - parameter.grad).norm() / parameter.grad.norm()))
        parameter.data -= 0.1 * gradient
    net.zero_grad()
    return worst


if __name__ == "__main__":
    main()
