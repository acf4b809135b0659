"""State: what a training script saves, resumes from, and counts its steps with.

A step is one optimizer step. `commit()` ends it, on every rank, after the optimizer, the scheduler and the scaler. Only
committed steps count: the position in the data is the number of items drawn (for a `tr.DataLoader`, of samples
consumed) at the last commit, so a step that was interrupted is replayed with the same items.

Saves are scheduled by step count, so all ranks know without communication when one is due; rank 0 writes. A step that
was saved is saved again only by `save()`, and only if the state was changed since.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer_runtime import contract
from trainer_runtime.agent_channel import Move, milestones, open_channel
from trainer_runtime.agent_events import GroupOverError, listen_to_agent
from trainer_runtime.checkpoint import warn
from trainer_runtime.commit_hooks import CommitHooks
from trainer_runtime.connections import connections
from trainer_runtime.contents import Contents
from trainer_runtime.dist import is_main, membership, open_control_page
from trainer_runtime.exchange import script_line
from trainer_runtime.finite import FiniteGuard
from trainer_runtime.handoff import HandoffParticipant
from trainer_runtime.live_metrics import LiveMetrics
from trainer_runtime.manifest import require_run_name
from trainer_runtime.object_store import open_place
from trainer_runtime.own_step_time import watch_own_time
from trainer_runtime.phases import expect_steps, runtime_phase, settle_before_phases
from trainer_runtime.position import Position
from trainer_runtime.process_exit import restart_at_exit
from trainer_runtime.regroup import Regrouping, exit_if_not_entered
from trainer_runtime.restoring import Restorer, exit_without_restart, require_only_state
from trainer_runtime.saving import Saver
from trainer_runtime.scaling import LrScaling, require_growing_batch, require_lr_scaling
from trainer_runtime.set_up import set_up
from trainer_runtime.sources import Sources
from trainer_runtime.stacks import register_stack_dump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainer_runtime.snapshots import SnapshotTaker

    Hook = TypeVar("Hook", bound=Callable[[Path], object])
    CommitHook = TypeVar("CommitHook", bound=Callable[[int, dict[str, float]], object])
    RegroupHook = TypeVar("RegroupHook", bound=Callable[[int, int], object])

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_RUN = "local"  # without an agent, all runs of the script in a directory continue the same training


class State:
    """Everything that must survive a restart.

    Objects with `state_dict` and `load_state_dict` (modules, optimizers, schedulers, scalers) are saved through these
    methods, modules without their DDP and torch.compile wrappers; an engine of DeepSpeed with all that it has, in the
    same world size. Everything else must be a plain value (int, float, str, bool, None, tensor; lists, tuples and dicts
    of these) and is read and written as an attribute: `state.best = 0.9`. Lists, dicts and tensors are restored in
    place: they keep their identity, and tensors their device, so the script can also change them under its own names.
    Numbers, strings and None cannot change in place: read and write them as attributes.

    The following is saved for each rank without being named: the random states of Python, NumPy, torch and CUDA, and
    the running statistics of normalization layers. Give other objects that differ from rank to rank as
    `PerRank(thing)`. A `torch.Generator` and torchdata's StatefulDataLoader can be given as they are.

    Args:
        checkpoint_dir: directory of the checkpoints, the same for all ranks that may become rank 0; or the URL of an
            object store, as `s3://bucket/jobs/mine`. Default: the agent's `--checkpoint_dir`, else `./checkpoints`.
        save_every: steps between durable checkpoints, at least 1. Must be equal on all ranks.
        keep: number of this run's checkpoints to keep, at least 1. With 2 there is another one if the newest is
            damaged. Under an agent at most 100.
        seed: seed for deriving random states after a change of the world size, from (seed, step, rank). Default: the
            seed in the checkpoint; at the first start torch's initial seed on rank 0 (the `torch.manual_seed` value).
        lr_scaling: multiply learning rates, after a change of the world size, by new size / old size ("linear"), or by
            the square root of that ("sqrt"). Only for a loader with `batch_size`, not with `global_batch`.
        check_finite: check weights, running statistics and metrics at each commit. If a value is NaN or infinite, the
            step does not count and the job stops: SystemExit(93) is raised after a line that names the value.
            Synchronizes with the device at each commit.
        leave_on_handoff: on a planned change, `commit` saves and raises SystemExit(101). If False, it only sets
            `should_stop`, and the script has to end soon after.
        **objects: objects and values to save, under these names.

    Raises:
        ValueError: a name is taken or begins with an underscore, a number is out of range, `lr_scaling` is not one of
            its values, or an optimizer has parameters of a sharded module and others.
    """

    _restored: ClassVar[set[tuple[Path | None, str]]] = set()
    """(directory, run) of the States that this process has restored; under an agent the directory is None."""

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
        # Names with an underscore are State's own attributes; __setattr__ passes all others to the contents.
        self._contents = Contents(objects)
        self._directory = open_place(checkpoint_dir or os.environ.get(contract.CHECKPOINT_DIR) or "checkpoints")
        self._save_every = save_every
        self._keep = keep
        self._seed = seed
        self._lr_scaling = None if lr_scaling is None else require_lr_scaling(lr_scaling)
        if check_finite and (hidden := next((each.name for each in self._contents.engines if each.hides_weights), "")):
            raise ValueError(f"check_finite cannot check {hidden}: between the steps ZeRO 3 has no weights to look at")
        self._guard = FiniteGuard(self._contents.by_type(nn.Module)) if check_finite else None
        self._leave_on_handoff = leave_on_handoff
        self._run = os.environ.get(contract.RUN_ID) or DEFAULT_RUN
        require_run_name(self._run)
        self._group = 0
        self._pos = Position()
        self._sources = Sources(self._contents, self._pos)
        self._begun_epoch: int | None = None
        self._streamed_epoch: int | None = None
        self._is_in_epochs = False
        self._page = open_control_page()
        self._pos.live = self._live_metrics = LiveMetrics(self._page)
        self._channel = open_channel()
        if self._page is not None:
            register_stack_dump(self._page)
            listen_to_agent()
        if dist.is_initialized():  # otherwise `restore` notes it
            milestones.note_joined()
        if self._channel is not None and keep > contract.MAX_KEEP:
            raise ValueError(f"wanted keep of at most {contract.MAX_KEEP} under an agent, got {keep}")
        self._save_hooks: list[Callable[[Path], object]] = []
        self._load_hooks: list[Callable[[Path], object]] = []
        self._commit_hooks = CommitHooks()
        self._has_restored = False
        """The group has begun from a saved state."""
        self._saver: Saver | None = None  # set by `restore`, as are the next two
        self._snapshots: SnapshotTaker | None = None
        self._handoff: HandoffParticipant | None = None
        self._handled_handoff = 0  # number of the newest handoff that this rank stopped for
        self._should_stop = False
        self._turn = 0
        """Number of this State among those that this process has restored, from 1; 0: it is not restored."""
        self._regroup = Regrouping(self._contents, self._page, self._channel)
        self._has_warned_of_no_item = False
        self._saved_step = -1
        """The step of the newest save that all ranks have begun, successful or not."""

    @property
    def step(self) -> int:
        """Number of committed optimizer steps, over all epochs, groups and restarts."""
        return self._pos.step

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0; after the last epoch, the number of epochs."""
        return self._pos.epoch

    @property
    def group(self) -> int:
        """Number of the current group, as in the names of checkpoints; 0 before `restore`."""
        return self._group

    @property
    def should_stop(self) -> bool:
        """Whether the group is over and the script should end; only set with `leave_on_handoff=False`."""
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
        """Register a function that writes further files into each checkpoint; can be used as a decorator.

        It runs on rank 0 within every save. It is called with the path of a private, empty directory, which becomes
        the checkpoint's `extra`. It must not use collectives, because the other ranks do not take part.

        Args:
            hook: function of one `pathlib.Path`.
        """
        self._save_hooks.append(hook)
        return hook

    def on_load(self, hook: Hook) -> Hook:
        """Register a function that reads the files that `on_save` functions wrote; can be used as a decorator.

        It runs on rank 0 within `restore`, after all objects were restored, and is called with the path of the
        checkpoint's `extra` directory. It does not run if the checkpoint has no such directory.

        Args:
            hook: function of one `pathlib.Path`.

        Raises:
            RuntimeError: `restore` was called already.
        """
        if self._saver is not None:
            raise RuntimeError("on_load comes too late: register it before state.restore() or state.epochs()")
        self._load_hooks.append(hook)
        return hook

    def on_commit(self, hook: CommitHook, *, every: int = 10) -> CommitHook:
        """Register a function that logs the metrics of every n-th step; can be used as a decorator.

        It runs on rank 0 within `commit`, before the step is saved, so what it has written when it returns is not lost
        with the process. After a failure the steps since the last save are made again, and it is called for them again,
        in a group of another number (`state.group`). It must not use collectives, because the other ranks do not take
        part. If it raises an error, this is printed and training continues.

        Args:
            hook: function of the step and the metrics that `commit` was given, as numbers. Reading those that are
                tensors waits for the device.
            every: it is called at the steps that are multiples of this, at least 1.

        Raises:
            ValueError: `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f"wanted every of at least 1, got {every}")
        self._commit_hooks.add(hook, every)
        self._pos.due = min(self._pos.due, self._pos.step + 1)
        return hook

    def restore(self) -> None:
        """Load the newest saved state if there is one; the same on all ranks. Does nothing the second time.

        Call it on all ranks, after wrapping the modules and before the first step. `epochs` calls it on entry.

        Raises:
            CheckpointError: there are checkpoints but none to resume from (on rank 0).
            AgentGoneError: the agent has exited (on rank 0).
            OSError: reading failed (on rank 0).
            PeerError: another rank failed.
            SystemExit: this group is no longer the current one, so there is no state to begin from.
            ValueError, RuntimeError: the checkpoint does not fit the objects.
            RuntimeError: this process has already restored another State of the same job or directory.
        """
        if self._saver is not None:
            return
        if membership.is_alone:  # an earlier version of the script has called `run`
            warn("earlier processes of this job have trained within state.run(), and this script does not call it")
            self._regroup.enter_first_group()
        is_first = self._turn == 0
        if is_first:
            with exit_without_restart(self._channel):
                identity = require_only_state(State._restored, self._directory, self._run, self._channel, self._page)
        with runtime_phase("restore"):
            self._restore(turn=self._turn or len(State._restored) + 1)
            self._sources.begin_body()
            self._call_regroup_hooks()
        if not (is_first or self._has_restored):
            warn("nothing is left to resume from, so that training begins anew, in another process")
            raise SystemExit(contract.EXIT_RESTART)
        self._expect_steps()
        if is_first:
            self._turn = len(State._restored) + 1
            State._restored.add(identity)
            watch_own_time(self._contents.of_type(nn.Module))

    def _restore(self, *, turn: int) -> None:
        milestones.note_set_up()
        restorer = Restorer(
            directory=self._directory,
            run=self._run,
            keep=self._keep,
            channel=self._channel,
            page=self._page,
            contents=self._contents,
            pos=self._pos,
            seed=self._seed,
            lr_scaling=self._lr_scaling,
            save_hooks=self._save_hooks,
            load_hooks=self._load_hooks,
            is_over=lambda: self._regroup.is_over,
        )
        self._group = restorer.open()
        restored = restorer.load(turn=turn)
        self._handoff, self._saver, self._snapshots = restored.handoff, restored.saver, restored.snapshots
        self._has_restored = restored.has_loaded
        settle_before_phases(self.settle)

    def on_regroup(self, hook: RegroupHook) -> RegroupHook:
        """Register a function for what depends on the rank or the world size; can be used as a decorator.

        It is called on every rank each time that this process has entered a group and restored what was saved, before
        training goes on: by `restore` or `epochs`, and after each move. What it sets in State is kept.

        Args:
            hook: function of the rank and the world size.
        """
        self._regroup.hooks.append(hook)
        return hook

    def run(self, train: Callable[[], Result]) -> Result:
        """Train in a process that outlives changes of its group.

        With `run`, a rank that stays moves into the next group within `commit`, with the same objects: `steps` yields
        what comes next in the new world. A process that joins sets up alone, in a world of its own where `is_main` is
        false, and enters the group here. So the set-up of the script may not depend on the rank or the world size, and
        may not count on other ranks; what does belongs in a function that is registered with `on_regroup`.

        After a failure of another rank, the ranks of the nodes that stay keep their processes too: the error that a
        broken connection raises in `train` is held, the State is restored from what was saved last, and `train` is
        called again.

        What cannot be moved is named in one line, and restarts as without `run`. Without an agent `run` only calls
        `train`.

        Args:
            train: function without arguments that contains the training: the loops over `epochs` and `steps`. It may be
                called several times.

        Returns:
            What `train` returns.

        Raises:
            RuntimeError: `train` is no function, the State was restored already, or `run` was called before. Under an
                agent this ends the job: it would happen again.
        """
        with exit_without_restart(self._channel):
            self._require_runnable(train)
        self._regroup.begin()
        while True:
            held: Exception | None = None
            try:
                return train()
            except GroupOverError:
                if not self._regroup.has_lost_peers(self._sources):
                    raise SystemExit(contract.EXIT_RESTART) from None
            except Exception as error:
                if not self._regroup.has_lost_peers(self._sources):
                    raise
                held = error
            self._begin_again(held)

    def _require_runnable(self, train: object) -> None:
        """Raise RuntimeError, which ends the job instead of a restart, if `run` is not used as it must be."""
        if not callable(train):
            raise RuntimeError(  # noqa: TRY004 - as the others
                "wanted the function that trains, state.run(train), not what it has returned: state.run(train()) "
                f"trains first, without run; got {train!r}"
            )
        if self._regroup.is_run:
            raise RuntimeError("wanted one call of state.run(), got a second one: let one function do all the training")
        if self._saver is not None:
            raise RuntimeError(
                "wanted state.run() before state.restore() and state.epochs(): call these in the function that it calls"
            )

    def _begin_again(self, held: Exception | None) -> None:
        """Leave the broken group and enter the next one; `restore` restores there what was saved.

        Args:
            held: what `train` raised; None: the agent has said that the group is over.

        Raises:
            Exception: `held`: the agent knows of no reason why the group should be over.
            SystemExit: the next group could not be entered.
        """
        connections.shut_down()  # so that the other ranks raise too
        if self._saver is not None:
            self._saver.close()
        move = self._regroup.await_place(held)
        self._saver = self._snapshots = self._handoff = None
        self._pos.begin_again()
        self._sources = Sources(self._contents, self._pos)
        self._begun_epoch = self._streamed_epoch = None
        self._is_in_epochs = False
        self._handled_handoff, self._saved_step = 0, -1
        self._regroup.reset_modules()
        with exit_if_not_entered():
            self._regroup.enter(move)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, from the interrupted one to `total - 1`.

        Restores on entry. After the last epoch it saves the state at its end. Leaving the loop early saves nothing:
        call `save()`. Code after the last commit of an epoch, an evaluation for instance, runs again if it was
        interrupted.

        The body of an interrupted epoch begins with the random states that it began with before, so an order that it
        draws before `steps` is the same. From the first uncommitted item on, the random states are those of the last
        commit, and so are the values, the schedules and the options of optimizers in State: what the body does to them
        before `steps` counts once.

        Args:
            total: number of epochs of the whole training.

        Raises:
            RuntimeError: called within a loop over it.
        """
        if self._is_in_epochs:
            raise RuntimeError(
                "state.epochs() was called within a loop over it: an epoch is one pass over state.steps(), so one loop "
                "counts them all; use a plain loop for anything else"
            )
        self.restore()
        expect_steps(are_due=True)
        is_trained = self._pos.epoch >= total
        if is_trained and self._streamed_epoch is None and self._pos.step and is_main():
            warn(
                f"no step is left to make: all {total} epochs are trained already, in {self._pos.step} steps; to train "
                "anew start with --fresh, or with another checkpoint directory"
            )
        self._is_in_epochs = True
        try:
            while self._pos.epoch < total:
                self._sources.begin_body()
                self._begin_epoch()
                yield self._pos.epoch
                self._pos.end_epoch()
        finally:
            self._is_in_epochs = False
        expect_steps(are_due=False)
        if not is_trained:
            self._pos.save += 1  # the last epoch's body may have changed the state after its last commit
        self._saved_step = self._pos.step
        self._require_restored().save()

    def steps(self, items: Iterable[Item], *, source: object = None) -> Iterator[Item]:
        """Yield the items of this epoch that are not committed yet.

        A `tr.DataLoader` begins after the committed samples. A source that State also saves resumes by itself. From any
        other source the items that were committed before the restart are drawn and dropped, so its order must be the
        same each time: let it depend only on a seed and the epoch. An item may be less than a step (a micro-batch).

        Args:
            items: any iterable.
            source: the object in State from which `items` are drawn, if `items` is a wrapper around it, as in
                `steps(tqdm(stream), source=stream)`. The wrapper must not draw items ahead.

        Raises:
            RuntimeError: called before `restore`, or for the second time in one epoch (the position would be
                ambiguous).
            ValueError: State does not save `source`.
        """
        self._require_restored()
        set_up.end()
        if self._streamed_epoch == self._pos.epoch:
            raise RuntimeError(f"state.steps() was already used in epoch {self.epoch}; use it once per epoch")
        require_growing_batch(items, self._lr_scaling)
        self._begin_epoch()
        self._streamed_epoch = self._pos.epoch
        try:
            for item in self._sources.draw(items, source):
                self._require_group()
                yield item
        finally:
            self.settle()

    def commit(self, **metrics: float | torch.Tensor) -> None:
        """End a step. Call it on every rank, once per item or group of items, after all of its optimizer steps.

        If no save, snapshot or function of `on_commit` is due, this takes about a microsecond: no system call, no
        collective, no device synchronization. Before a snapshot, a rank with a large part of a sharded model waits
        until the next node has its part of the last one, if that is late.

        Args:
            **metrics: numbers, or tensors with one element, that describe the step; a checkpoint of the step has them
                in its manifest, functions of `on_commit` get them, and the web page draws those of rank 0. A tensor on
                a device is read only for a checkpoint or such a function.

        Raises:
            TypeError: something in this State could not be loaded back; the message has its name. At the first commit.
            RuntimeError: called before `restore`; or within a step of several micro-batches of a `tr.DataLoader`; or,
                at the first commit and when a save is due, if a source would not resume at its position.
            SystemExit: with `EXIT_RESTART` (101): this step is saved for a planned change, and the next group continues
                there. With `EXIT_NO_RESTART` (93): a value is not finite, with `check_finite`.
        """
        pos = self._pos
        if self._guard is not None:
            self._saved_step = -1  # if the step is refused, the one before is not saved again with its weights
            self._guard.check(pos.step + 1, metrics)
        if pos.loader is not None:
            pos.count_samples(pos.loader)
        if pos.beside:
            pos.check_beside()
        if pos.items == pos.drawn and pos.items:
            self._warn_of_no_item()
        pos.step = step = pos.step + 1
        pos.save = 0
        pos.items = pos.drawn
        pos.metrics = metrics
        page = self._page
        if page is not None:
            page.step = step
            if page.handoff > self._handled_handoff and self._handle_handoff(page.handoff):
                return
            self._require_group()
            if (asked := page.metrics_asked) != self._live_metrics.answered:
                self._live_metrics.answer(asked, step, metrics)
        if step >= pos.due:
            self._do_due_work()

    def _require_group(self) -> None:
        """Raise GroupOverError if the agent has said that the group is over; the script may have caught the error."""
        if self._regroup.is_over:
            raise GroupOverError

    def settle(self) -> None:
        """Wait until nothing of this State is being copied, so that its tensors may be changed in any way.

        After a commit a thread may copy weights until the optimizer's next step. It detects changes that torch
        operations make meanwhile, but not those through `.data` or a NumPy view. Entering `tr.phase` and the end of
        `steps` wait as well.
        """
        if self._saver is not None:
            self._saver.capturer.settle()

    def save(self) -> None:
        """Save durably and wait until the checkpoint is committed. Call it on every rank.

        Within the loop over an epoch's items this saves the last committed step as it is now, also if its commit has
        saved it and State was changed since; a restart begins with the next item. After that loop has ended, this saves
        the present state and closes the epoch: a restart from here begins the next epoch, and the rest of this one's
        body does not run again.

        If this group is no longer the current one, nothing is saved, and a line on stderr says so.

        Raises:
            AgentGoneError: the agent exited before it answered whether this checkpoint is committed.
            OSError: the checkpoint could not be written.
            RuntimeError: the epoch would be closed, but it is unknown where another loader begins the next one.
            TypeError: something in this State could not be loaded back; the message has its name.
        """
        if self._saver is None:
            return
        if sys.exception() is not None and self._regroup.has_lost_peers(self._sources):  # the others do not save
            raise GroupOverError
        if self._pos.is_drawn_out and sys.exception() is None:  # in a `finally` the body may be incomplete
            with exit_without_restart(self._channel):
                self._sources.check_closed()
            self._pos.save += 1
            self._saver.save()
            return
        self._sources.note_save()
        # With an item drawn since the commit, or an error under way, the next step may have changed the weights.
        is_settled = self._pos.drawn == self._pos.items and sys.exception() is None
        is_saved_again = is_settled and self._saved_step == self._pos.step
        self._pos.save += is_saved_again
        self._saved_step = self._pos.step
        self._saver.save(only_if_changed=is_saved_again)

    def _do_due_work(self) -> None:
        pos, saver = self._pos, self._require_restored()
        with exit_without_restart(self._channel):
            self._contents.require_boundary()
        if pos.due == 0:
            set_up.end()
            # Not left to the first save, which may be an hour away and involves only rank 0.
            saver.capturer.check()
            self._sources.note_commit()
            self._regroup.report(self._sources)
            if disagreement := self._regroup.find_disagreement():
                with exit_without_restart(self._channel):
                    raise RuntimeError(disagreement)
        with exit_without_restart(self._channel):
            self._sources.check()
        if self._channel is not None:  # at each call, because at the first one a checkpoint may have held the channel
            self._channel.report_first_step(pos.step)
            self._channel.release_restored_snapshot()
        self._commit_hooks.call(self._group, pos.step, pos.read_metrics)
        # At once, if the last group missed one.
        is_save_due = pos.step // self._save_every > pos.last_due // self._save_every
        is_saved_here = is_save_due and saver.writes_copies
        snapshot = None if self._snapshots is None else self._snapshots.take(pos.step, is_saved=is_saved_here)
        if is_save_due:
            pos.last_due = self._saved_step = pos.step
            saver.save_if_free(capture=snapshot)
        pos.due = min((pos.step // self._save_every + 1) * self._save_every, self._commit_hooks.next_due(pos.step))
        if self._snapshots is not None:
            pos.due = min(pos.due, self._snapshots.due)

    def _warn_of_no_item(self) -> None:
        if not self._has_warned_of_no_item and is_main():
            warn(
                f"commit() at {script_line()} ends a step, and no item was drawn from state.steps() since the last "
                "one: a restart between the two leaves out a step or makes one twice. Commit once per item, after all "
                "of its optimizer steps, and draw no items ahead"
            )
        self._has_warned_of_no_item = True

    def _handle_handoff(self, number: int) -> bool:
        """Save and leave, or move, if this is the step at which all ranks stop; return whether this rank has moved."""
        if self._saver is None or self._handoff is None:
            return False
        if not self._handoff.should_stop_after(self._pos.step, self._prepare_handoff):
            return False
        self._commit_hooks.call(self._group, self._pos.step, self._pos.read_metrics)
        self._handled_handoff = number
        self._saved_step = self._pos.step
        self._regroup.report(self._sources)
        step = self._pos.step
        answer = self._handoff.save_and_wait(step, self._take_handoff_snapshot, self._saver.save_for_handoff)
        if isinstance(answer, Move):
            self._move(answer)
            return True
        if answer is not None:
            self._should_stop = True
            if self._leave_on_handoff:
                restart_at_exit()
                raise SystemExit(contract.EXIT_RESTART)
        return False

    def _move(self, move: Move) -> None:
        """Enter the next group, and restore there what all ranks have saved.

        Raises:
            SystemExit: that failed.
        """
        assert self._saver is not None  # noqa: S101 - a rank that saves for a handoff has one
        began_at = (self._pos.epoch, self._pos.step)
        with exit_if_not_entered():
            with runtime_phase("restore"):
                self._saver.close()
                self._saver = self._snapshots = self._handoff = None
                self._regroup.enter(move)
                self._restore(turn=self._turn)
                self._require_same_step(*began_at)
                self._pos.due = 0  # what is done once in a group is due at the next commit
                self._handled_handoff, self._saved_step = 0, -1
                self._sources.on_move()
                self._call_regroup_hooks()
            self._expect_steps()

    def _call_regroup_hooks(self) -> None:
        """Call the script's hooks: on every rank at the same place, and what they set in State is kept."""
        self._regroup.call_hooks()
        if self._pos.items:
            self._contents.note_committed()

    def _prepare_handoff(self) -> None:
        """Before any rank replaces a snapshot, the newest one is complete, and all parts of it were sent."""
        if self._snapshots is not None:
            self._snapshots.wait_until_sent()

    def _take_handoff_snapshot(self, step: int) -> bool:
        return self._snapshots is not None and self._snapshots.take_and_wait(step)

    def _require_same_step(self, epoch: int, step: int) -> None:
        """Require that the group continues after this step: the script is within its epoch."""
        pos = self._pos
        if (pos.epoch, pos.step) != (epoch, step) or not self._has_restored:
            raise RuntimeError(
                f"the group continues after step {pos.step} of epoch {pos.epoch}, and this process has stopped after "
                f"step {step} of epoch {epoch}"
            )

    def _expect_steps(self) -> None:
        milestones.note_loaded()
        expect_steps(are_due=True)
        if self._page is not None:
            self._page.restored = 1

    def _begin_epoch(self) -> None:
        """Save or restore the random states at the beginning of this epoch, once: `epochs` comes before `steps`."""
        if self._begun_epoch != self._pos.epoch:
            self._begun_epoch = self._pos.epoch
            self._contents.parts.begin_epoch(is_resumed=self._pos.items > 0)

    def _require_restored(self) -> Saver:
        if self._saver is None:
            raise RuntimeError(
                "training would begin at step 0 without looking for a checkpoint; "
                "iterate over state.epochs(...) or call state.restore() before the first step"
            )
        return self._saver


def _require_usable(objects: dict[str, object], save_every: int, keep: int) -> None:
    for name in objects:
        if name.startswith("_") or hasattr(State, name):
            raise ValueError(f"State cannot save something as {name!r}: State uses this name itself; choose another")
    if save_every < 1 or keep < 1:
        raise ValueError(f"wanted save_every and keep of at least 1, got {save_every} and {keep}")
