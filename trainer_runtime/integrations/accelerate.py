"""Accelerate: a State of everything that an `Accelerator` has prepared.

Accelerate leaves the loop to the script, so State is used as usual. This module adds what only Accelerate knows: the
prepared objects, when an optimizer step was taken, and how to begin one of its loaders within an epoch.

The order of a shuffled epoch comes from the generator that Accelerate shares between its ranks, which is saved. With
`use_seedable_sampler` it comes from the seed and the epoch's number, which the loader is given.
"""

from __future__ import annotations

import os
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import DistributedType, skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import RandomSampler

from trainer_runtime.capture.local import is_sharded
from trainer_runtime.integrations.common import join
from trainer_runtime.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Item = TypeVar("Item")

_END = object()


class AccelerateState(State):
    """A State of what an `accelerate.Accelerator` has prepared: `state = AccelerateState(accelerator, best=0.0)`.

    Create it after `accelerator.prepare`, and use it like any State: `epochs`, `steps` over a prepared loader, `commit`
    once per iteration. Its objects have the names model, optimizer, scheduler, registered (those of
    `register_for_checkpointing`) and scaler; the second and later objects of a kind have a number: model1.

    Args:
        accelerator: the `Accelerator` that has prepared model, optimizer and loaders.
        **options: options of `State`, and values of the script.

    Raises:
        RuntimeError: not all workers train together.
        ValueError: the accelerator shards the model otherwise than by FSDP2, or has prepared nothing yet; or as
            `State`.
    """

    def __init__(self, accelerator: Any, **options: Any) -> None:  # noqa: ANN401 - Accelerator; what State takes
        _require_usable(accelerator)
        join(accelerator.num_processes, "on machines without a GPU give Accelerator(cpu=True)")
        objects = _objects(accelerator)
        if "model" not in objects:
            raise ValueError("AccelerateState wants what accelerator.prepare() returned; make it after that")
        self._accelerator = accelerator
        super().__init__(**objects, **options)

    def steps(self, items: Iterable[Item], *, source: object = None) -> Iterator[Item]:
        """Yield the items of this epoch that are not committed yet, as `State.steps` does.

        A loader that Accelerate prepared is given the epoch's number, and skips committed batches without loading them.
        """
        if isinstance(items, DataLoaderShard | DataLoaderDispatcher):
            items.set_epoch(self.epoch)
            if not items.use_stateful_dataloader:  # Accelerate cannot skip batches of these
                return super().steps(_Skipping(items, self._pos.items))
        return super().steps(items, source=source)

    def commit(self, **metrics: float | torch.Tensor) -> None:
        """End a step, as `State.commit`; within `accelerator.accumulate` only if the optimizer took a step."""
        if self._accelerator.sync_gradients:
            super().commit(**metrics)


def _require_usable(accelerator: Any) -> None:  # noqa: ANN401
    """Refuse models that are sharded, or are to be, otherwise than by FSDP2."""
    kind = accelerator.distributed_type
    if kind in {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}:
        raise ValueError(f"AccelerateState wants a model that is whole on every rank, or FSDP2, got {kind.value}")
    models = accelerator._models  # noqa: SLF001 - has no public name
    is_asked_for = kind is DistributedType.FSDP or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if is_asked_for and models and not any(is_sharded(each) for model in models for each in model.parameters()):
        raise ValueError(
            "AccelerateState wants parameters that fully_shard has sharded, as FSDP is asked for, got whole ones; give "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or no FSDP on machines without a GPU, where Accelerate "
            "ignores it"
        )


class _Skipping:
    """A prepared loader that skips its first batches and yields None in their place, for State to drop."""

    def __init__(self, loader: Any, done: int) -> None:  # noqa: ANN401
        self._loader = loader
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        rest = iter(skip_first_batches(self._loader, self._done) if self._done else self._loader)
        # The order is drawn with the first batch, so draw it now, with the random states of the epoch's beginning.
        first = next(rest, _END)
        yield from repeat(None, self._done)
        if first is not _END:
            yield first
            yield from rest


def _objects(accelerator: Any) -> dict[str, Any]:  # noqa: ANN401
    kinds: dict[str, list[Any]] = {
        "model": accelerator._models,  # noqa: SLF001 - the objects of save_state have no public name
        "optimizer": accelerator._optimizers,  # noqa: SLF001
        "scheduler": accelerator._schedulers,  # noqa: SLF001
        "registered": accelerator._custom_objects,  # noqa: SLF001
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        "order": _generators(accelerator._dataloaders),  # noqa: SLF001
    }
    return {f"{kind}{number or ''}": thing for kind, things in kinds.items() for number, thing in enumerate(things)}


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators of the loaders' orders; in a world of size 1 a sampler is given one, as in any other."""
    found = []
    for loader in loaders:
        batches = loader.batch_sampler
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)  # a rank's share is a wrapper
        if isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
            if sampler.generator is None:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            found.append(sampler.generator)
    return found
