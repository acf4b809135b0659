"""Partitions: what a leader decides about members that reach etcd but not each other.

Such members cannot train together. If the group has made no step since they fell silent, or if its ranks fail because
of broken connections, the largest set of members that reach each other continues, if it is large enough. The leader
waits for one lease length first, because a lost member is silent too, until its lease ends.

A group that has not made its first step gets `_FIRST_STEP_WITHIN_S` for it, because perhaps only the links between the
agents are broken. The same is true of a group whose ranks continue to make steps.
"""

from __future__ import annotations

from dataclasses import replace

from agent.core.effects import Refresh
from agent.core.failures import Failure
from agent.core.model import Group, Member
from agent.core.proposals import Plan, Proposals, node_ids, required
from agent.core.reachability import choose_connected, partitioned, reported_silent, unreachable_from_outside
from agent.core.reasons import NodesUnreachable, Waiting

_FIRST_STEP_WITHIN_S = 30.0
"""Time for the first step of a group whose members do not reach each other."""
_LEASE_LATE_S = 0.6
"""etcd looks for ended leases twice a second, and then needs a moment to delete their keys."""


class PartitionView(Proposals):
    """Proposals, and the choice of the members that continue after a partition."""

    def is_partition_cause(self, failure: Failure | None = None) -> bool:
        """Whether there is a partition that may be the cause of this failure, or, without one, of a lack of steps."""
        since = self.seen.partitioned_since
        if since is None or not partitioned(self.view):
            return False
        if failure is not None and failure.is_peer_lost:
            return True
        if any(each.stepped_s is not None for each in self.view.transitions):
            return self.seen.still_since is not None and self.seen.still_since <= since + self.policy.lease_ttl_s
        return self.now >= self._first_step_until()

    def connected_members(self, group: Group) -> tuple[Member, ...]:
        """The largest set of nodes that could continue and reach each other."""
        pool = self.lineup(len(self.view.nodes), is_picky=False)
        kept = {member.identity for member in group.members}
        apart = partitioned(self.view) | unreachable_from_outside(self.view)
        need = required(self.spec, group)
        return choose_connected(pool, apart, kept, need, reported_silent(self.view))[: self.spec.np_max]

    def resolve(self, group: Group, planned: Plan) -> Plan | tuple[Member, ...]:
        """Decide for a group without failures.

        Returns:
            The members that continue without the others; or a plan, if it is too early for that or there is no need.
        """
        if not partitioned(self.view):
            return planned
        if not self.is_partition_cause():
            until = self._first_step_until()
            return planned if self.now >= until else replace(planned, wake_at=min(planned.wake_at or until, until))
        members = self.connected_members(group)
        if len(members) < required(self.spec, group):
            return planned
        asked = Waiting(what="lease", because=self.without(group, members))
        return self.wait_for_cause(asked, self.seen.partitioned_since or self.now) or members

    def without(self, group: Group, members: tuple[Member, ...]) -> NodesUnreachable:
        """The members without which these continue."""
        going_on = {member.identity for member in members}
        out = [member for member in group.members if member.identity not in going_on]
        return NodesUnreachable(node_ids=node_ids(out))

    def wait_for_cause(self, asked: Waiting, since: float) -> Plan | None:
        """Wait until the lease of a member that was lost at `since` has certainly ended, then read everything again."""
        since = max(
            since, self.seen.outage.ended_at if self.seen.outage else 0.0
        )  # etcd renews all leases as it starts
        until = since + self.policy.lease_ttl_s + _LEASE_LATE_S
        if self.now < until:
            return Plan(None, asked, until)
        is_known = self.seen.read_at is not None and self.seen.read_at >= until
        return None if is_known else Plan(Refresh(), asked)

    def _first_step_until(self) -> float:
        return max(self.seen.partitioned_since or self.now, self.seen.group_since) + _FIRST_STEP_WITHIN_S
