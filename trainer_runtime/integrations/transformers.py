"""Transformers' Trainer: a State saves its state, and its own skipping finds the position in the data.

Before it calls its first callback, `Trainer` determines its position from the directory that `train` is given to resume
from. Therefore this callback replaces `train`: it restores the State and gives Trainer a directory that contains only
Trainer's own record, `trainer_state.json`. The model is loaded by then. Optimizer, schedule and scaler are loaded as
soon as they exist.

A model that Trainer shards (FSDP2) can be restored only after that, and its own record is read before. So the two are
done in the other order then (`_train_sharded`).

A step is committed when the next one begins or the training ends: only then has Trainer done the evaluation, log and
save that were due with it, so a restart loses none of these.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from trainer_runtime.capture.local import has_shards
from trainer_runtime.integrations.common import DeferredState, join, restore_early
from trainer_runtime.own_step_time import watch_own_time
from trainer_runtime.phases import expect_steps, phase
from trainer_runtime.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TRAINER_STATE = "trainer_state.json"
_FSDP2 = 2


class TransformersCallback(TrainerCallback):  # type: ignore[misc] # transformers is not there for mypy
    """Lets a `transformers.Trainer` survive restarts: `trainer.add_callback(TransformersCallback(trainer))`.

    `trainer.train()` then begins where the job's checkpoints say, commits every optimizer step, and raises
    SystemExit(101) at a handoff. `resume_from_checkpoint` is used only if State has no checkpoint. Trainer's own
    checkpoints are neither needed nor changed. `train` can be called once.

    Args:
        trainer: the Trainer that the callback is added to.
        **options: options of `State`: checkpoint_dir, save_every, keep, seed.

    Raises:
        ValueError: the trainer shards its model otherwise than by FSDP2, or creates it anew in each `train`.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:  # noqa: ANN401 - Trainer; what State takes
        _require_usable(trainer)
        self._trainer = trainer
        self._options = options
        self._state: State | None = None
        self._set_random_states: Callable[[], None] | None = None
        self._committed_step = 0
        self._optimizer = DeferredState(_reader(trainer, "optimizer"))
        self._schedule = DeferredState(_reader(trainer, "lr_scheduler"))
        self._record = DeferredState(self._read_record)
        self._has_ended = False
        self._train = trainer.train
        trainer.train = self._resume
        for name in ("evaluate", "predict"):
            setattr(trainer, name, phase(name)(getattr(trainer, name)))

    def on_train_begin(self, _args: object, state: Any, _control: object, **_: object) -> None:  # noqa: ANN401
        """Load the states of objects that did not exist when the State was restored."""
        if self._state is None:
            raise RuntimeError("TransformersCallback was made for another Trainer; give it the one that it is added to")
        for later, thing in ((self._optimizer, self._trainer.optimizer), (self._schedule, self._trainer.lr_scheduler)):
            restored = later.take()
            if restored is not None:
                thing.load_state_dict(restored)
        self._committed_step = state.global_step
        watch_own_time([self._trainer.model_wrapped])

    def on_step_begin(self, _args: object, state: Any, _control: object, **_: object) -> None:  # noqa: ANN401
        """Commit the previous step; at the first step of this process, set the restored random states."""
        if self._set_random_states is not None:
            self._set_random_states()
            self._set_random_states = None
        self._commit(state.global_step)

    def on_train_end(self, _args: object, state: Any, _control: object, **_: object) -> None:  # noqa: ANN401
        """Commit the last step, and save it."""
        self._has_ended = True
        self._commit(state.global_step)
        expect_steps(are_due=False)
        if self._state is not None:
            self._state.save()

    def _resume(self, resume_from_checkpoint: object = None, *more: Any, **options: Any) -> Any:  # noqa: ANN401
        """Replacement of `Trainer.train`."""
        if self._state is not None:
            raise RuntimeError("train() was already called; use a Trainer and a TransformersCallback for each training")
        trainer = self._trainer
        if self not in trainer.callback_handler.callbacks:
            raise RuntimeError(
                "TransformersCallback(trainer) was made but not added; call trainer.add_callback with it"
            )
        join(trainer.args.world_size, "on machines without a GPU give TrainingArguments(use_cpu=True)")
        try:
            if trainer.is_fsdp_enabled:
                return self._train_sharded(resume_from_checkpoint, *more, **options)
            record = self._restore(optimizer=self._optimizer, schedule=self._schedule)
            if record is None:
                return self._train(resume_from_checkpoint, *more, **options)
            with _as_directory(trainer, record) as directory:
                return self._train(directory, *more, **options)
        except _HasEndedError as ended:
            return _end_again(trainer, ended.trainer_state)

    def _train_sharded(self, resume_from_checkpoint: object, *more: Any, **options: Any) -> Any:  # noqa: ANN401
        """Train a model that Trainer shards: let it do so before it reads its own record, instead of afterwards."""
        if resume_from_checkpoint:
            raise ValueError(
                "TransformersCallback wants no resume_from_checkpoint with FSDP, where only State resumes, got "
                f"{resume_from_checkpoint}; load these weights into the model beforehand"
            )
        trainer, directory = self._trainer, ""
        prepare, begin = trainer._prepare_for_training, trainer._init_training_state  # noqa: SLF001 - no public name
        prepared: list[Any] = []

        def begin_restored(max_steps: int, per_epoch: int, epochs: int, _: str, trial: object) -> Any:  # noqa: ANN401
            first = begin(max_steps, per_epoch, epochs, None, trial)
            model, _ = prepare(max_steps, None, None)
            _require_shards(model)
            prepared.append(model)
            record = self._restore(optimizer=trainer.optimizer, schedule=trainer.lr_scheduler)
            if record is None:
                return first
            (Path(directory) / _TRAINER_STATE).write_text(record, encoding="utf-8")
            return begin(max_steps, per_epoch, epochs, directory, trial)

        def take_prepared(_max_steps: int, loader: Any, _: str) -> Any:  # noqa: ANN401
            trainer.callback_handler.train_dataloader = loader
            return prepared.pop(), loader

        trainer._init_training_state, trainer._prepare_for_training = begin_restored, take_prepared  # noqa: SLF001
        try:
            # Without a directory Trainer would skip no batches. `train` itself reads only the size of a batch there.
            with _as_directory(trainer, json.dumps(asdict(TrainerState()))) as directory:
                return self._train(directory, *more, **options)
        finally:
            del trainer._init_training_state, trainer._prepare_for_training  # noqa: SLF001

    def _restore(self, *, optimizer: Any, schedule: Any) -> str | None:  # noqa: ANN401
        """Restore the State; return Trainer's record of itself as JSON, or None if nothing was saved.

        Raises:
            _HasEndedError: the training was stopped early.
        """
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        self._state = State(
            **self._options,
            model=trainer.model,
            optimizer=optimizer,
            schedule=schedule,
            trainer=self._record,
            **({} if scaler is None else {"scaler": scaler}),
        )
        self._set_random_states = restore_early(self._state)
        record = self._record.take()
        if record is None:
            return None
        trainer_state = json.loads(record["json"])
        _load_callbacks(trainer, trainer_state["stateful_callbacks"])
        if record["has_ended"] and trainer_state["global_step"] < trainer_state["max_steps"]:
            raise _HasEndedError(trainer_state)
        return str(record["json"])

    def _read_record(self) -> dict[str, Any]:
        """Return Trainer's record of itself, with the present states of the callbacks."""
        trainer = self._trainer
        stateful = _stateful([*trainer.callback_handler.callbacks, trainer.control])
        states = {type(callback).__name__: callback.state() for callback in stateful}
        record = asdict(trainer.state) | {"stateful_callbacks": states}
        return {"json": json.dumps(record), "has_ended": self._has_ended}

    def _commit(self, step: int) -> None:
        if self._state is not None and step > self._committed_step:
            self._committed_step = step
            self._state.commit()


class _HasEndedError(Exception):
    """The training was stopped early: Trainer itself would take one more step."""

    def __init__(self, trainer_state: dict[str, Any]) -> None:
        super().__init__()
        self.trainer_state = trainer_state


def _require_usable(trainer: Any) -> None:  # noqa: ANN401
    if trainer.is_deepspeed_enabled:
        raise ValueError("TransformersCallback wants a model that is whole on every rank, or FSDP2, got DeepSpeed")
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != _FSDP2:
        raise ValueError('TransformersCallback wants FSDP2, got FSDP1; give fsdp_config={"version": 2, ...}')
    if trainer.model_init is not None:
        raise ValueError("TransformersCallback wants Trainer(model=...), got model_init=...; make the model beforehand")


def _require_shards(model: Any) -> None:  # noqa: ANN401
    if not has_shards(model):
        raise ValueError(
            "TransformersCallback wants parameters that fully_shard has sharded, as FSDP is asked for, got whole ones; "
            "give no FSDP on machines without a GPU, where Accelerate ignores it"
        )


def _reader(trainer: Any, name: str) -> Callable[[], dict[str, Any]]:  # noqa: ANN401
    """Return a function that reads the state of an object that Trainer creates in `train`."""
    return lambda: getattr(trainer, name).state_dict()


def _end_again(trainer: Any, trainer_state: dict[str, Any]) -> TrainOutput:  # noqa: ANN401
    """Return the result of a training that was stopped early."""
    trainer.state = TrainerState(**trainer_state)
    metrics = trainer_state["log_history"][-1]
    return TrainOutput(trainer_state["global_step"], metrics["train_loss"], metrics)


def _load_callbacks(trainer: Any, states: dict[str, Any]) -> None:  # noqa: ANN401
    """Restore callbacks that have a state (the patience of early stopping, say)."""
    for callback in _stateful(trainer.callback_handler.callbacks):
        kept = states.get(type(callback).__name__)
        if isinstance(kept, dict):
            for name, value in kept["attributes"].items():
                setattr(callback, name, value)


def _stateful(callbacks: list[Any]) -> list[Any]:
    return [each for each in callbacks if isinstance(each, ExportableState)]


@contextmanager
def _as_directory(trainer: Any, record: str) -> Iterator[str]:  # noqa: ANN401
    """Create a directory from which Trainer resumes, and keep Trainer from loading the model from there."""
    with tempfile.TemporaryDirectory(prefix="trainer_runtime-") as directory:
        (Path(directory) / _TRAINER_STATE).write_text(record, encoding="utf-8")
        trainer._load_from_checkpoint = lambda *_, **__: None  # noqa: SLF001 - it reads files; the model is loaded
        try:
            yield directory
        finally:
            del trainer._load_from_checkpoint  # noqa: SLF001
