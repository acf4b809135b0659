"""A program as Transformers' documents have it: a small language model, checkpoints that the Trainer keeps itself."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

EPOCHS = 5
SAMPLES, LENGTH, VOCABULARY = 64, 16, 32


class Counting(Dataset):
    """Sequences that count on from somewhere."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


class Paced(TrainerCallback):
    """Says which epoch begins, and takes its time: someone wants to interfere."""

    def on_step_end(self, *_: object, **__: object) -> None:
        time.sleep(0.05)

    def on_epoch_begin(self, _arguments: object, state: object, _control: object, **_: object) -> None:
        print(f"epoch {int(state.epoch)} of {EPOCHS}", flush=True)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    torch.manual_seed(5)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0)
    )
    arguments = TrainingArguments(
        output_dir="checkpoints",
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[Paced()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint("checkpoints") if Path("checkpoints").exists() else None)
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
