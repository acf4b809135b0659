"""Phases: parts of a script in which no steps are expected."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer_runtime.dist import open_control_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Phases:
    """The phases of this process."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Names of the current phases, outermost first."""
        self.is_trained = False
        """The last epoch is over."""
        self.phase_time_s = 0.0
        """Total time in phases that have ended, in seconds."""
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
    """Tell the agent that this rank takes no steps for a while, so that an evaluation, say, is not taken for a hang.

    For use as a context manager (`with tr.phase("eval"):`) or as a decorator. Phases may be nested. Work within a phase
    belongs to no step, so it runs again after a restart if it was interrupted. Snapshots copy nothing of the State
    within a phase, so weights may be changed in any way, for instance replaced by an average for an evaluation.

    Args:
        name: name of the phase.
    """
    _phases.settle()
    with runtime_phase(name):
        yield


def settle_before_phases(settle: Callable[[], None]) -> None:
    """Set the function that is called before each phase of the script; replaces the previous one."""
    _phases.settle = settle


@contextmanager
def runtime_phase(name: str) -> Iterator[None]:
    """Report a phase of the runtime itself to the agent."""
    _phases.names.append(name)
    began = time.monotonic()
    _phases.show()
    try:
        yield
    finally:
        _phases.names.pop()
        if not _phases.names:
            _phases.phase_time_s += time.monotonic() - began
        _phases.show()


def expect_steps(*, are_due: bool) -> None:
    """Report to the agent whether further steps will come; after the last epoch none do."""
    if _phases.is_trained == are_due:
        _phases.is_trained = not are_due
        _phases.show()


def phase_time_s() -> float:
    """Return the seconds that this process has spent in phases that have ended."""
    return _phases.phase_time_s
