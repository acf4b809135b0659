"""Accelerate: a State of all that an `Accelerator` has prepared.

Accelerate leaves the loop to the script, so State is used as ever; what is added here is what only Accelerate knows:
the objects that it prepared, when it took an optimizer step, and how to begin one of its loaders in mid-epoch.

The order of a shuffled epoch comes from the generator that Accelerate shares between its ranks, which is saved, or
with `use_seedable_sampler` from the seed and the epoch's number, which the loader is told.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import DistributedType, skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import RandomSampler

from trainer_runtime.integrations.common import join
from trainer_runtime.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Item = TypeVar("Item")

_SHARDED = {DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM}
_END = object()


class AccelerateState(State):
    """A State of what an `accelerate.Accelerator` has prepared: `state = AccelerateState(accelerator, best=0.0)`.

    To be made after `accelerator.prepare`, and used like any State: `epochs`, `steps` over a prepared loader, `commit`
    once per iteration. Its objects are named model, optimizer, scheduler, registered (`register_for_checkpointing`)
    and scaler; from the second of a kind on with a number: model1.

    Args:
        accelerator: has prepared model, optimizer and loaders.
        **options: of `State`, and values of the script.

    Raises:
        RuntimeError: not all workers train together.
        ValueError: the accelerator shards the model, has prepared nothing yet, or what State raises it for.
    """

    def __init__(self, accelerator: Any, **options: Any) -> None:  # noqa: ANN401 - Accelerator; what State takes
        if accelerator.distributed_type in _SHARDED:
            kind = accelerator.distributed_type.value
            raise ValueError(f"AccelerateState wants a model that is whole on every rank, got {kind}")
        join(accelerator.num_processes, "on machines without a GPU give Accelerator(cpu=True)")
        objects = _objects(accelerator)
        if "model" not in objects:
            raise ValueError("AccelerateState wants what accelerator.prepare() returned; make it after that")
        self._accelerator = accelerator
        super().__init__(**objects, **options)

    def steps(self, items: Iterable[Item], *, source: object = None) -> Iterator[Item]:
        """Yield the items of this epoch that are not committed yet, as `State.steps` does.

        A loader that Accelerate prepared is told the epoch, and skips what is committed without loading it.
        """
        if isinstance(items, DataLoaderShard | DataLoaderDispatcher):
            items.set_epoch(self.epoch)
            if not items.use_stateful_dataloader:  # Accelerate cannot skip in these
                return super().steps(_Skipping(items, self._pos.items))
        return super().steps(items, source=source)

    def commit(self, **metrics: float | torch.Tensor) -> None:
        """End a step, as `State.commit` does; within `accelerator.accumulate`, where there was an optimizer step."""
        if self._accelerator.sync_gradients:
            super().commit(**metrics)


class _Skipping:
    """A prepared loader that stands in for its first batches: they are drawn only to be dropped."""

    def __init__(self, loader: Any, done: int) -> None:  # noqa: ANN401
        self._loader = loader
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        rest = iter(skip_first_batches(self._loader, self._done) if self._done else self._loader)
        # The order is drawn with the first batch, so now, while the random states are those of the epoch's beginning.
        first = next(rest, _END)
        yield from repeat(None, self._done)
        if first is not _END:
            yield first
            yield from rest


def _objects(accelerator: Any) -> dict[str, Any]:  # noqa: ANN401
    kinds: dict[str, list[Any]] = {
        "model": accelerator._models,  # noqa: SLF001 - what save_state saves; there is no public name for it
        "optimizer": accelerator._optimizers,  # noqa: SLF001
        "scheduler": accelerator._schedulers,  # noqa: SLF001
        "registered": accelerator._custom_objects,  # noqa: SLF001
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        "order": _generators(accelerator._dataloaders),  # noqa: SLF001
    }
    return {f"{kind}{number or ''}": thing for kind, things in kinds.items() for number, thing in enumerate(things)}


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return what the loaders draw their orders from; in a world of 1 a sampler gets one as in any other."""
    found = []
    for loader in loaders:
        batches = loader.batch_sampler
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)  # a rank's share wraps the whole
        if isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
            if sampler.generator is None:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            found.append(sampler.generator)
    return found
