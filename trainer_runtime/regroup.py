"""Entering a group without a new process: what the ranks of a script with `State.run` do.

A process enters a group in two cases. A rank that stays is quiesced within `commit`, and its agent sends it into the
next group. A process that starts for such a group has set up in a world of its own, and enters at `State.run`. Both do
the same here, in the same order, since all of it is collective: leave the old process group, join the new one, and wrap
modules in DistributedDataParallel again. The State is restored afterwards, as in a new process.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer_runtime import contract
from trainer_runtime.dist import join_again, membership, sum_over_ranks, world_size
from trainer_runtime.set_up import set_up
from trainer_runtime.wrapping import find_unusual_wrapping, wrap_again, wrapped_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.optim import Optimizer


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
    if set_up.samplers:
        return "a DistributedSampler keeps the rank and the world size that it was made with; use tr.DataLoader"
    return find_unusual_wrapping()


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
    for module in modules:
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
    total, squares = sum_over_ranks(count, count * count)
    if (total, squares) != (count * world_size(), count * count * world_size()):
        raise RuntimeError(
            f"wanted the same modules wrapped in DistributedDataParallel on all ranks, got {count} here and another "
            "number elsewhere: wrap modules before state.run(), and the same on each rank"
        )
    for module in modules:
        wrap_again(module)
