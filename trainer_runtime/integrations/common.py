"""What the integrations share: the process group that a framework made, and states that have to wait."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trainer_runtime.dist import init
from trainer_runtime.leaving import leave_at_exit
from trainer_runtime.random_states import RandomStates

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_runtime.state import State


class Later:
    """Stands in a State for what the framework makes, or can take on, only after the State was restored.

    Args:
        read: returns what is to be saved.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved."""
        return self._read()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was saved until it is taken."""
        self._restored = state_dict

    def take(self) -> dict[str, Any] | None:
        """Return what was restored, once; None if nothing was."""
        restored, self._restored = self._restored, None
        return restored


def join(workers: int, advice: str) -> None:
    """Make sure that there is a process group, which State needs, and that it is left in good order at exit.

    Args:
        workers: with how many the framework trains.
        advice: what to do if these are not all.

    Raises:
        RuntimeError: they are not all: each would train alone, and all of them save as one.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if workers != started:
        raise RuntimeError(f"wanted to train with all {started} workers that were started, got {workers}; {advice}")
    if dist.is_initialized():
        leave_at_exit()
    else:
        init()


def restore_ahead(state: State) -> Callable[[], None]:
    """Restore before the framework has set up its loaders; return what to call when the first step is to be taken.

    Loaders and samplers take their seeds from the random states while they are made. They must see those of the
    script's beginning, as they did before the restart; training goes on with those of the restored step.
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
