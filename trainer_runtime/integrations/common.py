"""Shared by the integrations: joining the framework's process group, and states that are loaded later."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trainer_runtime.dist import init
from trainer_runtime.process_exit import destroy_group_at_exit
from trainer_runtime.random_states import RandomStates

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_runtime.state import State


class DeferredState:
    """Placeholder in a State for an object that exists, or can load its state, only after the State was restored.

    Args:
        read: returns the state to save.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return self._read()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the restored state until it is taken."""
        self._restored = state_dict

    def take(self) -> dict[str, Any] | None:
        """Return the restored state, once; None if there is none."""
        restored, self._restored = self._restored, None
        return restored


def join(workers: int, advice: str) -> None:
    """Make sure that there is a process group, which State needs, and that it is destroyed properly at exit.

    Args:
        workers: number of workers with which the framework trains.
        advice: what to do if these are not all workers.

    Raises:
        RuntimeError: they are not all: each would train alone, and all would save as if they were one.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if workers != started:
        raise RuntimeError(f"wanted to train with all {started} workers that were started, got {workers}; {advice}")
    if dist.is_initialized():
        destroy_group_at_exit()
    else:
        init()


def restore_early(state: State) -> Callable[[], None]:
    """Restore before the framework has set up its loaders; return a function to call before the first step.

    Loaders and samplers take their seeds from the random states while they are created. They must see the states of
    the script's beginning, as before the restart; training continues with the states of the restored step.
    """
    states = RandomStates({})
    beginning = states.read()
    state.restore()
    if state.step == 0:
        return _do_nothing
    restored = states.read()
    states.load(beginning)
    return lambda: states.load(restored)


def _do_nothing() -> None:
    """Leave a first start as it is."""
