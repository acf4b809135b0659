"""Says that nodes do not run the same: ranks that do not fail or hang, or train something else without a word.

Who leads sees all nodes, and says it.
"""

from __future__ import annotations

from collections.abc import Callable

from agent.core.model import Identity, Node
from agent.core.state import AgentFacts, AgentState

_SHOWN = 5


class Differences:
    """Looks at an agent's state after each turn of its loop, and tells of each node once.

    Args:
        say: given each sentence.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen: set[Identity] = set()
        self._revision = 0

    def look(self, state: AgentState) -> None:
        """Compare the nodes that are new with this one."""
        view = state.view
        if view is None or not view.is_whole or view.revision == self._revision:
            return
        self._revision = view.revision
        for each in view.nodes:
            who = each.value.member.identity
            if who not in self._seen:
                self._seen.add(who)
                self._compare(state.me, each.value)

    def _compare(self, me: AgentFacts, other: Node) -> None:
        here, there = dict(me.about.facts), dict(other.about.facts)
        differ = [
            f"{name} {there.get(name, 'none')} there, {here.get(name, 'none')} on {me.node_id}"
            if name != "script"
            else f"another script, or another module beside it, than on {me.node_id}"
            for name in sorted({*here, *there})
            if here.get(name) != there.get(name)
        ]
        if differ:
            self._say(f"{other.node_id} does not run the same: {'; '.join(differ[:_SHOWN])}; make them the same")
