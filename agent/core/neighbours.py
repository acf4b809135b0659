"""What an agent makes of the links to its neighbours: suspicion, eviction, and its own isolation.

An agent holds links to the two members beside it in its group's ring. A killed agent's links close at once, long
before its lease ends. The neighbour writes a `suspects` record; the leader ends the lost member's lease, and then the
ordinary path follows. Nobody is evicted for being silent: that only delays a plan.

Members that reach etcd and not each other cannot train together (`reachability.py`). A node that is no member holds
links to those whom it would be put between, and to members that it has not heard since it was one: it is let in once it
hears them.

- Only the leader evicts; if the leader itself is lost, the member of the lowest rank that is not. Only while its own
  lease is surely alive: who may have been given up already decides over nobody.
- Of two that accuse each other the lower rank is believed: one link that broke must not cost two members.
- An agent that can reach neither etcd nor a neighbour, for longer than its lease, stops its own workers. Whoever is
  on the other side has gone on without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import ClusterView, Group, Identity, LinkState, Member, Suspicion
from agent.core.reachability import among_members, is_examined

SILENT_HEARTBEATS = 3
"""So many get no answer before a neighbour is called silent."""


@dataclass(frozen=True)
class LinkView:
    """The link to one neighbour, and since when it is as it is."""

    who: Identity
    state: LinkState
    since: float
    why: str
    for_s: float
    """How long it had not been heard then, about."""
    was_up: bool
    """It worked once, so that its silence says something. Else a firewall may be all that is wrong."""


Links = tuple[LinkView, ...]


def neighbours(group: Group, me: Identity) -> tuple[Member, ...]:
    """The members before and after us in the ring of ranks; none, if we are no member."""
    size = len(group.members)
    mine = {rank for rank, member in enumerate(group.members) if member.identity == me}
    ring = {(rank + step) % size for rank in mine for step in (-1, 1)}
    return tuple(group.members[rank] for rank in sorted(ring - mine))


def peers(group: Group | None, me: Identity, links: Links, view: ClusterView | None) -> tuple[Member, ...]:
    """Whom to hold links to: our neighbours, as we are or would be, and, from outside, the members we do not hear.

    While it matters who hears whom: all members.
    """
    if group is None or not group.members:
        return ()
    if is_examined(group, view):
        return tuple(member for member in group.members if member.identity != me)
    if group.node_rank(me) is not None:
        return neighbours(group, me)
    silent = {link.who for link in links if link.state is LinkState.SILENT}
    ends = {group.members[0].identity, group.members[-1].identity}
    return tuple(member for member in group.members if member.identity in silent | ends)


def note_link(links: Links, event: ev.LinkChanged, now: float, heartbeat_s: float) -> Links:
    """Take in the news of a link. It may be told again of one that is as it was: since when, and why, stays."""
    if any(link.who == event.who and link.state is event.state for link in links):
        return links
    others = tuple(link for link in links if link.who != event.who)
    was_up = event.state is LinkState.UP or any(link.was_up for link in links if link.who == event.who)
    for_s = SILENT_HEARTBEATS * heartbeat_s if event.state is LinkState.SILENT else 0.0
    return (*others, LinkView(event.who, event.state, now, event.why, for_s, was_up))


def of_peers(links: Links, peers: tuple[Member, ...]) -> Links:
    """Forget links to all others."""
    identities = {peer.identity for peer in peers}
    return tuple(link for link in links if link.who in identities)


def are_all_up(links: Links, peers: tuple[Member, ...]) -> bool:
    """Whether we hear all of some members, of whom there are any."""
    return bool(peers) and len(links) == len(peers) and all(link.state is LinkState.UP for link in links)


def is_anyone_silent(links: Links) -> bool:
    """Whether one does not answer that did."""
    return any(link.was_up and link.state is LinkState.SILENT for link in links)


def tell_suspects(
    links: Links, view: ClusterView, me: Identity, *, has_heard: bool
) -> fx.WriteSuspicion | fx.ClearSuspicion | None:
    """The next change that makes our `suspects` records agree with our links; None: they do."""
    told = {stored.value.identity: stored.value for stored in view.suspects if stored.value.accuser == me}
    bad = {link.who: _suspect(link, me, has_heard=has_heard) for link in links if link.state is not LinkState.UP}
    for who, suspect in sorted(bad.items()):
        if who not in told or told[who].is_lost != suspect.is_lost:
            return fx.WriteSuspicion(suspect)
    return next((fx.ClearSuspicion(suspect) for who, suspect in sorted(told.items()) if who not in bad), None)


def _suspect(link: LinkView, me: Identity, *, has_heard: bool) -> Suspicion:
    return Suspicion(
        node_id=link.who.node_id,
        incarnation=link.who.incarnation,
        by_node_id=me.node_id,
        by_incarnation=me.incarnation,
        is_lost=link.state is LinkState.LOST,
        has_heard=has_heard,
        why=link.why,
        for_s=link.for_s,
    )


def lost_members(view: ClusterView) -> tuple[Identity, ...]:
    """Members of the current group that a neighbour has lost, in rank order."""
    ranks = _ranks(view)
    said = [each for each in among_members(view) if each.is_lost]
    lowest = {s.identity: min(ranks[o.accuser] for o in said if o.identity == s.identity) for s in said}
    # Who is itself accused from a lower rank is not believed.
    believed = {s.identity for s in said if lowest.get(s.accuser, len(ranks)) > ranks[s.accuser]}
    return tuple(sorted(believed, key=lambda who: ranks[who]))


def silent_members(view: ClusterView) -> frozenset[Identity]:
    """Members that another one suspects in any way."""
    return frozenset(each.identity for each in among_members(view))


def _ranks(view: ClusterView) -> dict[Identity, int]:
    """Of the current group's nodes."""
    members = view.group.value.members if view.group is not None else ()
    return {member.identity: rank for rank, member in enumerate(members)}


def evict(view: ClusterView, me: Identity, *, is_leader: bool) -> fx.Evict | None:
    """The eviction that is ours to carry out, if any."""
    lost = lost_members(view)
    if not lost or me in lost or view.group is None:
        return None
    leader = view.leader
    if is_leader:
        leases = {node.value.member.identity: node.lease_id for node in view.nodes}
        return next((fx.Evict(who, leases[who]) for who in lost if leases.get(who)), None)
    if leader is None or not leader.lease_id:
        return None
    who = leader.value.identity
    living = [member.identity for member in view.group.value.members if member.identity not in lost]
    return fx.Evict(who, leader.lease_id) if who in lost and living[0] == me else None


def fence_at(links: Links, lease_until: float | None, lease_ttl_s: float) -> float | None:
    """When an agent that cannot reach etcd must stop its workers; None: it need not, by what is known."""
    down = [link.since for link in links if link.was_up and link.state is not LinkState.UP]
    if lease_until is None or not down:
        return None
    return max(lease_until, min(down) + lease_ttl_s)
