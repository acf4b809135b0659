"""Entering a group without a new process: what the ranks of a script with `State.run` do.

A process enters a group in two cases. A rank that stays is quiesced within `commit`, and its agent sends it into the
next group. A process that starts for such a group has set up in a world of its own, and enters at `State.run`. Both do
the same here, in the same order, since all of it is collective: leave the old process group, join the new one, and wrap
modules in DistributedDataParallel again. The State is restored afterwards, as in a new process.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer_runtime import contract
from trainer_runtime.agent_channel import boot_time, milestones
from trainer_runtime.agent_events import AgentEvents, listen_to_agent
from trainer_runtime.agreement import are_same_on_all_ranks, digest_of_learning_rates, digest_of_parameters
from trainer_runtime.checkpoint import warn
from trainer_runtime.connections import connections
from trainer_runtime.dist import is_main, join_again, membership, rank, world_size
from trainer_runtime.set_up import set_up
from trainer_runtime.snapshot_memory import replace_snapshot_memory
from trainer_runtime.wrapping import copied_modules, find_unusual_wrapping, move_copy, wrap_again, wrapped_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainer_runtime.agent_channel import AgentChannel, Move
    from trainer_runtime.contents import Contents
    from trainer_runtime.contract import ControlPage
    from trainer_runtime.sources import Sources


class Regrouping:
    """The changes of group of one State's process.

    Args:
        contents: the objects of the State.
        page: this rank's control page; None without an agent, as is the channel.
        channel: channel to the agent.
    """

    def __init__(self, contents: Contents, page: ControlPage | None, channel: AgentChannel | None) -> None:
        self._contents = contents
        self._page = page
        self._channel = channel
        self._end: AgentEvents | None = None
        self._training: dict[nn.Module, bool] = {}
        """The modules, and whether each was in training mode as `State.run` began."""
        self._trained: dict[nn.Parameter, bool] = {}
        """The parameters, and whether each was to be trained then."""
        self._wrapped: WeakSet[nn.Module] = WeakSet()
        """The modules that were wrapped in DistributedDataParallel then."""
        self._has_gradients, self._dtype = True, torch.get_default_dtype()
        """Torch's modes then."""
        self._can_move: bool | None = None
        """What the agent was last told; None: nothing yet."""
        self.hooks: list[Callable[[int, int], object]] = []
        """Called with the rank and the world size after each change."""
        self._has_warned = False
        self.is_run = False
        """The script trains within `State.run`."""

    @property
    def is_over(self) -> bool:
        """Whether the agent has said that the group is over."""
        return self._end is not None and self._end.is_over

    def begin(self) -> None:
        """Begin `State.run`: enter the group, if this process has set up in a world of its own."""
        self.is_run = True
        self.enter_first_group()
        if self._page is not None:
            self._end = listen_to_agent()
            if self._end is not None:
                self._end.begin_group()
        modules = self._contents.by_type(nn.Module).values()
        self._training = {each: each.training for module in modules for each in module.modules()}
        self._trained = {each: each.requires_grad for module in modules for each in module.parameters()}
        self._wrapped = WeakSet(wrapped_modules())
        self._has_gradients, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()

    def enter_first_group(self) -> None:
        """Enter the group, if this process has set up in a world of its own."""
        if not membership.is_alone:
            return
        if os.environ.get(contract.SETUP) == "wait" and self._channel is not None:
            move = self._channel.ask_place()
            assert move is not None  # noqa: S101 - it waits for ever
            self.enter(move)
        else:
            began = boot_time()
            enter_group({}, self._contents.of_type(Optimizer), on_left=lambda: None)
            milestones.note_joined_after_set_up(began)

    def enter(self, move: Move) -> None:
        """Leave the present group, and enter the one that the agent has named.

        Raises:
            torch.distributed.DistError, RuntimeError: as `enter_group`.
        """
        milestones.begin_again()
        if move.descriptor is not None:  # the number of the descriptor stays
            replace_snapshot_memory(move.descriptor)
        enter_group(move.variables, self._contents.of_type(Optimizer), self._on_left)

    def _on_left(self) -> None:
        if self._end is not None:
            self._end.begin_group()
        if self._channel is not None:
            self._channel.begin_group()

    def call_hooks(self) -> None:
        """Call the script's functions for what depends on the rank or the world size."""
        with set_up.paused():
            for hook in self.hooks:
                hook(rank(), world_size())

    def report(self, sources: Sources) -> None:
        """Report whether this process can enter another group; print a line if it cannot although `run` is used."""
        if not self.is_run or self._channel is None:
            return
        why_not = "its model is sharded" if self._contents.shards is not None else ""
        why_not = "DeepSpeed's engine keeps the ranks that it was made with" if self._contents.engines else why_not
        why_not = why_not or find_obstacle(self._contents.of_type(Optimizer))
        if not why_not and any(each not in self._wrapped for each in wrapped_modules()):
            why_not = "a module was wrapped in DistributedDataParallel within state.run(): wrap it before"
        can_move = not why_not and sources.can_move
        if can_move and self._can_move is None and set_up.read_at and is_main():
            warn(
                f"state.run(): the script asks for its rank, the world size or what follows from it at "
                f"{set_up.read_at}, before its steps: "
                "that does not run again as the group changes, and in a process that joins is_main() is false on every "
                "rank while it sets up. Let what depends on them be in a function registered with state.on_regroup"
            )
        if can_move != self._can_move:
            self._can_move = can_move
            self._channel.report_can_move(can_move=can_move)
            if not can_move and is_main():
                warn(
                    "state.run(): changes of the group restart this script as without it: "
                    + (why_not or sources.obstacle())
                )

    def find_disagreement(self) -> str:
        """Return why the ranks, which have taken a step, must not train on; empty: they may. A collective with `run`.

        If only their parameters differ, a line says so: a script may average them later.
        """
        if not self.is_run or world_size() == 1 or self._contents.shards is not None:
            return ""
        rates = digest_of_learning_rates(self._contents.of_type(Optimizer))
        parameters = digest_of_parameters(self._contents.by_type(nn.Module).values())
        same_rates, same_parameters = are_same_on_all_ranks(rates, parameters)
        advice = (
            "a process that joins sets up alone: let what depends on the rank or the world size be in a function "
            "registered with state.on_regroup"
        )
        if not same_rates:
            return f"state.run(): after a step, the learning rates in State are not the same on all ranks; {advice}"
        if not (same_parameters or self._has_warned) and is_main():
            self._has_warned = True
            warn(
                "state.run(): after a step, the parameters in State are not the same on all ranks, and a restart goes "
                f"on with those of rank 0; {advice}"
            )
        return ""

    def has_lost_peers(self, sources: Sources) -> bool:
        """Return whether an error may come from the end of the group, and this process can enter the next one."""
        if not (self._can_move and sources.can_move and (self.is_over or connections.are_broken())):
            return False
        self.report(sources)  # perhaps the script has made a process group of its own since the last time
        return bool(self._can_move)

    def await_place(self, held: Exception | None) -> Move:
        """Wait until the agent sends this process, whose group is broken, into the next one.

        Args:
            held: what the broken group has raised; None: nothing.

        Raises:
            Exception: `held`: the agent knows of no reason why the group should be over.
        """
        assert self._channel is not None  # noqa: S101 - only ranks of an agent can move
        if held is not None:  # before the place is asked for: it belongs to the output of the group that is over
            warn(f"this rank has lost its group, and asks its agent for the next one: {held}".partition("\n")[0])
        move = self._channel.ask_place(float(os.environ.get(contract.VERDICT_WITHIN_S, "1")))
        if move is None:
            raise held or RuntimeError("the group is over, and this rank was not sent into another one")
        if held is not None:
            traceback.clear_frames(held.__traceback__)  # they hold activations, and iterators
            held.__traceback__ = None
        return move

    def reset_modules(self) -> None:
        """Undo what a step that does not count has left, beside what State restores."""
        torch.set_grad_enabled(self._has_gradients)
        torch.set_default_dtype(self._dtype)
        for module, is_training in self._training.items():
            module.training = is_training
        for parameter, is_trained in self._trained.items():
            parameter.requires_grad_(is_trained)
        for scaler in self._contents.by_type(torch.amp.GradScaler).values():
            scaler._per_optimizer_states.clear()  # noqa: SLF001 - the stage of the step


@contextmanager
def exit_if_not_entered() -> Iterator[None]:
    """Turn an error into the end of this process: no `except Exception` of the script may go on after it."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        warn("this rank could not enter the next group, and ends")
        raise SystemExit(1) from error


def find_obstacle(optimizers: Iterable[object]) -> str:
    """Return why the ranks of this script cannot enter another group without a new process; empty: they can.

    Args:
        optimizers: the optimizers in State.
    """
    if dist.get_backend() != "gloo":
        return f"the backend is {dist.get_backend()}, with which this was not tried yet"
    if not membership.is_by_init:
        return "the process group was not opened by tr.init()"
    if len(dist.distributed_c10d._world.pg_map) > 1:  # noqa: SLF001 - no public way to list process groups
        return "the script has process groups of its own (new_group, or a device mesh)"
    optim = sys.modules.get("torch.distributed.optim")  # not imported: no optimizer is one
    if optim is not None and any(isinstance(each, optim.ZeroRedundancyOptimizer) for each in optimizers):
        return "ZeroRedundancyOptimizer divides its state among the ranks of one group"
    return set_up.find_obstacle() or find_unusual_wrapping()


def enter_group(
    variables: Mapping[str, str | None], optimizers: Iterable[Optimizer], on_left: Callable[[], None]
) -> None:
    """Leave the process group, and join that of another group; a collective of its ranks.

    Args:
        variables: environment variables to set before; None: to remove.
        optimizers: their gradients are dropped: they are those of a step that does not count, or of the last one.
        on_left: called once the old process group is left.

    Raises:
        torch.distributed.DistError: the other ranks did not join in time.
        RuntimeError: the ranks have not wrapped the same modules.
    """
    modules = wrapped_modules()
    for module in (*modules, *copied_modules()):
        module.zero_grad(set_to_none=True)  # as in a new process; they may be views of the old group's buffers
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()
    for name, value in {**variables, contract.SETUP: None}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    on_left()
    join_again()
    count = len(modules)
    (is_same,) = are_same_on_all_ranks(count)
    if not is_same:
        raise RuntimeError(
            f"wanted the same modules wrapped in DistributedDataParallel on all ranks, got {count} here and another "
            "number elsewhere: wrap modules before state.run(), and the same on each rank"
        )
    for module in modules:
        wrap_again(module)
    for module in copied_modules():
        move_copy(module)
