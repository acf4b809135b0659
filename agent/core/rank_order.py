"""Rank order: which nodes the next group has, and in which order.

Members of the running group keep their order, so that rank 0 stays on its node. Newcomers are appended, by their
position in the operator's list of machines if there is one, and by age. Age is the order of registration in etcd, which
is the same for all agents. The local ranks of a node are contiguous. Nodes that fail repeatedly come last, so that a
spare takes their place. If only one node can read the checkpoint, it comes first, because rank 0 reads it. A newcomer
must reach the nodes that it is to train with, and have set up the script if groups are entered in place.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.core.model import ClusterView, Group, Identity, Member, Node
from agent.core.reachability import unreachable_from_outside


def eligible(view: ClusterView) -> tuple[Member, ...]:
    """Nodes that can be members of the next group, oldest first."""
    return tuple(node.member for node in _eligible_nodes(view))


def _eligible_nodes(view: ClusterView) -> Iterator[Node]:
    excluded = view.spec.value.excluded if view.spec is not None else ()
    left_out = view.group.value.left_out if view.group is not None else ()
    able = (node.value for node in view.nodes if node.value.is_eligible and node.value.identity not in left_out)
    return (node for node in able if node.node_id not in excluded)


def survivors(group: Group | None, view: ClusterView) -> tuple[Member, ...]:
    """Members of the group that can continue, in rank order, with the data of their present node records."""
    if group is None:
        return ()
    able = {member.identity: member for member in eligible(view)}
    return tuple(able[m.identity] for m in group.members if m.identity in able)


def newcomers(group: Group | None, view: ClusterView) -> tuple[Member, ...]:
    """Nodes that can train and are not in the group, by position in the operator's list, then by age.

    Nodes whose standby processes are being prepared come last, except in the first group of a job. There no node has
    standby processes yet, and the operator relies on the order of the list, or in which the nodes were started.
    """
    taken = {member.identity for member in group.members} if group is not None else set()
    found = (node for node in _eligible_nodes(view) if not taken or node.identity not in taken)
    is_first = group is None or group.reached == 0
    order = sorted(found, key=lambda node: (node.is_warming and not is_first, node.position))
    return tuple(node.member for node in order)


def warming(view: ClusterView) -> set[Identity]:
    """Nodes whose standby processes are still being prepared."""
    return {node.value.identity for node in view.nodes if node.value.is_warming}


def can_grow(view: ClusterView) -> bool:
    """Whether there are enough nodes for a larger group, within np."""
    if view.spec is None or view.group is None:
        return False
    spec, group = view.spec.value, view.group.value
    found = len(lineup(group, view, spec.np_max))
    return found > len(group.members) and (found == spec.np_max or not spec.is_fixed)


def lineup(
    group: Group | None,
    view: ClusterView,
    size: int,
    *,
    last: tuple[str, ...] = (),
    left_out: tuple[Identity, ...] = (),
    is_picky: bool = True,
    needs_set_up: bool = True,
) -> tuple[Member, ...]:
    """The first `size` of the nodes that can train, in rank order.

    The node whose own disk has the checkpoint comes first.

    Args:
        group: the current group. Nodes that it leaves out are not taken.
        view: the newest view.
        size: the largest number of nodes.
        last: ids of nodes that come after the others, the worst last.
        left_out: further nodes that are not taken.
        is_picky: take only newcomers that reach the members of the group.
        needs_set_up: if so, and groups are entered in place, take only newcomers that have set up.
    """
    first = view.checkpoint.value.node if view.checkpoint is not None else ""
    places = {node_id: place for place, node_id in enumerate(last, start=1)}
    staying, new = survivors(group, view), newcomers(group, view)
    if is_picky and group is not None and group.members:
        in_place = view.spec is not None and view.spec.value.in_place
        new = _that_reach(group, staying, new, view, needs_set_up=needs_set_up and in_place)
    able = [member for member in staying + new if member.identity not in left_out]
    return tuple(sorted(able, key=lambda m: -1 if m.node_id == first else places.get(m.node_id, 0)))[:size]


def _that_reach(
    group: Group, staying: tuple[Member, ...], new: tuple[Member, ...], view: ClusterView, *, needs_set_up: bool
) -> tuple[Member, ...]:
    """Newcomers that have reached the group, and reach all of its members that stay; and have set up if need be."""
    reaching = {
        node.value.identity
        for node in view.nodes
        if node.value.reachable_group == group.number and (node.value.is_set_up or not needs_set_up)
    }
    apart = unreachable_from_outside(view)
    return tuple(
        member
        for member in new
        if member.identity in reaching
        and not any(frozenset((member.identity, each.identity)) in apart for each in staying)
    )
