"""Rank order: which nodes the next group has, and in which order.

Members of the running group keep their order, so that rank 0 stays on its node. Newcomers are appended, by their
position in the operator's list of machines if there is one, and by age. Age is the order of registration in etcd, which
is the same for all agents. The local ranks of a node are contiguous, and so are those of the nodes of a fault domain,
such as a rack, since neighbours in rank order exchange the most data. Nodes that fail repeatedly come last, so that a
spare takes their place. If only one node can read the checkpoint, it comes first, because rank 0 reads it. A newcomer
must reach the nodes that it is to train with, and have set up the script if groups are entered in place.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from agent.core.reachability import unreachable_from_outside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.model import Group, Member, Node
    from agent.core.records import Identity, Stored
    from agent.core.view import ClusterView


class RankOrder:
    """The nodes of one view that can train, in rank order. What was found once is kept.

    Args:
        view: the newest view.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._group: Group | None = view.group.value if view.group is not None else None

    @cached_property
    def able(self) -> Mapping[Identity, Stored[Node]]:
        """Nodes that can be members of the next group, oldest first."""
        view = self._view
        excluded = view.spec.value.excluded if view.spec is not None else ()
        left_out = self._group.left_out if self._group is not None else ()
        if not (excluded or left_out or view.draining or view.unfit):
            return view.present
        able = ((who, node) for who, node in view.present.items() if node.value.is_eligible and who not in left_out)
        return {who: node for who, node in able if node.value.node_id not in excluded}

    @cached_property
    def staying(self) -> tuple[Member, ...]:
        """Members of the group that can continue, with the data of their present node records."""
        able, ranks = self.able, self._group.node_ranks if self._group is not None else {}
        return tuple([able[who].value.member for who in ranks if who in able])

    @cached_property
    def new(self) -> tuple[Member, ...]:
        """Nodes that can train and are not in the group, by position in the operator's list, then by age.

        Nodes whose standby processes are being prepared come last, except in the first group of a job. There no node
        has standby processes yet, and the operator relies on the order of the list, or in which the nodes were started.
        """
        able, ranks = self.able, self._group.node_ranks if self._group is not None else {}
        found = [able[who].value for who in able if who not in ranks]
        is_first = self._group is None or self._group.reached == 0
        found.sort(key=lambda node: (node.is_warming and not is_first, node.position))
        return tuple([node.member for node in found])

    @cached_property
    def _reaching(self) -> tuple[Member, ...]:
        """Newcomers that have reached the group, and reach all of its members that stay."""
        assert self._group is not None  # noqa: S101 - the caller saw it
        number, able = self._group.number, self.able
        found = [each for each in self.new if able[each.identity].value.reachable_group == number]
        apart = unreachable_from_outside(self._view)
        if not apart:
            return tuple(found)
        staying = {each.identity for each in self.staying}
        strange = {who for pair in apart if pair & staying for who in pair - staying}
        return tuple(each for each in found if each.identity not in strange)

    @property
    def can_grow(self) -> bool:
        """Whether there are enough nodes for a larger group, within np."""
        if self._view.spec is None or self._group is None:
            return False
        spec = self._view.spec.value
        found = len(self.lineup(spec.np_max))
        return found > len(self._group.members) and (found == spec.np_max or not spec.is_fixed)

    def lineup(
        self,
        size: int,
        *,
        last: tuple[str, ...] = (),
        left_out: tuple[Identity, ...] = (),
        is_picky: bool = True,
        needs_set_up: bool = True,
    ) -> tuple[Member, ...]:
        """The first `size` of the nodes that can train.

        The node whose own disk has the checkpoint comes first.

        Args:
            size: the largest number of nodes.
            last: ids of nodes that come after the others, the worst last.
            left_out: nodes that are not taken, besides those that the current group leaves out.
            is_picky: take only newcomers that reach the members of the group.
            needs_set_up: if so, and groups are entered in place, take only newcomers that have set up.
        """
        view, new = self._view, self.new
        if is_picky and self._group is not None and self._group.members:
            new = self._reaching
            if needs_set_up and view.spec is not None and view.spec.value.in_place:
                new = tuple(each for each in new if self.able[each.identity].value.is_set_up)
        found = self.staying + new
        if left_out:
            found = tuple(each for each in found if each.identity not in left_out)
        first = view.checkpoint.value.node if view.checkpoint is not None else ""
        if first or last:
            places = {node_id: place for place, node_id in enumerate(last, start=1)}
            found = tuple(sorted(found, key=lambda m: -1 if m.node_id == first else places.get(m.node_id, 0)))
        return _by_domain(found[:size])


def _by_domain(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Put the members of each fault domain together, at the place of its first one, so that rank 0 stays."""
    places = {each.domain: place for place, each in reversed([*enumerate(members)])}
    return tuple(sorted(members, key=lambda each: places[each.domain])) if len(places) > 1 else members
