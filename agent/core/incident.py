"""What is recorded of a change of group: the incident, and what the nodes tell of it; and of ranks that stand still.

An incident is written with the group that it made, and completed once every member has taken its first step. Times
within are seconds; those of one node are on that node's own clock, so that no two clocks are compared but where it is
said by how much they may differ.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from agent.core.model import (
    Cause,
    Clock,
    Count,
    Failure,
    MemberRecord,
    NodeId,
    Nproc,
    Record,
    Run,
    Seconds,
    WallClock,
)


class WorkerEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a worker of the group before ended."""

    node_id: NodeId
    failure: Failure
    after_s: Seconds = 0.0
    """After the first of them, by the clocks of their nodes as compared over the links."""
    error_s: Seconds | None = 0.0
    """By how much that may be wrong. None: their clocks were never compared."""


class Phases(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the time went, from the fault to the slowest rank's first step, in seconds. None: not known (yet)."""

    detect_s: Seconds | None = None
    """Until the leader knew."""
    agree_s: Seconds | None = None
    """Until the group was written; waiting for nodes, and backing off, included."""
    stop_s: Seconds | None = None
    """Until nothing of the old group's workers was left."""
    start_s: Seconds | None = None
    """Until the processes had begun, and imported what they need."""
    join_s: Seconds | None = None
    """Until they had met in a process group."""
    load_s: Seconds | None = None
    """Until they had loaded what they begin from."""
    first_step_s: Seconds | None = None
    """Until the first step was done."""

    @property
    def total_s(self) -> float:
        """All that is known of it."""
        return sum(getattr(self, name) or 0.0 for name in self.__struct_fields__)

    @property
    def after_s(self) -> float:
        """What is known of it since the group was written."""
        return self.total_s - (self.detect_s or 0.0) - (self.agree_s or 0.0)

    @property
    def is_complete(self) -> bool:
        """Whether the first step was seen."""
        return self.first_step_s is not None


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of a run, up to and including an incident."""

    incidents: Count = 0
    """Changes of group after the first start."""
    lost_s: Seconds = 0.0
    """Between a fault and the first step after it, and for steps that were done again."""
    redone: Count = 0
    """Steps that were done again."""


class IncidentMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member of the group, and its ranks."""

    node_id: NodeId
    nproc: Nproc


class Incident(Record, frozen=True, kw_only=True):
    """One change of group."""

    run: Run
    group: Count
    """The one that it made."""
    cause: Cause
    reason: str
    at: WallClock = 0.0
    """When that was written: wall clock of the leader, seconds since 1970."""
    began_at: WallClock = 0.0
    """When the run's training began, likewise: in its first incident, when the group was written; in the later ones,
    when that had made its first step."""
    members: tuple[IncidentMember, ...]
    """In rank order; empty: nobody trains."""
    ended: tuple[WorkerEnd, ...] = ()
    """How workers of the group before ended: the first cause, then those that died of it, in the order of time."""
    phases: Phases
    step: Count = 0
    """The step after which the group began; 0: at the start, or the script commits none."""
    redone: Count = 0
    """Steps that were committed before, and done again."""
    step_s: Seconds = 0.0
    """The usual time of a step; 0: not known."""
    before: Totals = Totals()
    """Of the run, without this one."""

    @property
    def totals(self) -> Totals:
        """Of the run, with this one. The first start is none."""
        if self.is_first_start:
            return self.before
        lost_s = self.phases.total_s + self.redone * self.step_s
        return Totals(
            incidents=self.before.incidents + 1,
            lost_s=self.before.lost_s + lost_s,
            redone=self.before.redone + self.redone,
        )

    @property
    def is_first_start(self) -> bool:
        """Whether nothing had trained before in this run."""
        return self.at == self.began_at


class TransitionReport(MemberRecord, frozen=True, kw_only=True):
    """How one node went over to a group. Seconds since it saw the group's record, on its own clock."""

    group: Count
    stopped_s: Seconds
    """Nothing of the older group's workers was left."""
    entered_s: Seconds | None = None
    """Its last rank had imported our runtime; this and the next three are known once all have made a step."""
    joined_s: Seconds | None = None
    loaded_s: Seconds | None = None
    stepped_s: Seconds | None = None
    before: Count = 0
    """The highest step that its workers had committed by the end of the group before."""
    ended: tuple[Failure, ...] = ()
    """How its workers of the group before ended, where they ended of themselves."""
    step_s: Seconds = 0.0
    """The usual time of a step, of late; 0: not known."""
    clocks: tuple[Clock, ...] = ()
    """How its neighbours' clocks compare to its own."""


Doing = Literal["runs", "sleeps", "waits", "stopped", "disk", "exited"]
"""Of a rank that makes no step: computes; sleeps; waits for other ranks; is stopped by a signal; hangs in the kernel
(state D); or has ended with code 0, while others have not."""


class RankStall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank was doing when no step came."""

    rank: Count
    step: Count
    """The last that it committed."""
    doing: Doing
    where: str
    """`train.py:33 in load`: the innermost frame that is not a library's. Empty: its stack could not be read."""
    stack: str
    """As it was dumped, the innermost frame first. Empty likewise."""


class StallReport(MemberRecord, frozen=True, kw_only=True):
    """That the ranks of one node make no step. Rewritten as it goes on."""

    group: Count
    stage: Literal["over", "suspicious", "still", "certain"]
    """A step came after all; the limit is passed; so is half as much again, with the same stacks; so is twice that."""
    for_s: Seconds
    """Since the last step."""
    limit_s: Seconds
    """What was taken as too long."""
    step_s: Seconds = 0.0
    """The usual time of a step, of late; 0: not known."""
    ranks: tuple[RankStall, ...]
