"""Position of the training: what was committed, and what was drawn of the data since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_runtime.values import as_floats

if TYPE_CHECKING:
    import torch

    from trainer_runtime.data import DataLoader
    from trainer_runtime.live_metrics import LiveMetrics

NOT_SAVED = (-1, 0)

ENOUGH_ITEMS = 8
"""So many committed items are hardly those of a single step: steps may have different numbers of items."""


@dataclass(slots=True)
class Position:
    """Position of this rank."""

    step: int = 0
    epoch: int = 0
    items: int = 0
    """Committed items of this epoch."""
    samples: int = 0
    """Committed samples of this epoch, over all ranks; counted only if `loader` is set."""
    drawn: int = 0
    """Items of this epoch that were drawn, including the current one."""
    item: str = ""
    """The item drawn last, if it is an index or the like, to see whether a source has the same order again."""
    save: int = 0
    """Number of further saves since the last commit, which closed the epoch or had a changed state; each is newer."""
    loader: DataLoader | None = None
    """The loader that the items come from, if it is a `tr.DataLoader`."""
    beside: tuple[DataLoader, ...] = ()
    """Other `tr.DataLoader`s in State, which may be drawn from within the steps."""
    is_resized: bool = False
    """Whether a world of another size has committed the items of this epoch."""
    had_workers: bool = False
    """Whether a torch loader's persistent workers lived already when this epoch's items began."""
    has_workers: bool = False
    """Whether they live now."""
    is_drawn_out: bool = False
    """Whether the loop over this epoch's items has ended."""
    due: int = 0
    """The step at whose commit there is work to do; 0: at the next commit, the first of this process."""
    saved: tuple[int, int] = (0, 0)
    """Step and save of the newest checkpoint that was restored or handed to the writer; `NOT_SAVED`: saving failed."""
    last_due: int = 0
    """The step at which a checkpoint was last due, initially that of the newest one; equal on all ranks."""
    metrics: dict[str, float | torch.Tensor] = field(default_factory=dict)
    """Metrics of the last commit."""
    live: LiveMetrics | None = None
    """Writes metrics that are read to the control page. None: there is no State."""

    @property
    def at(self) -> tuple[int, int]:
        """Step and save: the identity, within its group, of a checkpoint made now."""
        return self.step, self.save

    def read_metrics(self) -> dict[str, float]:
        """Return the metrics of the last commit as numbers; this waits for the devices of those that are tensors.

        Raises:
            TypeError: a metric is not a number; the message has its name.
        """
        numbers = as_floats(self.metrics)
        if self.live is not None:
            self.live.note(self.step, numbers)
        return numbers

    def read(self) -> dict[str, Any]:
        """Return what a checkpoint stores. A save after the epoch's loop stores the beginning of the next epoch."""
        epoch, items, samples, had_workers = self.epoch, self.items, self.samples, self.had_workers
        if self.save and self.is_drawn_out:  # false in the save at the end of all epochs, which is there already
            epoch, items, samples, had_workers = self.epoch + 1, 0, 0, self.has_workers
        position = {"step": self.step, "save": self.save, "epoch": epoch, "items": items, "samples": samples}
        if had_workers:
            position["had_workers"] = True
        return {**position, "item": self.item if items and items == self.drawn else ""}

    def load(self, saved: dict[str, Any]) -> None:
        """Load what `read` returned."""
        self.step = self.last_due = saved["step"]
        self.save = saved["save"]
        self.saved = self.at
        self.epoch, self.items, self.samples = saved["epoch"], saved["items"], saved["samples"]
        self.item = saved.get("item", "")
        self.had_workers, self.has_workers = saved.get("had_workers", False), False

    def begin_again(self) -> None:
        """Forget what was drawn: the script begins anew at a state that is loaded next."""
        self.items = self.drawn = self.samples = self.due = 0
        self.item, self.loader, self.beside = "", None, ()
        self.is_drawn_out = self.is_resized = False

    def end_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.epoch += 1
        self.items = self.drawn = self.samples = 0
        self.loader = None
        self.beside = ()
        self.is_drawn_out = self.is_resized = False
        self.had_workers = self.has_workers

    def count_samples(self, loader: DataLoader) -> None:
        """Copy the number of consumed samples from a `tr.DataLoader`.

        Raises:
            RuntimeError: the current micro-batch is not the last of its step.
        """
        _require_ended(loader)
        self.samples = loader.samples

    def check_beside(self) -> None:
        """Raise RuntimeError if a loader that is drawn from beside `steps` is within a step of its own."""
        for loader in self.beside:
            if loader.is_within_epoch:
                _require_ended(loader)


def _require_ended(loader: DataLoader) -> None:
    if not loader.ends_step:
        raise RuntimeError(
            "commit() was called within a step: this micro-batch is not the last one of its step; "
            "take the optimizer step, and commit, where loader.ends_step is true"
        )
