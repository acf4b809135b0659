"""Phases: stretches of a script in which no step is to be expected."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer_runtime.dist import open_control_page

if TYPE_CHECKING:
    from collections.abc import Iterator

_names: list[str] = []
"""Of the phases under way, the outermost first."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Tell the agent that this rank takes no steps for a while: an evaluation, for instance, is no hang.

    What is done within belongs to no step, so it runs again if it did not finish. May be nested.

    Args:
        name: what is being done.
    """
    _names.append(name)
    _show()
    try:
        yield
    finally:
        _names.pop()
        _show()


def _show() -> None:
    page = open_control_page()
    if page is not None:
        page.phase = int(bool(_names))
        page.close()
