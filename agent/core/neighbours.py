"""What an agent makes of the links to its neighbours: suspicion, eviction, and its own isolation.

An agent holds links to the two members beside it in its group's ring. A killed agent's links close at once, long
before its lease ends. The neighbour writes a `suspects` record; the leader ends the lost member's lease, and then the
ordinary path follows. Nobody is evicted for being silent: that only delays a plan.

- Only the leader evicts; if the leader itself is lost, the member of the lowest rank that is not. Only while its own
  lease is surely alive: who may have been given up already decides over nobody.
- Of two that accuse each other the lower rank is believed: one link that broke must not cost two members.
- An agent that can reach neither etcd nor a neighbour, for longer than its lease, stops its own workers. Whoever is
  on the other side has gone on without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.core import events as ev
from agent.core.model import ClusterView, Group, Identity, LinkState, Member, Suspect

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


def neighbours(group: Group | None, me: Identity) -> tuple[Member, ...]:
    """The members before and after us in the ring of ranks."""
    rank = group.node_rank(me) if group is not None else None
    if group is None or rank is None:
        return ()
    size = len(group.members)
    ring = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    return tuple(group.members[each] for each in ring)


def note_link(links: Links, event: ev.LinkChanged, now: float, heartbeat_s: float) -> Links:
    """Take in the news of a link."""
    others = tuple(link for link in links if link.who != event.who)
    was_up = event.state is LinkState.UP or any(link.was_up for link in links if link.who == event.who)
    for_s = SILENT_HEARTBEATS * heartbeat_s if event.state is LinkState.SILENT else 0.0
    return (*others, LinkView(event.who, event.state, now, event.why, for_s, was_up))


def of_peers(links: Links, peers: tuple[Member, ...]) -> Links:
    """Forget links to those who are no neighbours any more."""
    identities = {peer.identity for peer in peers}
    return tuple(link for link in links if link.who in identities)


def tell_suspects(links: Links, view: ClusterView, me: Identity) -> ev.WriteSuspect | ev.ClearSuspect | None:
    """The next change that makes our `suspects` records agree with our links; None: they do."""
    told = {stored.value.identity: stored.value for stored in view.suspects if stored.value.accuser == me}
    bad = {link.who: _suspect(link, me) for link in links if link.state is not LinkState.UP}
    for who, suspect in sorted(bad.items()):
        if who not in told or told[who].is_lost != suspect.is_lost:
            return ev.WriteSuspect(suspect)
    return next((ev.ClearSuspect(suspect) for who, suspect in sorted(told.items()) if who not in bad), None)


def _suspect(link: LinkView, me: Identity) -> Suspect:
    return Suspect(
        node_id=link.who.node_id,
        incarnation=link.who.incarnation,
        by_node_id=me.node_id,
        by_incarnation=me.incarnation,
        is_lost=link.state is LinkState.LOST,
        why=link.why,
        for_s=link.for_s,
    )


def lost_members(view: ClusterView) -> tuple[Identity, ...]:
    """Members of the current group that a neighbour has lost, in rank order."""
    group = view.group.value if view.group is not None else None
    if group is None:
        return ()
    ranks = {member.identity: rank for rank, member in enumerate(group.members)}
    said = [stored.value for stored in view.suspects if stored.value.is_lost]
    said = [s for s in said if s.identity in ranks and s.accuser in ranks]
    lowest = {s.identity: min(ranks[o.accuser] for o in said if o.identity == s.identity) for s in said}
    # Who is itself accused from a lower rank is not believed.
    believed = {s.identity for s in said if lowest.get(s.accuser, len(ranks)) > ranks[s.accuser]}
    return tuple(sorted(believed, key=lambda who: ranks[who]))


def silent_members(view: ClusterView) -> frozenset[Identity]:
    """All who are suspected in any way."""
    return frozenset(stored.value.identity for stored in view.suspects)


def evict(view: ClusterView, me: Identity, *, is_leader: bool) -> ev.Evict | None:
    """The eviction that is ours to carry out, if any."""
    lost = lost_members(view)
    if not lost or me in lost or view.group is None:
        return None
    leader = view.leader
    if is_leader:
        leases = {node.value.member.identity: node.lease_id for node in view.nodes}
        return next((ev.Evict(who, leases[who]) for who in lost if leases.get(who)), None)
    if leader is None or not leader.lease_id:
        return None
    who = Identity(leader.value.node_id, leader.value.incarnation)
    living = [member.identity for member in view.group.value.members if member.identity not in lost]
    return ev.Evict(who, leader.lease_id) if who in lost and living[0] == me else None


def fence_at(links: Links, lease_until: float | None, lease_ttl_s: float) -> float | None:
    """When an agent that cannot reach etcd must stop its workers; None: it need not, by what is known."""
    down = [link.since for link in links if link.was_up and link.state is not LinkState.UP]
    if lease_until is None or not down:
        return None
    return max(lease_until, min(down) + lease_ttl_s)
