"""The status of a member: all that its agent reports about one group, in one record.

Each agent writes one `MemberStatus` for each group that it is a member of. The leader decides from these records. A
part is absent until there is something to report. Nothing that was reported is withdrawn:

- `inventory` and `exit` do not change once they are in the record;
- `transition` gets the times of the first step added, and `can_move` is set with them;
- `quiesced` is replaced by that of a later handoff;
- `stall` is replaced as the stall goes on, and by one of stage `over` when it ends;
- `has_failed_to_save` is set once.

A write compares the revision of the record that it was built on. So an earlier write whose answer was lost, and that
lands late, is refused instead of undoing a later one.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.core.bounds import Count
from agent.core.failures import ExitReport
from agent.core.incident import StallReport, TransitionReport
from agent.core.model import Quiesced
from agent.core.records import Identity, MemberRecord
from agent.core.saved_states import Inventory


class MemberStatus(MemberRecord, frozen=True, kw_only=True):
    """What one member reports about one group. Not bound to a lease: it outlives its agent.

    Of a group without members, every node reports what it holds, if the job is to be stopped.
    """

    group: Count
    inventory: Inventory | None = None
    """The snapshots that it held in memory when its workers started."""
    quiesced: Quiesced | None = None
    """Its ranks stopped for a handoff. None: for none yet."""
    transition: TransitionReport | None = None
    """How it moved into this group."""
    can_move: bool = False
    """Its ranks have made a step, and can enter the next group without a new process (`State.run`)."""
    stall: StallReport | None = None
    """Its ranks make no step. None: they never stalled in this group."""
    exit: ExitReport | None = None
    """How its workers ended. None: they run."""
    has_failed_to_save: bool = False
    """It was asked to save what its memory holds, and could not."""

    def __post_init__(self) -> None:
        """Refuse parts that are about another group or member."""
        for part in (self.inventory, self.quiesced, self.transition, self.stall, self.exit):
            if part is not None and (part.group, part.identity) != (self.group, self.identity):
                raise ValueError(
                    f"wanted parts about group {self.group} and {self.identity}, got one about group {part.group} and "
                    f"{part.identity}"
                )


@dataclass(frozen=True)
class WrittenStatus:
    """This node's own status record in etcd, as last written, or as read after a write was refused."""

    group: int = 0
    status: MemberStatus | None = None
    """None: there is no record, or it cannot be read."""
    mod_revision: int = 0
    """0: there is no record."""

    def of(self, group: int, who: Identity) -> MemberStatus:
        """The status about this group that is in etcd. If there is none: a status without parts."""
        if self.status is None or (self.group, self.status.identity) != (group, who):
            return MemberStatus(group=group, node_id=who.node_id, incarnation=who.incarnation)
        return self.status

    def revision_of(self, group: int) -> int:
        """The revision that the next write about this group compares. 0: the record must not exist."""
        return self.mod_revision if self.group == group else 0
