"""What snapshots cost the steps on a GPU: `snapshot_parts.py OUT GIGABYTES STEPS pinned|pageable`.

Runs under an agent. `pageable` keeps the snapshots' memory from being pinned.

Half of the steps are made without a commit, half with a commit and thus a snapshot each. Afterwards as many bytes are
copied from the GPU into pageable and into pinned memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import trainer_runtime as tr
from trainer_runtime.pinned_memory import PinnedMemory

BYTES_OF_WEIGHT = 12
"""With the two moments of AdamW."""
LAYER = 4096
STEP_S = 0.3
NEVER = 10**9


def build(gigabytes: float) -> nn.Module:
    """Linear layers; weights and moments are together so large."""
    count = max(1, round(gigabytes * 1e9 / (BYTES_OF_WEIGHT * LAYER * LAYER)))
    return nn.ModuleList(nn.Linear(LAYER, LAYER, bias=False, device="cuda") for _ in range(count))


class Load:
    """Matrix products that take about `STEP_S` on this GPU, as a forward and backward pass would."""

    def __init__(self) -> None:
        self._left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self._count = 1
        self._count = max(1, round(STEP_S / min(self.seconds() for _ in range(3))))

    def seconds(self) -> float:
        """Compute, and return how long it took."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.launch()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def launch(self) -> None:
        """Submit the products."""
        for _ in range(self._count):
            self._left @ self._left


def main() -> None:
    """Measure, and write the seconds as JSON."""
    out, gigabytes, steps = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4] == "pageable":
        PinnedMemory.pin = lambda *_: None  # type: ignore[method-assign]
    tr.init()
    model = build(gigabytes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    load = Load()
    state = tr.State(model=model, optimizer=optimizer, save_every=NEVER)
    state.restore()
    steps_s: dict[bool, list[float]] = {False: [], True: []}
    held = []
    for number in range(2 * (steps + 3)):
        commits = number >= steps + 3
        torch.cuda.synchronize()
        began = time.perf_counter()
        load.launch()
        optimizer.step()
        torch.cuda.synchronize()  # loss.item()
        if commits:
            committing = time.perf_counter()
            state.commit()
            held.append(time.perf_counter() - committing)
        steps_s[commits].append(time.perf_counter() - began)
    found = {
        "gigabytes": sum(parameter.nbytes * 3 for parameter in model.parameters()) / 1e9,
        "bare_s": statistics.median(steps_s[False][3:]),
        "with_s": statistics.median(steps_s[True][3:]),
        "worst_s": max(steps_s[True][3:]),
        "held_s": statistics.median(held[3:]),
        **copies(),
    }
    out.write_text(json.dumps(found))


def copies() -> dict[str, float]:
    """Gigabytes a second from the GPU into pageable and into pinned memory, and how long a gigabyte takes to pin."""
    source = torch.ones(10**9, dtype=torch.uint8, device="cuda")
    target = torch.zeros(10**9, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    pageable_s = time.perf_counter() - began
    began = time.perf_counter()
    torch.cuda.cudart().cudaHostRegister(target.data_ptr(), target.nbytes, 0)
    pin_s = time.perf_counter() - began
    began = time.perf_counter()
    target.copy_(source)
    pinned_s = time.perf_counter() - began
    torch.cuda.cudart().cudaHostUnregister(target.data_ptr())
    return {"pageable_gb_s": 1 / pageable_s, "pinned_gb_s": 1 / pinned_s, "pin_s": pin_s}


if __name__ == "__main__":
    main()
