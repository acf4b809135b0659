"""A tiny program with Lightning, whose model is sharded."""

from __future__ import annotations

import lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from with_lightning import Module, main


class Sharded(Module):
    """The model, sharded by FSDP2."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    lightning.seed_everything(5, verbose=False)
    main(Sharded(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
