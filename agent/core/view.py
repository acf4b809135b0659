"""A view of all records of a job: everything that a decision may rest on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from agent.core.rank_order import RankOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agent.core.failures import ExitReport
    from agent.core.incident import GroupChange, Incident, StallReport, TransitionReport
    from agent.core.member_status import MemberStatus
    from agent.core.model import CachedRecords, Group, HandoffRequest, Leader, Node, Quiesced, Result, Spec, Suspicion
    from agent.core.records import Identity, Stored
    from agent.core.saved_states import Checkpoint, Inventory, RestorePoint


@dataclass(frozen=True)
class Backlog:
    """What the incidents of the last groups are made from. No decision reads it."""

    changes: tuple[GroupChange, ...] = ()
    """Of the groups whose incident is not written yet, by number."""
    statuses: tuple[MemberStatus, ...] = ()
    """What members of earlier groups reported about them."""
    incidents: tuple[Stored[Incident], ...] = ()
    """Of the current group, of the groups in `changes`, and of those before each of them; by number."""


@dataclass(frozen=True)
class ClusterView:
    """A view of the job's records: everything that a decision may rest on."""

    revision: int
    """It includes everything written up to this revision, and may include some later writes."""
    is_whole: bool
    """False: seen by an agent that does not lead, without the `nodes` and `statuses` of others."""
    own_revision: int = 0
    """It also includes what this agent itself wrote up to this revision."""
    spec: Stored[Spec] | None = None
    leader: Stored[Leader] | None = None
    group: Stored[Group] | None = None
    result: Stored[Result] | None = None
    restore_point: Stored[RestorePoint] | None = None
    checkpoint: Stored[Checkpoint] | None = None
    handoff: Stored[HandoffRequest] | None = None
    suspects: tuple[Stored[Suspicion], ...] = ()
    """Ordered by suspect, then by the reporting node."""
    nodes: tuple[Stored[Node], ...] = ()
    """Ordered by age (create_revision)."""
    statuses: tuple[MemberStatus, ...] = ()
    """What members of the current group reported about it, by node id."""
    incident: Stored[Incident] | None = None
    """The one that made the current group. No decision reads it."""
    backlog: Backlog = field(default_factory=Backlog)

    def includes(self, revision: int) -> bool:
        """Whether the view is as new as the write or the read of this agent that had this revision."""
        return max(self.revision, self.own_revision) >= revision

    @cached_property
    def present(self) -> Mapping[Identity, Stored[Node]]:
        """The nodes by identity, oldest first."""
        return {node.value.identity: node for node in self.nodes}

    @cached_property
    def node_ids(self) -> frozenset[str]:
        """The ids of the nodes."""
        return frozenset(node.value.node_id for node in self.nodes)

    @cached_property
    def draining(self) -> tuple[Node, ...]:
        """The nodes that were asked to leave."""
        return tuple(node.value for node in self.nodes if node.value.is_draining)

    @cached_property
    def unfit(self) -> tuple[Node, ...]:
        """The nodes that cannot train."""
        return tuple(node.value for node in self.nodes if node.value.unfit is not None)

    @cached_property
    def cached(self) -> tuple[CachedRecords, ...]:
        """What nodes have published because etcd has lost data."""
        return tuple(node.value.cached for node in self.nodes if node.value.cached is not None)

    @cached_property
    def order(self) -> RankOrder:
        """The nodes that can train, in rank order."""
        return RankOrder(self)

    @cached_property
    def movable(self) -> frozenset[Identity]:
        """Members whose ranks can enter the next group without a new process."""
        return frozenset(each.identity for each in self.statuses if each.can_move)

    @cached_property
    def started(self) -> frozenset[Identity]:
        """Members whose ranks have made a step in this group."""
        return frozenset(each.identity for each in self.transitions if each.stepped_s is not None)

    @cached_property
    def inventories(self) -> tuple[Inventory, ...]:
        """Of the members that have reported theirs, by node id; likewise below."""
        return tuple(each.inventory for each in self.statuses if each.inventory is not None)

    @cached_property
    def quiesced(self) -> tuple[Quiesced, ...]:
        """Of members whose ranks stopped for a handoff."""
        return tuple(each.quiesced for each in self.statuses if each.quiesced is not None)

    @cached_property
    def transitions(self) -> tuple[TransitionReport, ...]:
        """How members moved into the group."""
        return tuple(each.transition for each in self.statuses if each.transition is not None)

    @cached_property
    def stalls(self) -> tuple[StallReport, ...]:
        """Of members whose ranks make no step, or made none for a while."""
        return tuple(each.stall for each in self.statuses if each.stall is not None)

    @cached_property
    def exits(self) -> tuple[ExitReport, ...]:
        """Of members whose workers have ended."""
        return tuple(each.exit for each in self.statuses if each.exit is not None)

    def with_exits(self, exits: Iterable[ExitReport]) -> ClusterView:
        """Return the view as if its members had reported these exits, and no others."""
        by_member = {each.identity: each for each in exits}
        if all(status.exit is by_member.get(status.identity) for status in self.statuses):
            return self

        def with_exit(status: MemberStatus) -> MemberStatus:
            reported = by_member.get(status.identity)
            return status if status.exit is reported else msgspec.structs.replace(status, exit=reported)

        return replace(self, statuses=tuple(map(with_exit, self.statuses)))
