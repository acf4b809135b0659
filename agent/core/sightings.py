"""When a leader first saw what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.core.handoff import Wish, note
from agent.core.memory import lost_data
from agent.core.model import ClusterView, Identity, Member


@dataclass(frozen=True)
class Sightings:
    """When this leader first saw what it sees, on its own monotonic clock. Lost with the leader; that only delays."""

    nodes: tuple[tuple[Identity, float], ...] = ()
    group: int = 0
    group_since: float = 0.0
    reported_since: float | None = None
    known_since: float | None = None
    """Since when a node has been telling of lost data."""
    ever: tuple[Identity, ...] = ()
    """All who were seen."""
    outage_ended_at: float | None = None
    read_at: float | None = None
    """When the last reading of everything was asked for that the view includes."""
    wish: Wish = field(default_factory=Wish)
    """For a handoff of this group."""

    def last_arrival(self, members: Sequence[Member]) -> float:
        """When the youngest of these was first seen."""
        since = dict(self.nodes)
        return max(since[member.identity] for member in members)


def observe(seen: Sightings, view: ClusterView, now: float, *, is_back: bool = False) -> Sightings:
    """Note what is new in a view; `is_back`: nothing could be seen for a while before it."""
    since = dict(seen.nodes)
    here = [node.value.member.identity for node in view.nodes]
    has_lost = lost_data(view) is not None
    number = view.group.value.number if view.group is not None else 0
    is_first = not seen.nodes
    is_new = number != seen.group or is_first
    return Sightings(
        nodes=tuple((who, since.get(who, now)) for who in here),
        known_since=(seen.known_since or now) if has_lost else None,
        ever=tuple(sorted({*seen.ever, *here})),
        read_at=seen.read_at,
        group=number,
        group_since=now if is_new else seen.group_since,
        reported_since=None if not view.reports else (None if is_new else seen.reported_since) or now,
        wish=note(Wish() if is_new else seen.wish, view, now, is_back=is_back or is_first),
    )
