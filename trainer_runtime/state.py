"""State: what a training script saves, resumes from, and counts its steps with.

The contract of a step. A step is one optimizer step; `commit()` ends it, on every rank, after the optimizer, the
scheduler and the scaler. What counts is what was committed: the position in the data is the number of items drawn (of
our own loader, of samples consumed) by the time of the last commit, so a step that did not finish is done again with
the same items.

Saving is by step count, so that all ranks know without a word when it is due; rank 0 writes. A step is saved once.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer_runtime import contract
from trainer_runtime.agent_channel import open_channel
from trainer_runtime.checkpoint import CheckpointError, warn
from trainer_runtime.contents import Contents
from trainer_runtime.dist import do_on_all, is_main, open_control_page, rank, share_from_main, world_size
from trainer_runtime.exchange import Exchange
from trainer_runtime.finite import FiniteGuard
from trainer_runtime.handoff import HandoffParticipant
from trainer_runtime.leaving import end_at_exit
from trainer_runtime.loading import load_content, read_content
from trainer_runtime.manifest import require_run_name
from trainer_runtime.milestones import reached
from trainer_runtime.opening import Opener
from trainer_runtime.own_step_time import watch_own_time
from trainer_runtime.phases import expect_steps, own_phase, settle_before_phases
from trainer_runtime.position import NOT_SAVED, Position
from trainer_runtime.rank_messages import open_board
from trainer_runtime.saving import Saver
from trainer_runtime.scaling import LrScaling, require_one_way, require_rule
from trainer_runtime.shared_directory_check import DirectorySight, look_around
from trainer_runtime.snapshot_load import read_from_memory
from trainer_runtime.snapshots import begin_snapshots
from trainer_runtime.sources import Sources
from trainer_runtime.stacks import offer_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainer_runtime.rank_messages import RankMessages
    from trainer_runtime.snapshots import SnapshotTaker

    Hook = TypeVar("Hook", bound=Callable[[Path], object])

Item = TypeVar("Item")

DEFAULT_RUN = "local"  # without an agent, all starts in a directory are one run


class State:
    """Everything that must survive a restart.

    Objects with `state_dict` and `load_state_dict` (modules, optimizers, schedulers, scalers) are saved by those,
    modules without their DDP and torch.compile wrapping. Everything else must be a plain value (int, float, str,
    bool, None, tensor; lists, tuples and dicts of these) and is read and written as an attribute: `state.best = 0.9`.
    Lists, dicts and tensors that the script gives are restored in place: they keep their identity, and tensors their
    device, so they may be changed under the script's own names. Numbers, strings and None cannot change in place: read
    and write them as attributes.

    Saved for each rank on its own, without being named: the random states of Python, NumPy, torch and CUDA, and the
    running statistics of normalisation layers. Further objects that differ from rank to rank are given as
    `PerRank(thing)`. A `torch.Generator` may be given as it is, torchdata's StatefulDataLoader too.

    Args:
        checkpoint_dir: directory of the checkpoints, the same for all ranks that may become rank 0. Default: what the
            agent set, else `./checkpoints`.
        save_every: steps between durable checkpoints, and so the most that a restart repeats. Must be equal on all
            ranks.
        keep: number of this run's checkpoints to keep; the second is there in case the newest is damaged. Under an
            agent at most 100.
        seed: after a change of the world size random states follow from (seed, step, rank). Default: the one in the
            checkpoint; at the first start torch's initial seed on rank 0, so what `torch.manual_seed` was given.
        lr_scaling: after a change of the world size multiply learning rates by new size over old one, or by the square
            root of that. Only where a step has so many samples for each rank; the default is one global batch.
        check_finite: look at weights, running statistics and metrics at each commit; where one is NaN or infinite the
            step does not count, and the job stops, by SystemExit(93) and a line that names it. Waits for the device
            each time.
        leave_on_handoff: on a planned change `commit` saves and leaves by SystemExit(101). If False it only makes
            `should_stop` true, and the script has to end soon after.
        **objects: what to save, under these names.

    Raises:
        ValueError: a name is taken or begins with an underscore, a number is out of its range, or `lr_scaling` is
            neither; or an optimizer has parameters of a sharded module and others.
    """

    _restored: ClassVar[set[tuple[Path | None, str]]] = set()
    """Directory and run of what this process has restored, as all ranks have. Under an agent all have one place."""

    def __init__(
        self,
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        keep: int = 2,
        seed: int | None = None,
        lr_scaling: LrScaling | None = None,
        check_finite: bool = False,
        leave_on_handoff: bool = True,
        **objects: object,
    ) -> None:
        _require_usable(objects, save_every, keep)
        # Names with an underscore are our own; all others go through __setattr__ to the contents.
        self._contents = Contents(objects)
        self._directory = Path(checkpoint_dir or os.environ.get(contract.CHECKPOINT_DIR) or "checkpoints")
        self._save_every = save_every
        self._keep = keep
        self._seed = seed
        self._lr_scaling = None if lr_scaling is None else require_rule(lr_scaling)
        self._guard = FiniteGuard(self._contents.by_kind(nn.Module)) if check_finite else None
        self._leave_on_handoff = leave_on_handoff
        self._run = os.environ.get(contract.RUN_ID) or DEFAULT_RUN
        require_run_name(self._run)
        self._group = 0
        self._pos = Position()
        self._sources = Sources(self._contents, self._pos)
        self._begun_epoch: int | None = None
        self._streamed_epoch: int | None = None
        self._page = open_control_page()
        self._channel = open_channel()
        if self._page is not None:
            offer_stacks(self._page)
        if dist.is_initialized():  # else `restore` finds out
            reached.note_joined()
        if self._channel is not None and keep > contract.MAX_KEEP:
            raise ValueError(f"wanted keep of at most {contract.MAX_KEEP} under an agent, got {keep}")
        self._save_hooks: list[Callable[[Path], object]] = []
        self._load_hooks: list[Callable[[Path], object]] = []
        self._saver: Saver | None = None  # until it is restored, as is the next
        self._snapshots: SnapshotTaker | None = None
        self._handoff: HandoffParticipant | None = None
        self._handed = 0  # the number of the newest handoff that was met
        self._should_stop = False

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

    @property
    def should_stop(self) -> bool:
        """Whether this group is over and the script should end; only with `leave_on_handoff=False`."""
        return self._should_stop

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
        if self._saver is not None:
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
            RuntimeError: this process has restored another State, of the same job or directory.
        """
        if self._saver is not None:
            return
        with self._no_restart_helps():
            place = self._require_first()
        with own_phase("restore"):
            self._restore(turn=len(State._restored) + 1)
        State._restored.add(place)
        self._expect_steps()

    def _restore(self, *, turn: int) -> None:
        sight = look_around(self._directory) if world_size() > 1 else DirectorySight()
        if sight.owner and self._contents.shards is not None:
            raise CheckpointError(
                f"wanted a directory that all nodes see, for each writes its own shards; {self._directory} is on the "
                "disk of rank 0's node: give another --checkpoint_dir"
            )
        opener = Opener(self._directory, self._run, self._keep, self._channel, sight)
        self._group, data, is_in_memory = share_from_main(opener.open)
        board = open_board(self._group, turn)
        if data is not None:
            do_on_all(lambda: self._load(read_content(data), opener))
        elif is_in_memory and self._channel is not None:
            content = read_from_memory(self._channel, board, self._contents)
            do_on_all(lambda: self._load(content, opener))
            self._pos.saved = NOT_SAVED  # no file has it
            self._pos.last_due = int(board.agree("committed", lambda: str(opener.committed_step)))
        self._handoff = self._join_handoffs(board)
        self._saver = Saver(
            directory=self._directory,
            run=self._run,
            group=self._group,
            contents=self._contents,
            pos=self._pos,
            # On rank 0 a thread waits at it, and nobody else may meanwhile.
            exchange=Exchange(open_board(self._group, turn) if is_main() else board, rank(), world_size()),
            writer=opener.writer,
            hooks=self._save_hooks,
            board=board if self._contents.shards is not None else None,
            seed=self._agree_on_seed(board),
        )
        self._snapshots = begin_snapshots(self._saver, self._channel, board, has_load_hooks=bool(self._load_hooks))
        settle_before_phases(self.settle)

    @contextmanager
    def _no_restart_helps(self) -> Iterator[None]:
        """Under an agent end the job in place of a RuntimeError: the script is at fault, and would come to it again."""
        try:
            yield
        except RuntimeError as error:
            if self._channel is None:
                raise
            warn(str(error))
            raise SystemExit(contract.EXIT_NO_RESTART) from error

    def _require_first(self) -> tuple[Path | None, str]:
        """Return where this State is restored from; RuntimeError if this process restored another one from there."""
        place = (self._directory.resolve() if self._channel is None else None), self._run
        if place in State._restored:
            where = f"in {self._directory}" if self._channel is None else "and a job has one"
            raise RuntimeError(
                f"this process has restored a State already, {where}: this one would begin with what that one saved. "
                "Give all objects to one State; have trainings that follow each other run as jobs of their own"
                + (", or give each State a checkpoint_dir of its own" if self._channel is None else "")
            )
        return place

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of `total`, beginning with the one that was interrupted.

        Restores on entry. When the last epoch is over, its last step is saved if it is not already. Leaving the loop
        early saves nothing: call `save()`. Code between the last commit of an epoch and its end, an evaluation for
        instance, runs again if it was interrupted.

        The body of an interrupted epoch begins again with the random states that it began with, so an order that it
        draws before `steps` is the same one. The first item that is not committed yet comes with those of the last
        commit.
        """
        self.restore()
        expect_steps(are_due=True)
        is_trained = self._pos.epoch >= total
        while self._pos.epoch < total:
            self._begin_epoch()
            yield self._pos.epoch
            self._pos.end_epoch()
        expect_steps(are_due=False)
        if not is_trained:
            self._pos.save += 1  # the last epoch's body may have changed more after its last commit
        self._require_restored().save()

    def steps(self, items: Iterable[Item], *, source: object = None) -> Iterator[Item]:
        """Yield the items of this epoch that are not committed yet.

        A `DataLoader` of ours begins after the samples that were committed; what State saves too goes on by itself. Of
        anything else those committed before the restart are drawn and dropped, so it must come in the same order each
        time: let the order depend on nothing but a seed and the epoch. An item may be less than a step (micro-batches).

        Args:
            items: whatever can be iterated.
            source: where `items` only wraps something that State saves, as in `steps(tqdm(stream), source=stream)`:
                that. The wrapper may draw nothing ahead.

        Raises:
            RuntimeError: before `restore`, or a second time in one epoch (its position could not be told).
            ValueError: State does not save `source`.
        """
        self._require_restored()
        if self._streamed_epoch == self._pos.epoch:
            raise RuntimeError(f"state.steps() was already used in epoch {self.epoch}; use it once per epoch")
        require_one_way(items, self._lr_scaling)
        self._begin_epoch()
        self._streamed_epoch = self._pos.epoch
        try:
            yield from self._sources.draw(items, source)
        finally:
            self.settle()

    def commit(self, **metrics: float | torch.Tensor) -> None:
        """End a step: one optimizer step is done, on every rank.

        With no save due this costs about a microsecond: no system call, no collective, no synchronisation.

        Args:
            **metrics: numbers that describe the step; those of a saved step are noted in its manifest.

        Raises:
            TypeError: something in this State could not be loaded back; names it. At the first commit.
            RuntimeError: before `restore`; inside a step of several micro-batches of `DataLoader`; or, at the first
                commit and when a save is due, where something that is drawn from would not go on at its place.
            SystemExit: with `EXIT_RESTART`: this step is saved for a planned change, and the next group goes on there;
                with `EXIT_NO_RESTART`: it is not finite, with `check_finite`.
        """
        pos = self._pos
        if self._guard is not None:
            self._guard.check(pos.step + 1, metrics)
        if pos.loader is not None:
            pos.count_samples(pos.loader)
        if pos.beside:
            pos.check_beside()
        pos.step = step = pos.step + 1
        pos.save = 0
        pos.items = pos.drawn
        pos.metrics = metrics
        page = self._page
        if page is not None:
            page.step = step
            if page.handoff > self._handed:
                self._look_at_handoff(page.handoff)
        if step >= pos.due:
            self._do_what_is_due()

    def settle(self) -> None:
        """Wait until nothing of this State is being copied, so that its tensors may be changed in whatever way.

        After a commit a thread may copy weights until the optimizer's next step, and notices a change by an operation
        of torch's, but none through `.data` or a NumPy view. Entering `tr.phase` and the end of `steps` do this too.
        """
        if self._snapshots is not None:
            self._snapshots.settle()

    def save(self) -> None:
        """Save durably; to be called on every rank.

        Within the loop over an epoch's items this saves the last committed step, unless it is saved already, and is to
        be called right after the commit. When that loop has come to its end this saves what State holds now, and closes
        the epoch: a restart from here begins the next one, and what follows in this one's body does not run again.

        If this group is no longer the current one nothing is saved, and a line on stderr says so.

        Raises:
            AgentGoneError: the agent ended before it said whether this checkpoint counts.
            OSError: it could not be written.
            RuntimeError: this closes the epoch, and it is not known where another loader begins the next one.
            TypeError: something in this State could not be loaded back; names it.
        """
        if self._saver is None:
            return
        if self._pos.is_drawn_out and sys.exception() is None:  # in a `finally` the body may have been cut short
            with self._no_restart_helps():
                self._sources.check_closed()
            self._pos.save += 1
        self._saver.save()

    def _do_what_is_due(self) -> None:
        pos, saver = self._pos, self._require_restored()
        if pos.due == 0:
            # Not left to the first save, which may be an hour away and is made by rank 0 alone.
            saver.check()
        with self._no_restart_helps():
            self._sources.check()
        if self._channel is not None:  # each time, for a first one may have come while a checkpoint had the channel
            self._channel.tell_began(pos.step)
            self._channel.let_go_of_memory()
        if pos.step // self._save_every > pos.last_due // self._save_every:  # at once, if the group before missed one
            pos.last_due = pos.step
            saver.save_if_free()
        pos.due = (pos.step // self._save_every + 1) * self._save_every
        if self._snapshots is not None:
            if pos.step >= self._snapshots.due:
                self._snapshots.take(pos.step)
            pos.due = min(pos.due, self._snapshots.due)

    def _look_at_handoff(self, number: int) -> None:
        """A handoff is wanted: save and leave if this is the step at which all ranks stop."""
        if self._saver is None or self._handoff is None or not self._handoff.is_met(self._pos.step):
            return
        self._handed = number
        if self._handoff.is_over(self._pos.step, self._take_whole, self._saver.save_for_handoff):
            self._should_stop = True
            if self._leave_on_handoff:
                end_at_exit()
                raise SystemExit(contract.EXIT_RESTART)

    def _take_whole(self, step: int) -> bool:
        return self._snapshots is not None and self._snapshots.take_whole(step)

    def _join_handoffs(self, board: RankMessages) -> HandoffParticipant | None:
        if self._page is None or self._channel is None:
            return None
        return HandoffParticipant(
            board,
            self._page,
            self._channel,
            rank=rank(),
            world_size=world_size(),
            wait_s=float(os.environ.get(contract.HANDOFF_WAIT_S, "1")),
        )

    def _expect_steps(self) -> None:
        reached.note_loaded()
        expect_steps(are_due=True)
        if self._page is not None:
            self._page.restored = 1
            watch_own_time(self._contents.of_kind(nn.Module))

    def _begin_epoch(self) -> None:
        """Note or set the random states with which this epoch begins, once: `epochs` comes before `steps`."""
        if self._begun_epoch != self._pos.epoch:
            self._begun_epoch = self._pos.epoch
            self._contents.parts.begin_epoch(is_resumed=self._pos.items > 0)

    def _require_restored(self) -> Saver:
        if self._saver is None:
            raise RuntimeError(
                "training would begin at step 0 without having looked for a checkpoint; "
                "iterate over state.epochs(...) or call state.restore() before the first step"
            )
        return self._saver

    def _agree_on_seed(self, board: RankMessages) -> int:
        """Return what holds for all ranks: several may write what is equal on all."""
        if self._seed is not None:
            return self._seed
        return int(board.agree("seed", lambda: str(torch.initial_seed())))

    def _load(self, content: dict[str, Any], opener: Opener) -> None:
        self._seed = load_content(
            content, self._directory, self._contents, self._pos, seed=self._seed, lr_scaling=self._lr_scaling
        )
        opener.call_hooks(self._pos.step, self._load_hooks)
        self._contents.parts.go_on()  # as if the hooks had drawn nothing


def _require_usable(objects: dict[str, object], save_every: int, keep: int) -> None:
    for name in objects:
        if name.startswith("_") or hasattr(State, name):
            raise ValueError(f"State cannot save something as {name!r}: the name is its own; choose another")
    if save_every < 1 or keep < 1:
        raise ValueError(f"wanted save_every and keep of at least 1, got {save_every} and {keep}")
