"""A tiny program with Transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable

import bench
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from trainer_runtime import phases
from trainer_runtime.integrations import TransformersCallback


class Notes(TrainerCallback):
    """Notes every step."""

    def on_step_end(self, _args: object, state: object, _control: object, **_: object) -> None:
        bench.step_done(state.global_step)
        assert not phases._phases.names

    def on_prediction_step(self, *_: object, **__: object) -> None:
        assert phases._phases.names == ["evaluate"], "no steps are to be expected"


def main(prepare: Callable[[Trainer], None] = lambda _: None) -> None:
    """Train.

    Args:
        prepare: called with the Trainer before the callback is made.
    """
    torch.manual_seed(5)
    model = bench.Net()
    arguments = TrainingArguments(
        output_dir=str(bench.DIRECTORY / "output"),
        use_cpu=True,
        num_train_epochs=bench.EPOCHS,
        per_device_train_batch_size=bench.BATCH,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        warmup_steps=5,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    )
    data = bench.Numbers()
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Notes()])
    prepare(trainer)
    trainer.add_callback(TransformersCallback(trainer, save_every=bench.SAVE_EVERY))
    trainer.train()
    evaluated = [line["epoch"] for line in trainer.state.log_history if "eval_loss" in line]
    assert evaluated == [1, 2, 3], trainer.state.log_history
    assert phases._phases.is_trained
    bench.finish(model)


if __name__ == "__main__":
    main()
