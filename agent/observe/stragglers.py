"""Stragglers: ranks that the others wait for in each step, although nothing has failed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from agent.core.view import ClusterView

_SLOWER = 1.5
"""How many times the usual time of the others a straggler needs, at least."""
_AT_LEAST_S = 0.005
"""How much longer than the others a straggler needs, at least."""
_SAME_PACE = 1.25
"""The ranks of a group take the same time for a step. Whose last report differs more from the usual one is left out:
the pace has changed since, and some nodes report that later than others."""


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
    """Ranks of the current group whose own part of a step takes half again as long as usual, in rank order.

    None before all have made a step in this group: until then their times are those of an earlier one.
    """
    group = view.group.value if view.group is not None else None
    if group is None or not group.node_ranks.keys() <= view.started:
        return ()
    nodes = view.present
    usual_s = median_low(sorted(each.value.step_s for each in nodes.values() if each.value.own_s) or (0.0,))
    own: dict[int, tuple[str, float]] = {}
    for who, node_rank in group.node_ranks.items():
        node = nodes.get(who)
        if node is None or not usual_s / _SAME_PACE <= node.value.step_s <= usual_s * _SAME_PACE:
            continue
        for local_rank, own_s in enumerate(node.value.own_s):
            if own_s > 0.0:
                own[group.first_rank(node_rank) + local_rank] = who.node_id, own_s
    ordered = sorted(own_s for _, own_s in own.values())
    found = []
    for rank, (node_id, own_s) in own.items() if len(own) > 1 else ():
        others_s = _median_of_others(ordered, own_s)
        if own_s > _SLOWER * others_s and own_s > others_s + _AT_LEAST_S:
            found.append(Straggler(rank, node_id, own_s, others_s))
    return tuple(found)


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of sorted values, of which there are at least two, without one that is equal to `own`."""
    left_out, middle = bisect_left(ordered, own), (len(ordered) - 1) // 2

    def other(place: int) -> float:
        return ordered[place + (place >= left_out)]

    return other(middle) if len(ordered) % 2 == 0 else (other(middle - 1) + other(middle)) / 2
