"""Where training is: what was committed, and which items of an epoch come next."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeGuard, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from trainer_runtime.contents import Contents
    from trainer_runtime.data import DataLoader

Item = TypeVar("Item")


@dataclass(slots=True)
class Position:
    """Where this rank is."""

    step: int = 0
    epoch: int = 0
    items: int = 0
    """Items of this epoch committed."""
    samples: int = 0
    """Samples of this epoch committed, over all ranks; counted only where `loader` knows them."""
    drawn: int = 0
    """Items of this epoch drawn, the one at work included."""
    loader: DataLoader | None = None
    """What the items come from, if it is our own."""
    due: int = 0
    """The step at whose commit there is something to do; 0: at the very next one, the first of this process."""
    saved: int = 0
    """The step of the newest checkpoint, handed over to be written or resumed from; -1: that one failed."""
    last_due: int = 0
    """The step at which a checkpoint was last due, at the beginning that of the newest one; equal on all ranks."""
    metrics: dict[str, float | torch.Tensor] = field(default_factory=dict)
    """What the last commit was given."""

    def read(self) -> dict[str, int]:
        """Return what a checkpoint holds of it."""
        return {"step": self.step, "epoch": self.epoch, "items": self.items, "samples": self.samples}

    def load(self, saved: dict[str, int]) -> None:
        """Take on what `read` returned."""
        self.step = self.saved = self.last_due = saved["step"]
        self.epoch, self.items, self.samples = saved["epoch"], saved["items"], saved["samples"]

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch += 1
        self.items = self.drawn = self.samples = 0
        self.loader = None

    def count_samples(self, loader: DataLoader) -> None:
        """Take over from our own loader how far it is.

        Raises:
            RuntimeError: the step has more micro-batches.
        """
        if not loader.ends_step:
            raise RuntimeError(
                "commit() came inside a step: this micro-batch is not the last one of its step; "
                "take the optimizer step, and commit, where loader.ends_step is true"
            )
        self.samples = loader.samples


def draw(items: Iterable[Item], pos: Position, contents: Contents) -> Iterator[Item]:
    """Yield the items of this epoch that are not committed yet, and count them."""
    done = pos.items
    iterator = _begin(items, pos, contents)
    if done:
        contents.parts.go_on()
    pos.drawn = done
    for item in iterator:
        pos.drawn += 1
        yield item


def _begin(items: Iterable[Item], pos: Position, contents: Contents) -> Iterator[Item]:
    """Return an iterator that stands behind what was committed."""
    if _is_own_loader(items):
        pos.loader = items
        return items.begin(epoch=pos.epoch, done=pos.samples)
    for loader in filter(_is_own_loader, contents.of_kind(object)):
        loader.set_epoch(pos.epoch)  # the items may come from it, by way of tqdm or enumerate
    iterator = iter(items)
    if not contents.holds(items):  # what State saves goes on by itself
        next(islice(iterator, pos.items, pos.items), None)
    return iterator


def _is_own_loader(items: object) -> TypeGuard[DataLoader]:
    module = sys.modules.get("trainer_runtime.data")  # where nobody imported it, this is none of its loaders
    return module is not None and isinstance(items, module.DataLoader)
