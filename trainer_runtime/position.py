"""Where training is: what was committed, and what is known of the items that come next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer_runtime.data import DataLoader

NOT_SAVED = (-1, 0)


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
    save: int = 0
    """Times that the epoch was closed by `State.save` since the last commit; what is saved then is newer than that."""
    loader: DataLoader | None = None
    """What the items come from, if it is our own."""
    beside: tuple[DataLoader, ...] = ()
    """Other loaders of ours that State saves; they may be drawn from within the steps."""
    is_drawn_out: bool = False
    """Whether the loop over this epoch's items has come to its end."""
    due: int = 0
    """The step at whose commit there is something to do; 0: at the very next one, the first of this process."""
    saved: tuple[int, int] = (0, 0)
    """Step and save of the newest checkpoint, handed over to be written or resumed from; `NOT_SAVED`: it failed."""
    last_due: int = 0
    """The step at which a checkpoint was last due, at the beginning that of the newest one; equal on all ranks."""
    metrics: dict[str, float | torch.Tensor] = field(default_factory=dict)
    """What the last commit was given."""

    @property
    def at(self) -> tuple[int, int]:
        """Step and save: what a checkpoint made now is known by in its group."""
        return self.step, self.save

    def read(self) -> dict[str, int]:
        """Return what a checkpoint holds of it. A save after the epoch's loop stands at the beginning of the next."""
        epoch, items, samples = self.epoch, self.items, self.samples
        if self.save and self.is_drawn_out:  # not in the save at the end of all epochs, which stands there already
            epoch, items, samples = self.epoch + 1, 0, 0
        return {"step": self.step, "save": self.save, "epoch": epoch, "items": items, "samples": samples}

    def load(self, saved: dict[str, int]) -> None:
        """Take on what `read` returned."""
        self.step = self.last_due = saved["step"]
        self.save = saved["save"]
        self.saved = self.at
        self.epoch, self.items, self.samples = saved["epoch"], saved["items"], saved["samples"]

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch += 1
        self.items = self.drawn = self.samples = 0
        self.loader = None
        self.beside = ()
        self.is_drawn_out = False

    def count_samples(self, loader: DataLoader) -> None:
        """Take over from our own loader how far it is.

        Raises:
            RuntimeError: the step has more micro-batches.
        """
        _require_ended(loader)
        self.samples = loader.samples

    def check_beside(self) -> None:
        """Raise RuntimeError if a loader that is drawn from beside `steps` is inside a step of its own."""
        for loader in self.beside:
            if loader.is_within_epoch:
                _require_ended(loader)


def _require_ended(loader: DataLoader) -> None:
    if not loader.ends_step:
        raise RuntimeError(
            "commit() came inside a step: this micro-batch is not the last one of its step; "
            "take the optimizer step, and commit, where loader.ends_step is true"
        )
