"""Neighbours: what an agent decides from the links to them. Suspicion, eviction, and its own isolation.

An agent holds links to the two members beside it in the ring of its group, which is in rank order, or such that nodes
of one fault domain are not beside each other. If an agent is killed, its links close at once, long before its lease
ends. Its neighbour writes a `suspects` record, and the leader revokes the lease of the lost member; then the group is
replaced as after any lost lease. A silent member is never evicted: silence only delays a plan.

Members that reach etcd but not each other cannot train together (`reachability.py`). A node outside the group holds
links to the members between which it would be placed, and to members that it could not reach since it was a member
itself. It is admitted once it reaches all of them.

- Only the leader evicts; or, if the leader itself is lost, the member with the lowest rank that is not lost. It evicts
  only while its own lease is certainly valid, because otherwise it may have been removed itself.
- If two members accuse each other, the lower rank is believed: one broken link must not cost two members.
- An agent that reaches neither etcd nor one of its neighbours for longer than its lease stops its own workers, because
  the others have continued without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import Group, LinkState, Member, Suspicion
from agent.core.reachability import among_members, is_examined
from agent.core.records import Identity
from agent.core.ring import ring
from agent.core.view import ClusterView

SILENT_HEARTBEATS = 3
"""Heartbeats without an answer before a neighbour counts as silent."""


@dataclass(frozen=True)
class LinkView:
    """The state of the link to one neighbour."""

    who: Identity
    state: LinkState
    since: float
    """When it got into this state."""
    why: str
    for_s: float
    """About how long the neighbour had not answered by then."""
    was_up: bool
    """The link has worked before, so its silence is meaningful. Otherwise a firewall may be the only reason."""


Links = tuple[LinkView, ...]


def neighbours(group: Group, me: Identity) -> tuple[Member, ...]:
    """The members before and after this node in the ring. Empty if the node is no member."""
    mine, size = group.ring_place(me), len(group.members)
    beside = {(mine - 1) % size, (mine + 1) % size} - {mine} if mine is not None else set()
    return tuple(group.ring[place] for place in sorted(beside))


def next_member(group: Group, me: Identity) -> Member | None:
    """The member after this node in the ring, which also holds its large parts. None: there is no other."""
    mine, size = group.ring_place(me), len(group.members)
    return None if mine is None or size == 1 else group.ring[(mine + 1) % size]


def peers(group: Group | None, me: Identity, links: Links, view: ClusterView | None) -> tuple[Member, ...]:
    """The members to hold links to.

    A member holds links to its neighbours. A node outside holds links to the members beside which it would be placed,
    and to members whose links are silent. While reachability is examined: all other members.
    """
    if group is None or not group.members:
        return ()
    if is_examined(group, view):
        return tuple(member for member in group.members if member.identity != me)
    if group.node_rank(me) is not None:
        return neighbours(group, me)
    silent = {link.who for link in links if link.state is LinkState.SILENT}
    own = view.present.get(me) if view is not None else None
    beside = {group.members[0].node_id, group.members[-1].node_id}
    if own is not None:
        places = ring((*group.members, own.value.member))
        at = places.index(own.value.member)
        beside = {places[at - 1].node_id, places[(at + 1) % len(places)].node_id}
    return tuple(
        member for member in group.members if member.node_id in beside or (silent and member.identity in silent)
    )


def note_link(links: Links, event: ev.LinkChanged, now: float, heartbeat_s: float) -> Links:
    """Apply a link event. An event that does not change the state of the link is ignored, so `since` and `why` stay."""
    if any(link.who == event.who and link.state is event.state for link in links):
        return links
    others = tuple(link for link in links if link.who != event.who)
    was_up = event.state is LinkState.UP or any(link.was_up for link in links if link.who == event.who)
    for_s = SILENT_HEARTBEATS * heartbeat_s if event.state is LinkState.SILENT else 0.0
    return (*others, LinkView(event.who, event.state, now, event.why, for_s, was_up))


def of_peers(links: Links, peers: tuple[Member, ...]) -> Links:
    """Keep only the links to these peers."""
    identities = {peer.identity for peer in peers}
    return tuple(link for link in links if link.who in identities)


def are_all_up(links: Links, peers: tuple[Member, ...]) -> bool:
    """Whether there are peers, and the links to all of them are up."""
    return bool(peers) and len(links) == len(peers) and all(link.state is LinkState.UP for link in links)


def is_anyone_silent(links: Links) -> bool:
    """Whether a neighbour is silent that answered before."""
    return any(link.was_up and link.state is LinkState.SILENT for link in links)


def report_suspicions(
    links: Links, view: ClusterView, me: Identity, *, has_had_link: bool
) -> fx.WriteSuspicion | fx.ClearSuspicion | None:
    """Return the next change to make this node's `suspects` records agree with its links. None: they agree."""
    reported = {stored.value.identity: stored.value for stored in view.suspects if stored.value.accuser == me}
    bad = {link.who: _suspect(link, me, has_had_link=has_had_link) for link in links if link.state is not LinkState.UP}
    for who, suspect in sorted(bad.items()):
        if who not in reported or reported[who].is_lost != suspect.is_lost:
            return fx.WriteSuspicion(suspect)
    return next((fx.ClearSuspicion(suspect) for who, suspect in sorted(reported.items()) if who not in bad), None)


def _suspect(link: LinkView, me: Identity, *, has_had_link: bool) -> Suspicion:
    return Suspicion(
        node_id=link.who.node_id,
        incarnation=link.who.incarnation,
        by_node_id=me.node_id,
        by_incarnation=me.incarnation,
        is_lost=link.state is LinkState.LOST,
        has_had_link=has_had_link,
        why=link.why,
        for_s=link.for_s,
    )


def lost_members(view: ClusterView) -> tuple[Identity, ...]:
    """Members of the current group whose neighbour reports them as lost, in rank order."""
    reports = [each for each in among_members(view) if each.is_lost]
    if view.group is None or not reports:
        return ()
    ranks = view.group.value.node_ranks
    lowest = {s.identity: min(ranks[o.accuser] for o in reports if o.identity == s.identity) for s in reports}
    # A member that a lower rank accuses is not believed.
    believed = {s.identity for s in reports if lowest.get(s.accuser, len(ranks)) > ranks[s.accuser]}
    return tuple(sorted(believed, key=lambda who: ranks[who]))


def silent_members(view: ClusterView) -> frozenset[Identity]:
    """Members that another member reports as lost or silent."""
    return frozenset(each.identity for each in among_members(view))


def evict(view: ClusterView, me: Identity, *, is_leader: bool) -> fx.Evict | None:
    """Return the eviction that this agent must carry out. None: there is none."""
    lost = lost_members(view)
    if not lost or me in lost or view.group is None:
        return None
    leader = view.leader
    if is_leader:
        there = (view.present[who] for who in lost if who in view.present)
        return next((fx.Evict(node.value.identity, node.lease_id) for node in there if node.lease_id), None)
    if leader is None or not leader.lease_id:
        return None
    who = leader.value.identity
    living = [member.identity for member in view.group.value.members if member.identity not in lost]
    return fx.Evict(who, leader.lease_id) if who in lost and living[0] == me else None


def isolate_at(links: Links, lease_until: float | None, lease_ttl_s: float) -> float | None:
    """When an agent that cannot reach etcd must stop its workers. None: it need not."""
    down = [link.since for link in links if link.was_up and link.state is not LinkState.UP]
    if lease_until is None or not down:
        return None
    return max(lease_until, min(down) + lease_ttl_s)
