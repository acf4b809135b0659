"""Lightning's Trainer: a State saves what Lightning would put into its own checkpoint file.

The State is restored in `on_fit_start`, when model, strategy and process group exist. Lightning's part is put where
Lightning keeps a checkpoint that it has just read, and Lightning takes it from there. What `ModelParallelStrategy`
shards belongs to the State itself: model and optimizers, of which each rank saves what it holds.

**Committing.** A step is committed when the next batch begins or the training ends: only then are the validation that
was due with the step, and the end of its epoch, done.

**The data.** Lightning knows the number of the batch at which it continues, but a loader begins anew unless it keeps
its position itself. So the batches that were trained on are drawn once more and dropped, in the order of their epoch.
If no distributed sampler decides the order, it comes from the random states at the beginning of the epoch, or of the
loader's generator; these are saved too.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from trainer_runtime.capture.local import has_shards
from trainer_runtime.integrations.common import DeferredState, join, restore_early
from trainer_runtime.own_step_time import watch_own_time
from trainer_runtime.parts import PerRank
from trainer_runtime.phases import expect_steps, phase
from trainer_runtime.random_states import RandomStates
from trainer_runtime.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch


class LightningCallback(Callback):  # type: ignore[misc] # lightning is not there for mypy
    """Lets a `lightning.Trainer` survive restarts: `Trainer(callbacks=[LightningCallback()])`.

    `trainer.fit()` then begins where the job's checkpoints say, commits every optimizer step, and raises
    SystemExit(101) at a handoff. `ckpt_path` is used only if State has no checkpoint. Lightning's own checkpoints are
    neither needed nor changed. `fit` can be called once.

    Args:
        **options: options of `State`: checkpoint_dir, save_every, keep, seed.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - what State takes
        self._options = options
        self._state: State | None = None
        self._resumed: _Resumed | None = None  # set until the first batch begins
        self._committed_step = 0
        self._epoch_began: dict[str, Any] = {}
        self._validation: AbstractContextManager[None] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401 - Trainer, LightningModule
        """Restore the State.

        Raises:
            RuntimeError: `fit` is called a second time, or not all workers train together.
            ValueError: the strategy shards the model otherwise than by `fully_shard` or `parallelize_module`.
        """
        if self._state is not None:
            raise RuntimeError("fit() was already called; use a Trainer and a LightningCallback for each training")
        is_sharded = isinstance(trainer.strategy, ModelParallelStrategy) and has_shards(pl_module)
        if trainer.strategy.restore_checkpoint_after_setup and not is_sharded:
            name = type(trainer.strategy).__name__
            raise ValueError(
                "LightningCallback wants a model that is whole on every rank, or one that ModelParallelStrategy and "
                f"fully_shard or parallelize_module have sharded, got {name} without one"
            )
        join(
            trainer.world_size, "give Trainer(num_nodes=..., devices=...) the numbers of nodes, and of workers on each"
        )
        progress = DeferredState(lambda: _read_progress(trainer))
        order = DeferredState(lambda: self._epoch_began)
        sharded = {f"optimizer{number}": each for number, each in enumerate(trainer.strategy.optimizers)}
        self._state = State(
            **self._options,
            model=pl_module,
            **(sharded if is_sharded else {}),
            trainer=progress,
            order=PerRank(order),
        )
        set_random_states = restore_early(self._state)
        restored = progress.take()
        if restored is None:
            self._epoch_began = RandomStates({}).read()
            return
        self._resumed = _Resumed(restored["checkpoint"]["loops"]["fit_loop"], set_random_states)
        self._epoch_began = order.take() or RandomStates({}).read()
        RandomStates({}).load(self._epoch_began)  # in the first epoch, the loaders are created with these states
        _load_progress(trainer, restored)

    def on_train_start(self, trainer: Any, _module: object) -> None:  # noqa: ANN401
        """Skip to the next batch to train on."""
        self._committed_step = trainer.global_step
        watch_own_time([trainer.strategy.model])
        if self._resumed is None:
            return
        if trainer.current_epoch > 0:
            self._begin_epoch(trainer)
        fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001 - no public name
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        for _ in range(done):
            next(fetcher)
        fetcher.fetched -= done  # Lightning adds these itself

    def on_train_epoch_start(self, trainer: Any, _module: object) -> None:  # noqa: ANN401
        """Record the random states from which this epoch's order is drawn; the first epoch's are recorded earlier."""
        if trainer.current_epoch > 0:
            self._epoch_began = RandomStates(_generators(trainer)).read()

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:  # noqa: ANN401
        """Commit the previous step; at the first batch of this process, continue from the restored step."""
        if self._resumed is not None:
            self._resumed.correct(trainer)
            self._resumed = None
        self._commit(trainer.global_step)

    def on_train_end(self, trainer: Any, _module: object) -> None:  # noqa: ANN401
        """Commit the last step, and save it."""
        self._commit(trainer.global_step)
        expect_steps(are_due=False)
        if self._state is not None:
            self._state.save()

    def on_validation_start(self, *_: object) -> None:
        """Report that no steps are expected."""
        self._validation = phase("validation")
        self._validation.__enter__()

    def on_validation_end(self, *_: object) -> None:
        """Report that steps are expected again."""
        if self._validation is not None:
            self._validation.__exit__(None, None, None)
            self._validation = None

    def _begin_epoch(self, trainer: Any) -> None:  # noqa: ANN401
        """Begin the interrupted epoch anew: Lightning starts the loaders before it gives the sampler the epoch."""
        for sampler in _samplers(trainer):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(trainer.current_epoch)
        RandomStates(_generators(trainer)).load(self._epoch_began)
        iter(trainer.fit_loop._data_fetcher)  # noqa: SLF001

    def _commit(self, step: int) -> None:
        if self._state is not None and step > self._committed_step:
            self._committed_step = step
            self._state.commit()


class _Resumed:
    """State to correct when the first batch begins.

    Args:
        fit_loop: Lightning's counters at the time when a batch began.
        set_random_states: sets the random states of that time.
    """

    def __init__(self, fit_loop: dict[str, Any], set_random_states: Callable[[], None]) -> None:
        self._ready = fit_loop["epoch_loop.batch_progress"]["total"]["ready"]
        self._stepped = fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"]
        self._set_random_states = set_random_states

    def correct(self, trainer: Any) -> None:  # noqa: ANN401
        """Correct Lightning's state.

        Lightning counts a batch that had begun twice, and advances the loggers' step as if that batch had ended. If it
        treats an epoch as restarted, it skips the schedulers that follow a metric at the end of the epoch.
        """
        trainer.fit_loop.restarting = False
        loop = trainer.fit_loop.epoch_loop
        loop.batch_progress.total.ready = self._ready
        loop._batches_that_stepped = self._stepped  # noqa: SLF001
        self._set_random_states()


def _read_progress(trainer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what Lightning puts into a checkpoint, except the model, its hyperparameters, and what is sharded."""
    with _without_shards(trainer.strategy):
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001
    kept = {name: value for name, value in checkpoint.items() if name != "state_dict" and "hyper_param" not in name}
    # A loader that keeps its position is already past the batch that now begins.
    kept["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
    return {"checkpoint": kept, "should_stop": trainer.should_stop}


def _load_progress(trainer: Any, progress: dict[str, Any]) -> None:  # noqa: ANN401
    """Do what Lightning does with a checkpoint that it has read; the rest follows after `on_fit_start`."""
    connector = trainer._checkpoint_connector  # noqa: SLF001
    with _without_shards(trainer.strategy):
        model = trainer.strategy.lightning_module_state_dict()
    connector._loaded_checkpoint = {**progress["checkpoint"], "state_dict": model}  # noqa: SLF001
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    trainer.should_stop = progress["should_stop"]
    # With a sharding strategy this comes later, and would read what `fit(ckpt_path=...)` names.
    connector._restore_modules_and_callbacks = lambda *_: None  # noqa: SLF001


@contextmanager
def _without_shards(strategy: Any) -> Iterator[None]:  # noqa: ANN401
    """Let a sharding strategy return nothing of model and optimizers: it would gather them from all ranks."""
    if not isinstance(strategy, ModelParallelStrategy):
        yield
        return
    strategy.lightning_module_state_dict = dict
    strategy.optimizer_state = lambda _optimizer: {}
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def _samplers(trainer: Any) -> Iterator[object]:  # noqa: ANN401
    for loader in trainer.fit_loop._combined_loader.flattened:  # noqa: SLF001
        for holder in (loader, getattr(loader, "batch_sampler", None)):
            sampler = getattr(holder, "sampler", None)
            if sampler is not None:
                yield sampler


def _generators(trainer: Any) -> dict[str, torch.Generator]:  # noqa: ANN401
    """Return the random generators from which the order of the batches is drawn."""
    found = (getattr(sampler, "generator", None) for sampler in _samplers(trainer))
    return {str(number): generator for number, generator in enumerate(found) if generator is not None}
