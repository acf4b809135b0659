"""What the rank said last that a job has failed with: on every node's console, whichever node it was on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from agent.core.causes import first_failure, with_early_end
from agent.core.messages import how_it_ended
from agent.core.model import ClusterView, Failure


class FailedRank(Protocol):
    """How a worker ended, in a record or in a packet."""

    @property
    def tail(self) -> str:
        """Last lines of its standard error, or of both streams."""
        ...

    @property
    def traceback(self) -> str:
        """Of its exception, if these do not have all of it."""
        ...


def last_words(view: ClusterView, is_on_console: Callable[[str, Failure], bool]) -> str:
    """The first failure of the last group, and the end of its standard error; empty if it left none, or it is shown."""
    group = view.group.value if view.group is not None else None
    reports = [report for report in view.exits if group is not None and report.group == group.number]
    first = first_failure(reports if group is None else with_early_end(group, reports))
    if first is None:
        return ""
    report, failure = first
    if not (failure.traceback or failure.tail).strip() or is_on_console(report.node_id, failure):
        return ""
    return last_lines(how_it_ended(report.node_id, failure), failure)


def last_lines(how: str, failed: FailedRank) -> str:
    """What a worker said last, as a block of lines. `how` it ended."""
    said = (failed.traceback or failed.tail).rstrip().splitlines()
    return "\n".join([f"{how}; its last lines:", *(f"  | {line}" for line in said)])
