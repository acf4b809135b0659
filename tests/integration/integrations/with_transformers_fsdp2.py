"""A tiny program with Transformers' Trainer, whose model is sharded."""

from __future__ import annotations

from accelerate import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer
from with_transformers import main


def shard(trainer: Trainer) -> None:
    """Let it shard by FSDP2. Without a GPU Accelerate ignores FSDP, so what it would set is set here."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True


if __name__ == "__main__":
    main(shard)
