"""While no group trains: wait for nodes, and form a group as soon as enough are there. Part of the planner."""

from __future__ import annotations

from agent.core.model import Member
from agent.core.partitions import PartitionView
from agent.core.proposals import Plan, node_ids, required
from agent.core.reasons import GaveUp, NodeIds, NodesMissing, NodesThere, Waiting

_SETTLE_WINDOWS = 5
_LEAVE_WITHIN_S = 60.0
"""How long the next group waits for nodes that were asked to leave."""


class Gathering(PartitionView):
    """Adds what is decided while no group trains."""

    def gather(self) -> Plan:
        """No group trains: form one as soon as enough nodes are there."""
        if self.spec.paused_by:
            return self.paused()
        members = self.lineup(self.spec.np_max)
        need = required(self.spec, self.group)
        until = self.seen.group_since + _LEAVE_WITHIN_S
        if self.group is not None and self.group.cause == "drain" and self.now < until and self.leaving():
            return Plan(None, Waiting(what="leave", node_ids=self.leaving()), until)
        if len(members) >= self.spec.np_max:
            return self.form(members, "start", self.there(members, is_all=True))
        if len(members) >= need:
            return self._settle(members)
        return self._wait_for_nodes(members, need)

    def leaving(self) -> NodeIds:
        """The nodes that were asked to leave and are still here, perhaps because they save what their memory holds."""
        return tuple(sorted(node.node_id for node in self.view.draining))

    def _settle(self, members: tuple[Member, ...]) -> Plan:
        until = min(
            self.seen.last_arrival(members) + self.policy.settle_s,
            self.seen.group_since + _SETTLE_WINDOWS * self.policy.settle_s,
        )
        there = self.there(members)
        return self.form(members, "start", there) if self.now >= until else self.wait_a_moment(there, until)

    def there(self, members: tuple[Member, ...], *, is_all: bool = False) -> NodesThere:
        """The reason that these nodes are there. `is_all`: no further ones are wanted."""
        return NodesThere(nodes=len(members), np=self.spec.np, is_all=is_all)

    def wait_a_moment(self, there: NodesThere, until: float) -> Plan:
        """Do nothing until then: more nodes may come."""
        return Plan(None, Waiting(what="nodes", because=there), until)

    def _wait_for_nodes(self, members: tuple[Member, ...], need: int) -> Plan:
        reason = NodesMissing(
            missing=need - len(members),
            needed=need,
            here=node_ids(members),
            last=self.group.reason if self.group is not None else None,
            left_out=self.left_out(),
        )
        if self.policy.elastic_timeout_s is None:
            return Plan(None, reason)
        waits_since = self.now if self.seen.waits_since is None else self.seen.waits_since
        give_up_at = waits_since + self.policy.elastic_timeout_s
        if self.now < give_up_at:
            return Plan(None, reason, give_up_at)
        return self.end(GaveUp(after_s=self.policy.elastic_timeout_s, waiting=reason))

    def left_out(self) -> NodeIds:
        """The nodes that are here, but left out because of failures."""
        left_out = self.group.left_out if self.group is not None else ()
        return tuple(sorted(who.node_id for who in left_out if who in self.view.present))
