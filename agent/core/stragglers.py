"""Which rank the others wait for, step after step, although nothing is broken."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from agent.core.model import ClusterView

_SLOWER = 1.5
_AT_LEAST_S = 0.005


@dataclass(frozen=True)
class Straggler:
    """A rank that needs longer for its own part of a step than the others."""

    rank: int
    node_id: str
    own_s: float
    others_s: float
    """What is usual among the others."""

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"rank {self.rank} on {self.node_id} is slow: {self.own_s:.3g} s of each step are its own work, "
            f"{self.others_s:.3g} s the others'"
        )


def stragglers(view: ClusterView) -> tuple[Straggler, ...]:
    """Ranks of the current group whose own part of a step takes half as long again as is usual, in rank order."""
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
