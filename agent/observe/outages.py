"""Says that etcd cannot be reached, where that is news.

Not once the job has ended or this agent is leaving: then an etcd that agents bring is stopped with them, in an order
that nobody needs to know of.
"""

from __future__ import annotations

from collections.abc import Callable

from agent.core.state import AgentState


class Outages:
    """Looks at an agent's state after each turn of its loop.

    Args:
        reason: why etcd could not be reached last.
        warn: given the sentence and the reason, once an outage.
    """

    def __init__(self, reason: Callable[[], str], warn: Callable[[str, str], None]) -> None:
        self._reason = reason
        self._warn = warn
        self._has_told = False

    def look(self, state: AgentState, _now: float) -> None:
        """Say it if it is news."""
        self.notice(is_lost=state.is_store_lost, is_over=_is_over(state), is_training=state.workers.is_alive)

    def notice(self, *, is_lost: bool, is_over: bool, is_training: bool) -> None:
        """Warn at the begin of an outage, unless the job is over or this agent is leaving."""
        if not is_lost:
            self._has_told = False
        elif not self._has_told:
            self._has_told = True
            if not is_over:
                goes_on = "; training goes on" if is_training else ""
                self._warn(f"etcd cannot be reached{goes_on}", self._reason())


def _is_over(state: AgentState) -> bool:
    has_ended = state.view is not None and state.view.result is not None
    return has_ended or state.leaving is not None or state.drain_until is not None
