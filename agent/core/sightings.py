"""When a leader first saw what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.core.handoff import Wish, note
from agent.core.memory import lost_data
from agent.core.model import ClusterView, Identity, Member
from agent.core.stalls import is_due


@dataclass(frozen=True)
class Sightings:
    """When this leader first saw what it sees, on its own monotonic clock. Lost with the leader; that only delays."""

    nodes: tuple[tuple[Identity, float], ...] = ()
    group: int = 0
    group_since: float = 0.0
    reported_since: float | None = None
    stalled_since: float | None = None
    """Since when the group has stood still for too long."""
    broken_since: float | None = None
    """Since when something is wrong with the group: a failure, a lost member, or that."""
    silent_since: tuple[tuple[Identity, float], ...] = ()
    """Since when a suspected member has not been heard."""
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

    @property
    def silent_s(self) -> float:
        """How long a member had not been heard when something was first seen to be wrong."""
        if self.broken_since is None:
            return 0.0
        return max((self.broken_since - since for _, since in self.silent_since), default=0.0)


def observe(seen: Sightings, view: ClusterView, now: float, *, is_back: bool = False) -> Sightings:
    """Note what is new in a view; `is_back`: nothing could be seen for a while before it."""
    since = dict(seen.nodes)
    here = [node.value.member.identity for node in view.nodes]
    has_lost = lost_data(view) is not None
    number = view.group.value.number if view.group is not None else 0
    is_first = not seen.nodes
    is_new = number != seen.group or is_first
    silent = dict(seen.silent_since)
    suspects = [suspect.value for suspect in view.suspects]
    return Sightings(
        nodes=tuple((who, since.get(who, now)) for who in here),
        known_since=(seen.known_since or now) if has_lost else None,
        ever=tuple(sorted({*seen.ever, *here})),
        read_at=seen.read_at,
        group=number,
        group_since=now if is_new else seen.group_since,
        reported_since=None if not view.reports else (None if is_new else seen.reported_since) or now,
        stalled_since=_since(None if is_new else seen.stalled_since, now, holds=is_due(view.stalls)),
        broken_since=_since(None if is_new else seen.broken_since, now, holds=_is_broken(view)),
        silent_since=tuple((each.identity, silent.get(each.identity, now - each.for_s)) for each in suspects),
        wish=note(Wish() if is_new else seen.wish, view, now, is_back=is_back or is_first),
    )


def _since(before: float | None, now: float, *, holds: bool) -> float | None:
    """Since when something holds."""
    if not holds:
        return None
    return now if before is None else before


def _is_broken(view: ClusterView) -> bool:
    """Whether the current group cannot go on as it is."""
    if view.group is None:
        return False
    here = {node.value.member.identity for node in view.nodes if not node.value.unfit}
    reported = {report.identity for report in view.reports}
    is_lost = any(member.identity not in here | reported for member in view.group.value.members)
    return is_lost or any(report.failure is not None for report in view.reports) or is_due(view.stalls)
