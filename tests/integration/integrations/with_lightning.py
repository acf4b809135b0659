"""A tiny program with Lightning."""

from __future__ import annotations

import os

import bench
import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from trainer_runtime import phases
from trainer_runtime.integrations import LightningCallback


class Module(lightning.LightningModule):
    """The model with what Lightning wants to know of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = bench.Net()
        self.validated = 0

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        assert not phases._phases.names
        return self.net(**batch)["loss"]

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("loss", self.net(**batch)["loss"], sync_dist=True)
        assert phases._phases.names == ["validation"], "no steps are to be expected"

    def on_validation_epoch_end(self) -> None:
        self.validated += not self.trainer.sanity_checking

    def on_train_batch_end(self, _outputs: object, _batch: object, _index: int) -> None:
        if self.trainer.global_step > self.seen:
            self.seen = self.trainer.global_step
            bench.step_done(self.seen)

    def on_train_start(self) -> None:
        self.seen = self.trainer.global_step

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["validated"] = self.validated

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        self.validated = checkpoint["validated"]


def main(module: Module, strategy: object) -> None:
    """Train."""
    loader = DataLoader(bench.Numbers(), batch_size=bench.BATCH, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=strategy,
        max_epochs=bench.EPOCHS,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            EarlyStopping("loss", patience=100),
            LightningCallback(save_every=bench.SAVE_EVERY),
        ],
    )
    trainer.fit(module, loader, DataLoader(bench.Numbers(), batch_size=16))
    assert trainer.global_step == bench.EPOCHS * bench.STEPS_PER_EPOCH, trainer.global_step
    assert module.validated == 2 * bench.EPOCHS, module.validated
    assert phases._phases.is_trained
    bench.finish(module.net)


if __name__ == "__main__":
    lightning.seed_everything(5, verbose=False)
    main(Module(), "ddp" if bench.WORLD > 1 else "auto")
