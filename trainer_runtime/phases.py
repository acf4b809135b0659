"""Phases: stretches of a script in which no step is to be expected."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer_runtime.dist import open_control_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Phases:
    """Of this process."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of those under way, the outermost first."""
        self.is_trained = False
        """The last epoch is over."""
        self.away_s = 0.0
        """In those that are over."""
        self.settle: Callable[[], None] = lambda: None
        """Called before a phase of the script begins."""

    def show(self) -> None:
        page = open_control_page()
        if page is not None:
            page.phase = int(bool(self.names) or self.is_trained)
            page.close()


_phases = _Phases()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Tell the agent that this rank takes no steps for a while: an evaluation, for instance, is no hang.

    What is done within belongs to no step, so it runs again if it did not finish. May be nested. Nothing is being
    copied of the State within, so weights may be changed in whatever way, as by an average that takes their place.

    Args:
        name: what is being done.
    """
    _phases.settle()
    with own_phase(name):
        yield


def settle_before_phases(settle: Callable[[], None]) -> None:
    """Have this called before each phase of the script, in place of what was given before."""
    _phases.settle = settle


@contextmanager
def own_phase(name: str) -> Iterator[None]:
    """Tell the agent of a phase that is the runtime's own."""
    _phases.names.append(name)
    began = time.monotonic()
    _phases.show()
    try:
        yield
    finally:
        _phases.names.pop()
        if not _phases.names:
            _phases.away_s += time.monotonic() - began
        _phases.show()


def expect_steps(*, are_due: bool) -> None:
    """Tell the agent whether there are steps to come; the last epoch may be over."""
    if _phases.is_trained == are_due:
        _phases.is_trained = not are_due
        _phases.show()


def away_s() -> float:
    """Return how long this process was in phases, but for those under way; in seconds."""
    return _phases.away_s
