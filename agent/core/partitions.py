"""What a leader makes of members that reach etcd and not each other.

They cannot train together. If no step comes since they fell silent, or the ranks fail of it, the most who hear each
other go on, if they are enough: once a lease would have ended, for the silence of one that is lost ends with its lease.
A group that has yet to make its first step has time for that: its links may be all that is cut. So it is with ranks
that went on stepping.
"""

from __future__ import annotations

from dataclasses import replace

from agent.core.effects import Refresh
from agent.core.model import Failure, Group, Member
from agent.core.proposals import Plan, Proposals, names, required
from agent.core.reachability import deaf, doubtful, parted, together

_MEET_S = 30.0
"""So long a group may take for its first step though members do not hear each other."""
_LEASE_LATE_S = 0.6
"""etcd looks for leases that have ended twice a second, and then takes a moment to delete what they held."""


class PartitionView(Proposals):
    """Drafts, and the choice of those who can go on."""

    def is_cut(self, failure: Failure | None = None) -> bool:
        """Whether members do not hear each other, and that may be why the ranks failed like this, or make no step."""
        since = self.seen.parted_since
        if since is None or not parted(self.view):
            return False
        if failure is not None and failure.is_peer_lost:
            return True
        if any(account.stepped_s is not None for account in self.view.transitions):
            return self.seen.still_since is not None and self.seen.still_since <= since + self.policy.lease_ttl_s
        return self.now >= self._meets_until()

    def together(self, group: Group) -> tuple[Member, ...]:
        """The most who could go on and hear each other."""
        pool = self.lineup(len(self.view.nodes), is_picky=False)
        kept = {member.identity for member in group.members}
        apart = parted(self.view) | deaf(self.view)
        need = required(self.spec, group)
        return together(pool, apart, kept, need, doubtful(self.view))[: self.spec.np_max]

    def part(self, group: Group, planned: Plan) -> Plan | tuple[Member, ...]:
        """Who is to go on, of a group that says nothing of a failure; or the plan, if that is to be followed yet."""
        if not parted(self.view):
            return planned
        if not self.is_cut():
            until = self._meets_until()
            return planned if self.now >= until else replace(planned, wake_at=min(planned.wake_at or until, until))
        members = self.together(group)
        if len(members) < required(self.spec, group):
            return planned
        asked = f"{self.left_out(group, members)}; waiting whether a lease ends"
        return self.wait_for_cause(asked, self.seen.parted_since or self.now) or members

    def left_out(self, group: Group, members: tuple[Member, ...]) -> str:
        """Whom these go on without: `node-b and the others do not hear each other`. Empty: without nobody."""
        going_on = {member.identity for member in members}
        out = [member for member in group.members if member.identity not in going_on]
        return f"{names(out)} and the others do not hear each other" if out else ""

    def wait_for_cause(self, asked: str, since: float) -> Plan | None:
        """Wait until the lease of one who was lost then has surely ended, and then look."""
        since = max(since, self.seen.outage_ended_at or 0.0)  # etcd renews all leases as it starts
        until = since + self.policy.lease_ttl_s + _LEASE_LATE_S
        if self.now < until:
            return Plan(None, asked, until)
        is_known = self.seen.read_at is not None and self.seen.read_at >= until
        return None if is_known else Plan(Refresh(), asked)

    def _meets_until(self) -> float:
        return max(self.seen.parted_since or self.now, self.seen.group_since) + _MEET_S
