"""Says every few seconds what a job waits for while nobody trains: who is there, who is missing, since when.

It reads what the core has decided, as `status` does, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.core.state import AgentState

_EVERY_S = 10.0


class Waiting:
    """Looks at an agent's state after each turn of its loop.

    Args:
        machines: node ids that the operator has named. Empty: it is not known who is to come.
        say: given each sentence.
    """

    def __init__(self, machines: Sequence[str], say: Callable[[str], None]) -> None:
        self._machines = machines
        self._say = say
        self._since: float | None = None
        self._due = 0.0

    def look(self, state: AgentState, now: float) -> None:
        """Say it if it is time. `now`: monotonic, in seconds."""
        reason = _reason(state)
        if not reason:
            self._since = None
        elif self._since is None:
            self._since, self._due = now, now + _EVERY_S
        elif now >= self._due:
            self._due = now + _EVERY_S
            self._say(f"{reason}{self._missing(state)} ({now - self._since:.0f} s)")

    def _missing(self, state: AgentState) -> str:
        if state.view is None or not state.view.is_whole:
            return ""
        there = {node.value.node_id for node in state.view.nodes}
        missing = [machine for machine in self._machines if machine not in there]
        return f"; missing: {', '.join(missing)}" if missing else ""


def _reason(state: AgentState) -> str:
    """What is waited for; empty: somebody trains, or this agent is about to leave, or etcd is away."""
    is_over = state.leaving is not None or state.drain_until is not None or state.is_store_lost or state.view is None
    if is_over or (state.group is not None and state.group.members):
        return ""
    if state.planned is not None:
        return state.planned.reason if state.planned.action is None else ""
    leader = state.view.leader if state.view is not None else None
    return f"waiting for {leader.value.node_id} to form a group" if leader is not None else "waiting for a leader"
