"""Records about changes of group: the incident, the transition reports of members, and reports of stalled ranks.

The leader writes a `GroupChange` together with each group. Its recorder (`agent/observe/incident_recorder.py`) makes
the incident from it, and completes the incident once every member has made its first step. No decision reads an
incident.

Durations are in seconds. Each duration is measured on the clock of one node. Clocks of different nodes are compared
only where the record has the possible error, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from agent.core.bounds import Count, NodeId, Nproc, Run, Seconds, WallClock
from agent.core.failures import Clock, Failure
from agent.core.model import Cause, Group
from agent.core.reasons import Doing, GroupReason
from agent.core.records import MemberRecord, Record


class WorkerEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a worker of the previous group failed."""

    node_id: NodeId
    failure: Failure
    after_s: Seconds = 0.0
    """Time since the first failure, by the clocks of both nodes, which were compared over the links."""
    error_s: Seconds | None = 0.0
    """Bound of the error of `after_s`. None: their clocks were never compared."""


class Phases(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The phases of an incident, from the fault to the first step of the slowest rank. None: not known (yet)."""

    detect_s: Seconds | None = None
    """Until the leader detected the fault."""
    agree_s: Seconds | None = None
    """Until the next group was written. Includes waiting for nodes and the delays between restarts."""
    stop_s: Seconds | None = None
    """Until no process of the old workers was left."""
    start_s: Seconds | None = None
    """Until the new processes were started and had imported `trainer_runtime`."""
    join_s: Seconds | None = None
    """Until all ranks had joined a process group, without the time in which they waited there for one to set up."""
    set_up_s: Seconds | None = None
    """Until their scripts had set up: until they asked for the restore point."""
    load_s: Seconds | None = None
    """Until they had loaded the restore point."""
    first_step_s: Seconds | None = None
    """Until they had made their first step."""

    @property
    def total_s(self) -> float:
        """The sum of the phases that are known."""
        return sum(getattr(self, name) or 0.0 for name in self.__struct_fields__)

    @property
    def after_s(self) -> float:
        """The sum of the phases that are known and follow the write of the group."""
        return self.total_s - (self.detect_s or 0.0) - (self.agree_s or 0.0)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have made their first step, so that all phases are known."""
        return self.first_step_s is not None


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Totals of a run, up to and including an incident."""

    incidents: Count = 0
    """Changes of group after the first start."""
    downtime_s: Seconds = 0.0
    """Time between faults and the first steps after them, and time for replayed steps."""
    replayed_steps: Count = 0
    """Steps that were committed before an incident and again after it."""
    is_at_least: bool = False
    """Perhaps more was lost. After an incident no first step was reported of all ranks, nobody was left who knew how
    far the training had come, or etcd has lost earlier incidents."""


class IncidentMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member of the group, and its number of ranks."""

    node_id: NodeId
    nproc: Nproc


def members_of(group: Group) -> tuple[IncidentMember, ...]:
    """The members of a group, as its incident has them."""
    return tuple(IncidentMember(node_id=member.node_id, nproc=member.nproc) for member in group.members)


class GroupChange(Record, frozen=True, kw_only=True):
    """Why and when a group was formed. Written with the group, and deleted when its incident is written.

    With the status records of the previous group it is everything that the incident needs, so any later leader can
    write the incident, even once another group has followed.
    """

    run: Run
    group: Count
    """Number of the group that was formed."""
    cause: Cause
    reason: GroupReason
    at: WallClock
    """When the group was written: wall clock of the leader, seconds since 1970."""
    members: tuple[IncidentMember, ...]
    """In rank order. Empty: no node trains."""
    last_reached: Count | None = None
    """The highest step of the previous group that its members reported, as they stopped or ended. None: none did."""


class Incident(Record, frozen=True, kw_only=True):
    """One change of group."""

    run: Run
    group: Count
    """Number of the group that it led to."""
    cause: Cause
    reason: GroupReason
    at: WallClock = 0.0
    """When the group was written: wall clock of the leader, seconds since 1970."""
    began_at: WallClock = 0.0
    """When the training of the run began, likewise. In the first incident of a run: when its group was written. In
    later incidents: when that first group had made its first step. 0: etcd has lost the incidents before."""
    members: tuple[IncidentMember, ...]
    """In rank order. Empty: no node trains."""
    ended: tuple[WorkerEnd, ...] = ()
    """How workers of the previous group failed: causes before consequences, each in the order of time."""
    phases: Phases
    step: Count = 0
    """The step after which the group resumed. 0: at the start of the training, or not every rank has made a step."""
    trained_before: Count = 0
    """Number of the last group before that made a step, as far as known when the incident was written first. 0: none
    did."""
    reached: Count | None = None
    """The highest step of that group. None: not known, or no group made a step."""
    replayed_steps: Count = 0
    """Steps that were committed before the incident and again after it."""
    step_s: Seconds = 0.0
    """The usual time of a step. 0: not known."""
    before: Totals = Totals()
    """Totals of the run before this incident."""

    @property
    def downtime_s(self) -> float:
        """Seconds of downtime: the phases, and the time for the replayed steps."""
        return self.phases.total_s + self.replayed_steps * self.step_s

    @property
    def is_at_least(self) -> bool:
        """Whether perhaps more steps were replayed, and more time was lost.

        All nodes that had trained are gone. Nobody knows how far the training had come, and when it stopped.
        """
        return self.phases.is_complete and self.reached is None and self.trained_before > 0

    @property
    def totals(self) -> Totals:
        """Totals of the run, including this incident. The first start of a run is not counted."""
        if self.is_first_start:
            return self.before
        return Totals(
            incidents=self.before.incidents + 1,
            downtime_s=self.before.downtime_s + self.downtime_s,
            replayed_steps=self.before.replayed_steps + self.replayed_steps,
            is_at_least=self.before.is_at_least
            or self.is_at_least
            or bool(self.members and not self.phases.is_complete),
        )

    @property
    def is_first_start(self) -> bool:
        """Whether this is the first incident of the run: the start of its training."""
        return self.at == self.began_at


class TransitionReport(MemberRecord, frozen=True, kw_only=True):
    """How one node moved into a group. Times are seconds since it saw the group's record, on its own clock."""

    group: Count
    stopped_s: Seconds
    """No process of the old workers was left."""
    entered_s: Seconds | None = None
    """Its last rank had imported `trainer_runtime`. Like the next five, None until all ranks have made a step."""
    joined_s: Seconds | None = None
    """Its last rank had joined a process group."""
    set_up_s: Seconds | None = None
    """Its last rank had set up the script, and asked for the restore point."""
    loaded_s: Seconds | None = None
    """Its last rank had loaded the restore point."""
    stepped_s: Seconds | None = None
    """Its last rank had made its first step."""
    first_step: Count | None = None
    """The number of that step."""
    before: Count | None = None
    """The highest step that its earlier workers had committed: those of the last group that made a step. None: none of
    them made one."""
    before_group: Count = 0
    """Number of that group."""
    ended: tuple[Failure, ...] = ()
    """How its workers of the previous group failed, without those that the agent ended."""
    step_s: Seconds = 0.0
    """The recent usual time of a step. 0: not known."""
    clocks: tuple[Clock, ...] = ()
    """How the clocks of its neighbours compare to its own."""


class RankStall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank was doing while its node made no step."""

    rank: Count
    step: Count
    """The last step that it committed."""
    doing: Doing
    where: str
    """The innermost frame outside libraries: `train.py:33 in load`. Empty: the stack could not be read."""
    stack: str
    """The dumped stack, the innermost frame first. Empty: it could not be read."""
    stack_shows: Doing | None = None
    """What it does by its stack, if it waits only by torch's record of collectives. None: the same."""


class StallReport(MemberRecord, frozen=True, kw_only=True):
    """The ranks of one node make no step. The report is replaced as the stall continues."""

    group: Count
    stage: Literal["over", "suspicious", "still", "certain"]
    """`over`: a step was made after all. `suspicious`: the limit has passed. `still`: one and a half times the limit
    has passed, and the stacks are the same. `certain`: twice the limit has passed."""
    for_s: Seconds
    """Time since the last step."""
    limit_s: Seconds
    """The limit: how long a step may take before the stall is reported."""
    step_s: Seconds = 0.0
    """The recent usual time of a step. 0: not known."""
    ranks: tuple[RankStall, ...]


@dataclass(frozen=True)
class IncidentWrite:
    """Write incidents, if the leadership and none of them has changed."""

    incidents: tuple[tuple[Incident, int], ...]
    """Each with the mod_revision of the record that it replaces. 0: there is none yet."""
    leader_revision: int
    """create_revision of the leader key."""
