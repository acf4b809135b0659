"""Who hears whom, and which nodes can therefore train together.

Members of a group hold links to their neighbours in the ring of ranks. While one of these is silent, all members of a
group of moderate size hold links to all others, and so do the nodes outside: by the time a lease would have ended each
has said whom it does not hear (`neighbours.peers`).

Two members do not hear each other if both say so, and a link of one of the two has ever worked: else a firewall may be
all that is wrong. A node outside does not hear a member if it says so: no member listens to it.

A node that hears nobody, not even etcd, may get one accusation there, and waits for the answer before the next. It then
looks like the member that it accuses; but the others do not hear it either, and hear that one. So where as many could
go on with the one as with the other, what one of two alone says is weighed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from agent.core.model import ClusterView, Group, Identity, Member, Suspicion

EXAMINED = 32
"""Up to so many members, each holds links to all others while that tells something."""

Pairs = frozenset[frozenset[Identity]]


def among_members(view: ClusterView) -> list[Suspicion]:
    """What members of the current group say of each other."""
    group = view.group.value if view.group is not None else None
    here = {member.identity for member in group.members} if group is not None else set()
    said = (stored.value for stored in view.suspects)
    return [each for each in said if each.identity in here and each.accuser in here]


def is_examined(group: Group, view: ClusterView | None) -> bool:
    """Whether all are to find out whom they hear."""
    if view is None or len(group.members) > EXAMINED:
        return False
    return any(not each.is_lost for each in among_members(view))


def parted(view: ClusterView) -> Pairs:
    """Members of the current group that do not hear each other."""
    silent = [each for each in among_members(view) if not each.is_lost]
    said = {(each.accuser, each.identity): each.has_heard for each in silent}
    mutual = (pair for pair in said if pair[::-1] in said and (said[pair] or said[pair[::-1]]))
    return frozenset(frozenset(pair) for pair in mutual)


def doubtful(view: ClusterView) -> Pairs:
    """Members of the current group of whom one at least does not hear the other."""
    silent = (each for each in among_members(view) if not each.is_lost)
    return frozenset(frozenset((each.accuser, each.identity)) for each in silent)


def deaf(view: ClusterView) -> Pairs:
    """Members of the current group, each with a node outside that does not hear it."""
    group = view.group.value if view.group is not None else None
    here = {member.identity for member in group.members} if group is not None else set()
    said = (stored.value for stored in view.suspects)
    outside = (each for each in said if each.identity in here and each.accuser not in here and not each.is_lost)
    return frozenset(frozenset((each.accuser, each.identity)) for each in outside)


def together(
    pool: Sequence[Member], apart: Pairs, kept: AbstractSet[Identity], need: int, doubts: Pairs
) -> tuple[Member, ...]:
    """The nodes of a pool that are to go on, of which none is apart from another: in the order of the pool.

    As many as are needed, if that can be; then as many as possible of those to be kept; then as many as possible; then
    those with the fewest doubtful pairs; then the first. Found by beginning with each node in turn and taking all
    others that can be taken: that is exact where hearing is passed on, as it is in a network that has fallen into
    pieces.
    """
    strange: dict[Identity, set[Identity]] = {member.identity: set() for member in pool}
    for pair in apart:
        for who in pair & strange.keys():
            strange[who] |= pair - {who}
    tries = [_around(first.identity, strange) for first in pool]
    tries.sort(key=lambda found: sum(pair <= found for pair in doubts))
    best = max(tries, key=lambda found: (min(len(found), need), len(found & kept), len(found)), default=set())
    return tuple(member for member in pool if member.identity in best)


def _around(first: Identity, strange: dict[Identity, set[Identity]]) -> set[Identity]:
    found = {first}
    for who, others in strange.items():
        if found.isdisjoint(others):
            found.add(who)
    return found
