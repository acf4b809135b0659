"""A program as Lightning's documents have it: the demo model of its package, checkpoints that it keeps itself."""

from __future__ import annotations

import os
import time

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

EPOCHS = 5


class Paced(Callback):
    """Says which epoch is over, and takes its time: someone wants to interfere."""

    def on_train_batch_end(self, *_: object) -> None:
        time.sleep(0.05)

    def on_train_epoch_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        print(f"epoch {trainer.current_epoch} of {EPOCHS}", flush=True)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    lightning.seed_everything(5, verbose=False)
    model = BoringModel()
    loader = DataLoader(torch.randn(64, 32), batch_size=4, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=EPOCHS,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True), Paced()],
    )
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
