"""A tiny program with Accelerate."""

from __future__ import annotations

from collections.abc import Callable

import bench
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from trainer_runtime.integrations import AccelerateState


class Counter:
    """Something of the script's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def sharding() -> Accelerator:
    """One that shards by FSDP2. Without a GPU Accelerate ignores FSDP, so what it would set is set here."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def main(make: Callable[[], Accelerator]) -> None:
    """Train."""
    set_seed(5)
    accelerator = make()
    model = bench.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.7)
    loader = DataLoader(bench.Numbers(), batch_size=bench.BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    state = AccelerateState(accelerator, save_every=bench.SAVE_EVERY)
    for _ in state.epochs(bench.EPOCHS):
        for batch in state.steps(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                counter.count += 1
                bench.step_done(state.step + 1)
            state.commit()
    assert counter.count == state.step == bench.EPOCHS * bench.STEPS_PER_EPOCH, (counter.count, state.step)
    bench.finish(accelerator.unwrap_model(model))


if __name__ == "__main__":
    main(lambda: Accelerator(cpu=True, gradient_accumulation_steps=2))
