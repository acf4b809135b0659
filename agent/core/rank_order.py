"""Who keeps which rank.

Members of the running group keep their order, so that rank 0 stays where it is. Those who come later are appended, by
their places in the operator's list of machines where there is one, and by age. Age is the place in etcd's history, one
order that all agents see alike. A node's local ranks are contiguous, in the group's order. Nodes that fail again and
again come last, so that a spare takes their place; a node that alone can read the checkpoint has rank 0, which reads
it. A newcomer must hear those whom it is to train with.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.core.model import ClusterView, Group, Identity, Member, Node
from agent.core.reachability import deaf


def eligible(view: ClusterView) -> tuple[Member, ...]:
    """Nodes that a next group can have, oldest first."""
    return tuple(node.member for node in _eligible_nodes(view))


def _eligible_nodes(view: ClusterView) -> Iterator[Node]:
    excluded = view.spec.value.excluded if view.spec is not None else ()
    left_out = view.group.value.left_out if view.group is not None else ()
    able = (node.value for node in view.nodes if node.value.is_eligible and node.value.identity not in left_out)
    return (node for node in able if node.node_id not in excluded)


def survivors(group: Group | None, view: ClusterView) -> tuple[Member, ...]:
    """Members of the group that can go on, in rank order, as they describe themselves now."""
    if group is None:
        return ()
    able = {member.identity: member for member in eligible(view)}
    return tuple(able[m.identity] for m in group.members if m.identity in able)


def newcomers(group: Group | None, view: ClusterView) -> tuple[Member, ...]:
    """Nodes that can train and that the group does not have, by the operator's list, and age.

    Those that are still warming up come last, but not in a job's first group: there all begin cold, and whoever lists
    machines, or starts them one by one, counts on that order.
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
    """Whether nodes are there for a larger group than the current one, as np asks."""
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
) -> tuple[Member, ...]:
    """The first `size` of all who could train, in the order of their ranks.

    Node ids in `last` come after the others, the worst last; and before all the node whose own disk has the checkpoint.
    Those in `left_out`, and those that the group leaves out, do not come at all. Newcomers are taken once they hear the
    group; if it is not picky, at once.
    """
    first = view.checkpoint.value.node if view.checkpoint is not None else ""
    places = {node_id: place for place, node_id in enumerate(last, start=1)}
    staying, new = survivors(group, view), newcomers(group, view)
    if is_picky and group is not None and group.members:
        new = _who_hear(group, staying, new, view)
    able = [member for member in staying + new if member.identity not in left_out]
    return tuple(sorted(able, key=lambda m: -1 if m.node_id == first else places.get(m.node_id, 0)))[:size]


def _who_hear(
    group: Group, staying: tuple[Member, ...], new: tuple[Member, ...], view: ClusterView
) -> tuple[Member, ...]:
    """Newcomers that heard the group, and now hear all of it who stay."""
    heard = {node.value.identity for node in view.nodes if node.value.heard == group.number}
    apart = deaf(view)
    return tuple(
        member
        for member in new
        if member.identity in heard
        and not any(frozenset((member.identity, each.identity)) in apart for each in staying)
    )
