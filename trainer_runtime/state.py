"""State: what a training script saves, resumes from, and counts its steps with.

The contract of a step. A step is one optimizer step; `commit()` ends it, on every rank, after the optimizer, the
scheduler and the scaler. What counts is what was committed: the position in the data is the number of items drawn by
the time of the last commit, so a step that did not finish is done again with the same items.

Saving is by step count, so that all ranks know without a word when it is due; rank 0 writes. A step is saved once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch

from trainer_runtime import contract
from trainer_runtime.channel import open_channel
from trainer_runtime.checkpoint import CheckpointError, first_free_group, warn
from trainer_runtime.dist import do_on_all, open_control_page, share_from_main, world_size
from trainer_runtime.manifest import EXTRA, require_run_name
from trainer_runtime.resume import start_alone, start_under_agent
from trainer_runtime.values import Contents, as_numbers
from trainer_runtime.writer import Writer

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Iterator

    from trainer_runtime.manifest import Manifest

    Hook = TypeVar("Hook", bound=Callable[[Path], object])

Item = TypeVar("Item")

CONTENT_VERSION = 1
DEFAULT_RUN = "local"  # without an agent, all starts in a directory are one run


@dataclass(slots=True)
class _Position:
    step: int = 0
    epoch: int = 0
    items: int = 0
    """Items of this epoch committed."""
    drawn: int = 0
    """Items of this epoch drawn, the one at work included."""
    due: int = 0
    """The step at whose commit there is something to do; 0: at the very next one, the first of this process."""
    saved: int = 0
    """The step of the newest checkpoint, written or resumed from."""
    metrics: dict[str, float | torch.Tensor] = field(default_factory=dict)
    """What the last commit was given."""


class State:
    """Everything that must survive a restart.

    Objects with `state_dict` and `load_state_dict` (modules, optimizers, schedulers, scalers) are saved by those,
    modules without their DDP and torch.compile wrapping. Everything else must be a plain value (int, float, str,
    bool, None, tensor; lists, tuples and dicts of these) and is read and written as an attribute: `state.best = 0.9`.
    Tensors among plain values come back on the CPU.

    Args:
        checkpoint_dir: directory of the checkpoints, the same for all ranks that may become rank 0. Default: what the
            agent set, else `./checkpoints`.
        save_every: steps between durable checkpoints, and so the most that a restart repeats. The default of 100
            keeps a save that takes as long as five steps at 5 % of the time. Must be equal on all ranks.
        keep: number of this run's checkpoints to keep; the second is there in case the newest is damaged. Under an
            agent at most 100.
        **objects: what to save, under these names.

    Raises:
        ValueError: a name is taken or begins with an underscore, or a number is out of its range.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        keep: int = 2,
        **objects: object,
    ) -> None:
        _require_usable(objects, save_every, keep)
        # Names with an underscore are our own; all others go through __setattr__ to the contents.
        self._contents = Contents(objects)
        self._directory = Path(checkpoint_dir or os.environ.get(contract.CHECKPOINT_DIR) or "checkpoints")
        self._save_every = save_every
        self._keep = keep
        self._run = os.environ.get(contract.RUN_ID) or DEFAULT_RUN
        require_run_name(self._run)
        self._group = 0
        self._pos = _Position()
        self._streamed_epoch: int | None = None
        self._page = open_control_page()
        self._channel = open_channel()
        if self._channel is not None and keep > contract.MAX_KEEP:
            raise ValueError(f"wanted keep of at most {contract.MAX_KEEP} under an agent, got {keep}")
        self._save_hooks: list[Callable[[Path], object]] = []
        self._load_hooks: list[Callable[[Path], object]] = []
        self._resumed: Manifest | None = None  # on rank 0 only, as is the next
        self._writer: Writer | None = None
        self._restored = False

    @property
    def step(self) -> int:
        """Optimizer steps committed, over all epochs, groups and restarts."""
        return self._pos.step

    @property
    def epoch(self) -> int:
        """The present epoch, counted from 0; after the last one, their number."""
        return self._pos.epoch

    @property
    def group(self) -> int:
        """Number of this start, as it is in the names of the checkpoints; 0 before `restore`."""
        return self._group

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - values have the types that the user gave them
        if name.startswith("_"):
            raise AttributeError(name)
        return self._contents.get(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._contents.set(name, value)

    def on_save(self, hook: Hook) -> Hook:
        """Register a function that writes further files of a checkpoint; for use as a decorator.

        It runs on rank 0 within every save and is given a private, empty directory, which becomes part of the
        checkpoint. It may use no collective: the other ranks do not take part.
        """
        self._save_hooks.append(hook)
        return hook

    def on_load(self, hook: Hook) -> Hook:
        """Register a function that reads what `on_save` functions wrote; for use as a decorator.

        It runs on rank 0 within `restore`, after all objects were restored, and is given the directory in its final
        place. It does not run if the checkpoint has no such directory.

        Raises:
            RuntimeError: `restore` is over.
        """
        if self._restored:
            raise RuntimeError("on_load comes too late: register it before state.restore() or state.epochs()")
        self._load_hooks.append(hook)
        return hook

    def restore(self) -> None:
        """Take on the newest checkpoint if there is one; the same on all ranks. Does nothing the second time.

        To be called on all ranks, after wrapping, before the first step. `epochs` does it on entry.

        Raises:
            CheckpointError: there are checkpoints but none to resume from (on rank 0).
            AgentGoneError: the agent ended (on rank 0).
            OSError: reading failed (on rank 0).
            PeerError: another rank failed.
            SystemExit: this group is no longer the current one, so there is no place to begin from.
            ValueError, RuntimeError: the checkpoint does not fit the objects.
        """
        if self._restored:
            return
        self._group, data = share_from_main(self._open_directory)
        if data is not None:
            do_on_all(lambda: self._load(data))
        self._restored = True

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of `total`, beginning with the one that was interrupted.

        Restores on entry. When the last epoch is over, its last step is saved if it is not already. Leaving the loop
        early saves nothing: call `save()`. Code between the last commit of an epoch and its end, an evaluation for
        instance, runs again if it was interrupted.
        """
        self.restore()
        while self._pos.epoch < total:
            yield self._pos.epoch
            self._pos.epoch += 1
            self._pos.items = self._pos.drawn = 0
        self.save()

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of this epoch that are not committed yet.

        Those committed before the restart are drawn and dropped, so `items` must come in the same order each time:
        let the order depend on nothing but a seed and the epoch. An item may be less than a step (micro-batches).

        Raises:
            RuntimeError: before `restore`, or a second time in one epoch (its position could not be told).
        """
        self._require_restored()
        if self._streamed_epoch == self._pos.epoch:
            raise RuntimeError(f"state.steps() was already used in epoch {self.epoch}; use it once per epoch")
        self._streamed_epoch = self._pos.epoch
        self._pos.drawn = 0
        done = self._pos.items
        for item in items:
            self._pos.drawn += 1
            if self._pos.drawn > done:
                yield item

    def commit(self, **metrics: float | torch.Tensor) -> None:
        """End a step: one optimizer step is done, on every rank.

        With no save due this costs about a microsecond: no system call, no collective, no synchronisation.

        Args:
            **metrics: numbers that describe the step; those of a saved step are noted in its manifest.

        Raises:
            TypeError: something in this State could not be loaded back; names it. At the first commit.
            RuntimeError: before `restore`.
        """
        pos = self._pos
        pos.step = step = pos.step + 1
        pos.items = pos.drawn
        pos.metrics = metrics
        if self._page is not None:
            self._page.step = step
        if step >= pos.due:
            self._do_what_is_due()

    def save(self) -> None:
        """Save the last committed step durably, unless it is saved already. To be called right after a commit.

        If this group is no longer the current one nothing is saved, and a line on stderr says so.

        Raises:
            AgentGoneError: the agent ended before it said whether this checkpoint counts.
            OSError: it could not be written.
            TypeError: something in this State could not be loaded back; names it.
        """
        self._begin_save()
        if self._writer is not None:
            self._writer.finish()

    def _begin_save(self) -> None:
        """Write the last committed step, unless that was done already; its commit goes on by itself."""
        pos = self._pos
        if pos.step == pos.saved:
            return
        if self._writer is not None:
            self._writer.write(
                self._checked_content(),
                step=pos.step,
                world_size=world_size(),
                metrics=as_numbers(pos.metrics),
                hooks=self._save_hooks,
            )
        pos.saved = pos.step

    def _do_what_is_due(self) -> None:
        pos = self._pos
        if pos.due == 0:
            # Not left to the first save, which may be an hour away and is made by rank 0 alone.
            self._require_restored()
            self._checked_content()
            as_numbers(pos.metrics)
        if pos.step % self._save_every == 0:
            try:
                self._save_if_free()
            except OSError as error:
                # A full or absent disk must not stop the training; the older checkpoints are still there.
                warn(f"step {pos.step} was NOT saved in {self._directory}: {error}; the next save is due as usual")
        pos.due = (pos.step // self._save_every + 1) * self._save_every

    def _save_if_free(self) -> None:
        if self._writer is not None and self._writer.is_busy():
            warn(
                f"step {self.step} was NOT saved: step {self._pos.saved} still waits to be committed, for the agent "
                "cannot reach etcd; the next save is due as usual"
            )
        else:
            self._begin_save()

    def _require_restored(self) -> None:
        if not self._restored:
            raise RuntimeError(
                "training would begin at step 0 without having looked for a checkpoint; "
                "iterate over state.epochs(...) or call state.restore() before the first step"
            )

    def _checked_content(self) -> dict[str, Any]:
        pos = self._pos
        position = {"step": pos.step, "epoch": pos.epoch, "items": pos.items}
        return {"v": CONTENT_VERSION, "position": position, "objects": self._contents.read()}

    def _open_directory(self) -> tuple[int, mmap.mmap | None]:
        """On rank 0: choose and read the checkpoint, and prepare to write the next ones."""
        fresh = os.environ.get(contract.FRESH) == "1"
        if self._channel is None:
            start = start_alone(self._directory, self._run, fresh=fresh)
        else:
            start = start_under_agent(self._directory, self._run, self._channel, fresh=fresh)
        named_group = os.environ.get(contract.GROUP)
        group = int(named_group) if named_group else first_free_group(self._directory, self._run)
        self._writer = Writer(self._directory, self._run, group, keep=self._keep, start=start, channel=self._channel)
        self._resumed = start.found.manifest if start.found else None
        return group, start.found.data if start.found else None

    def _load(self, data: mmap.mmap) -> None:
        stream = cast("IO[bytes]", data)  # a map has all that torch.load uses, and is not copied like a BytesIO
        content = torch.load(stream, weights_only=True, map_location="cpu")
        if content["v"] != CONTENT_VERSION:
            raise CheckpointError(f"wanted a checkpoint of version {CONTENT_VERSION}, got {content['v']}")
        self._contents.load(content["objects"])
        pos, position = self._pos, content["position"]
        pos.step = pos.saved = position["step"]
        pos.epoch, pos.items = position["epoch"], position["items"]
        if self._resumed is not None:
            place = self._directory / self._resumed.stem
            warn(f"resumed at step {pos.step} from {place}")
            for hook in self._load_hooks if len(self._resumed.files) > 1 else ():
                hook(place / EXTRA)


def _require_usable(objects: dict[str, object], save_every: int, keep: int) -> None:
    for name in objects:
        if name.startswith("_") or hasattr(State, name):
            raise ValueError(f"State cannot save something as {name!r}: the name is its own; choose another")
    if save_every < 1 or keep < 1:
        raise ValueError(f"wanted save_every and keep of at least 1, got {save_every} and {keep}")
