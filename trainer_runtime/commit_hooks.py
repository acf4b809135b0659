"""The script's functions that are given the metrics of every n-th step: `State.on_commit`."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from trainer_runtime.checkpoint import warn
from trainer_runtime.dist import is_main

if TYPE_CHECKING:
    from collections.abc import Callable

    CommitHook = Callable[[int, dict[str, float]], object]


class CommitHooks:
    """Functions of a step and its metrics, each with the number of steps between two calls."""

    def __init__(self) -> None:
        self._hooks: list[tuple[CommitHook, int]] = []
        self._called_at = (0, 0)
        """Group and step of the last call."""
        self._failed: set[CommitHook] = set()

    def add(self, hook: CommitHook, every: int) -> None:
        """Add a function, to be called at each step that is a multiple of `every`."""
        self._hooks.append((hook, every))

    def next_due(self, step: int) -> int:
        """Return the first step after this one at which `call` has something to do; the largest int: none."""
        return min(((step // every + 1) * every for _, every in self._hooks), default=sys.maxsize)

    def call(self, group: int, step: int, read_metrics: Callable[[], dict[str, float]]) -> None:
        """Call the functions that are due at this step, once in each group, on rank 0.

        An error in one is printed, the first time with its traceback, and training goes on: the other ranks know
        nothing of it, and a log is worth less than the training.

        Raises:
            TypeError: a metric is not a number; the message has its name.
        """
        due = [hook for hook, every in self._hooks if step % every == 0]
        if not due or self._called_at == (group, step) or not is_main():
            return
        self._called_at = (group, step)
        numbers = read_metrics()
        for hook in due:
            try:
                hook(step, dict(numbers))
            except Exception as error:  # noqa: BLE001 - whatever the script's function raises
                if hook not in self._failed:
                    self._failed.add(hook)
                    traceback.print_exc()
                warn(f"a function of on_commit failed at step {step}, and training goes on: {error}")
