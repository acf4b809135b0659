"""A training script with DeepSpeed, on CPUs: same bits in the same number of ranks.

Usage: deepspeed_job.py DIRECTORY STEPS STEP_TIME_S STAGE [ACCUMULATION [DTYPE]]. STAGE is that of ZeRO, ACCUMULATION
the micro-batches of a step, DTYPE `fp32` or `bf16`. A step takes no time of its own once DIRECTORY/hurry is
there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import trainer_runtime as tr

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed


def main() -> None:
    """Train."""
    directory, steps, step_time_s, stage = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    accumulation = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    dtype = sys.argv[6] if len(sys.argv) > 6 else "fp32"
    tr.init()
    torch.manual_seed(0)
    norm = nn.BatchNorm1d if dtype == "fp32" else nn.LayerNorm  # BatchNorm mixes types in bf16
    net = nn.Sequential(nn.Linear(8, 33), norm(33), nn.ReLU(), nn.Dropout(0.1), nn.Linear(33, 5))
    net[0].bias.requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=[parameter for parameter in net.parameters() if parameter.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 6,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2 * steps, "warmup_num_steps": 20}},
            "bf16": {"enabled": dtype == "bf16"},
        },
    )
    state = tr.State(engine=engine, save_every=10)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    for _ in state.epochs(1):
        for step in state.steps(range(steps)):
            made = torch.Generator().manual_seed(step)
            points, wanted = (torch.randn(12 * accumulation, size, generator=made).to(kind) for size in (8, 5))
            for micro in range(accumulation):
                mine = slice(12 * micro + tr.rank(), 12 * (micro + 1), tr.world_size())
                loss = nn.functional.mse_loss(engine(points[mine]), wanted[mine])
                engine.backward(loss)
                engine.step()
            state.commit()
            line = {"t": time.time(), "group": state.group, "step": state.step, "world": tr.world_size()}
            name = "trace.jsonl" if tr.is_main() else f"trace-{tr.rank()}.jsonl"
            with (directory / name).open("a") as file:
                file.write(json.dumps({**line, "loss": loss.item()}) + "\n")
            if not (directory / "hurry").exists():
                time.sleep(step_time_s)
    with deepspeed.zero.GatheredParameters([*net.parameters()]):
        weights = {key: tensor.detach().clone() for key, tensor in net.state_dict().items()}
    numbers = [*engine.get_lr(), engine.global_steps, engine.skipped_steps, engine.global_samples]
    weights["numbers"] = torch.tensor(numbers, dtype=torch.float64)
    torch.save(weights, directory / ("weights.pt" if tr.is_main() else f"weights-{tr.rank()}.pt"))


if __name__ == "__main__":
    main()
