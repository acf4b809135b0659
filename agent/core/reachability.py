"""Reachability: which members reach each other, and which nodes can therefore train together.

Members of a group hold links to their neighbours in the ring of ranks. While one of these links is silent, all members
hold links to all others, if the group has at most `EXAMINED` members, and so do the nodes outside the group. Before a
lease would have ended, each node has reported which members it does not reach (`neighbours.peers`).

Two members count as partitioned if both report the other as silent, and a link of one of the two has ever worked.
Otherwise a firewall may be the only reason. A node outside does not reach a member if it reports so: its report alone
counts, because members hold no links to nodes outside.

A node that receives nothing, not even from etcd, may still reach etcd with an accusation of one member. It waits for
the answer before it accuses another. By the accusations of these two alone, either could be the one that is cut off.
But the other members do not reach the accuser either, while they reach the accused. So if equally many members could
continue without the accused as without the accuser, reports of one side alone are counted, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core.records import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from agent.core.model import Group, Member, Suspicion
    from agent.core.view import ClusterView

EXAMINED = 32
"""Largest group in which each member holds links to all others while a member is silent."""

Pairs = frozenset[frozenset[Identity]]


def among_members(view: ClusterView) -> list[Suspicion]:
    """The suspicions of members of the current group against each other."""
    return [each for each in _of_members(view) if _is_by_member(each, view)]


def is_examined(group: Group, view: ClusterView | None) -> bool:
    """Whether all members are to hold links to all others, to find out which of them they reach."""
    if view is None or len(group.members) > EXAMINED:
        return False
    return any(not each.is_lost for each in among_members(view))


def partitioned(view: ClusterView) -> Pairs:
    """Pairs of members of the current group that do not reach each other."""
    silent = [each for each in among_members(view) if not each.is_lost]
    reported = {(each.accuser, each.identity): each.has_had_link for each in silent}
    mutual = (pair for pair in reported if pair[::-1] in reported and (reported[pair] or reported[pair[::-1]]))
    return frozenset(frozenset(pair) for pair in mutual)


def reported_silent(view: ClusterView) -> Pairs:
    """Pairs of members of the current group of which at least one reports the other as silent."""
    silent = (each for each in among_members(view) if not each.is_lost)
    return frozenset(frozenset((each.accuser, each.identity)) for each in silent)


def unreachable_from_outside(view: ClusterView) -> Pairs:
    """Pairs of a member of the current group and a node outside that does not reach it."""
    outside = (each for each in _of_members(view) if not each.is_lost and not _is_by_member(each, view))
    return frozenset(frozenset((each.accuser, each.identity)) for each in outside)


def _of_members(view: ClusterView) -> list[Suspicion]:
    """The suspicions of members of the current group, whoever reports them."""
    if view.group is None:
        return []
    group = view.group.value
    return [stored.value for stored in view.suspects if group.node_rank(stored.value.identity) is not None]


def _is_by_member(suspicion: Suspicion, view: ClusterView) -> bool:
    return view.group is not None and view.group.value.node_rank(suspicion.accuser) is not None


def choose_connected(
    pool: Sequence[Member], apart: Pairs, kept: AbstractSet[Identity], need: int, doubts: Pairs
) -> tuple[Member, ...]:
    """Choose nodes of the pool that all reach each other.

    For each node of the pool, a set is built that begins with this node and takes every further node that reaches all
    nodes of the set. The best of these sets is chosen. That is exact if reachability is transitive, as in a network
    that has fallen apart.

    Args:
        pool: the nodes to choose from. Their order is kept, and decides if all else is equal.
        apart: pairs that do not reach each other, of which at most one node is taken.
        kept: nodes that are preferred: members of the current group.
        need: how many nodes are needed.
        doubts: pairs of which at least one node reports the other as silent.

    Returns:
        A set of at least `need` nodes, or else the largest one. Of several such sets that with the most nodes of
        `kept`, then with the most nodes, then with the fewest pairs of `doubts`.
    """
    strange: dict[Identity, set[Identity]] = {member.identity: set() for member in pool}
    for pair in apart:
        for who in pair & strange.keys():
            strange[who] |= pair - {who}
    # All sets that begin with a node that reaches every other one are the same.
    some = next((member.identity for member in pool if not strange[member.identity]), None)
    tries = [_around(who, strange) for who in strange if strange[who] or who == some]
    tries.sort(key=lambda found: sum(pair <= found for pair in doubts))
    best = max(tries, key=lambda found: (min(len(found), need), len(found & kept), len(found)), default=set())
    return tuple(member for member in pool if member.identity in best)


def _around(first: Identity, strange: dict[Identity, set[Identity]]) -> set[Identity]:
    found = {first}
    for who, others in strange.items():
        if found.isdisjoint(others):
            found.add(who)
    return found
