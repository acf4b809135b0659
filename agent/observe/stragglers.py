"""Stragglers: ranks that the others wait for in each step, although nothing has failed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from agent.core.model import ClusterView

_SLOWER = 1.5
"""How many times the usual time of the others a straggler needs, at least."""
_AT_LEAST_S = 0.005
"""How much longer than the others a straggler needs, at least."""


@dataclass(frozen=True)
class Straggler:
    """A rank that needs more time than the others for its own part of a step."""

    rank: int
    node_id: str
    own_s: float
    """Time for its own part of a step, without waiting for others."""
    others_s: float
    """The median of the other ranks."""

    @property
    def sentence(self) -> str:
        """A sentence for the operator."""
        return (
            f"rank {self.rank} on {self.node_id} is slow: {self.own_s:.3g} s of each step are its own work, "
            f"{self.others_s:.3g} s the others'"
        )


def stragglers(view: ClusterView) -> tuple[Straggler, ...]:
    """Ranks of the current group whose own part of a step takes half again as long as usual, in rank order."""
    group = view.group.value if view.group is not None else None
    if group is None:
        return ()
    nodes = {node.value.member.identity: node.value for node in view.nodes}
    own: dict[int, tuple[str, float]] = {}
    for node_rank, member in enumerate(group.members):
        node = nodes.get(member.identity)
        for local_rank, own_s in enumerate(node.own_s if node is not None else ()):
            if own_s > 0.0:
                own[group.first_rank(node_rank) + local_rank] = member.node_id, own_s
    found = []
    for rank, (node_id, own_s) in own.items():
        others = [each for other, (_, each) in own.items() if other != rank]
        if others and own_s > _SLOWER * median(others) and own_s > median(others) + _AT_LEAST_S:
            found.append(Straggler(rank, node_id, own_s, median(others)))
    return tuple(found)
