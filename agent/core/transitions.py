"""What this node reports about its workers: the status that its record in etcd should have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.failures import Clock
from agent.core.incident import StallReport, TransitionReport
from agent.core.local_workers import LocalWorkers, exit_report, quiesced
from agent.core.member_status import WrittenStatus
from agent.core.model import Group, Quiesced
from agent.core.records import Identity, Stored
from agent.core.saved_states import Inventory, Replica
from agent.core.view import ClusterView


@dataclass(frozen=True)
class WorkerObservations:
    """What was observed of the workers, except their exits."""

    group: int = 0
    """Number of the newest group that was seen."""
    seen_at: float = 0.0
    """When that group was first seen."""
    began: ev.RanksStarted | None = None
    paced: ev.StepTimeChanged | None = None
    stalled: ev.RanksStalled | None = None
    clocks: tuple[Clock, ...] = ()
    """How the clocks of other nodes compare to this node's."""

    @property
    def step_s(self) -> float:
        """The usual time of a step. 0: not known."""
        return self.paced.step_s if self.paced is not None else 0.0

    def note(
        self, event: ev.RanksStarted | ev.StepTimeChanged | ev.RanksStalled | ev.ClockCompared
    ) -> WorkerObservations:
        """Apply an event."""
        match event:
            case ev.RanksStarted():
                return replace(self, began=event)
            case ev.StepTimeChanged():
                return replace(self, paced=event)
            case ev.RanksStalled():
                return replace(self, stalled=event)
            case ev.ClockCompared(who, ahead_s, error_s):
                others = tuple(clock for clock in self.clocks if clock.who != who)
                return replace(self, clocks=(*others, Clock(who=who, ahead_s=ahead_s, error_s=error_s)))

    def note_group(self, number: int, now: float) -> WorkerObservations:
        """Note the number of the current group, and when it was first seen."""
        return self if number <= self.group else replace(self, group=number, seen_at=now)

    def keep_clocks(self, groups: tuple[Group | None, ...]) -> WorkerObservations:
        """Keep only the clocks of members of these groups. In a long job many nodes come and go."""
        shown = [group for group in groups if group is not None]
        here = (clock for clock in self.clocks if any(group.node_rank(clock.who) is not None for group in shown))
        return replace(self, clocks=tuple(here))


def due_status(
    written: WrittenStatus,
    workers: LocalWorkers,
    observed: WorkerObservations,
    copies: tuple[Replica, ...],
    view: ClusterView,
    me: Identity,
    now: float,
) -> fx.WriteStatus | None:
    """Return the write that the status of this node needs. None: the record in etcd is as it should be.

    Args:
        written: the status record in etcd.
        workers: the workers of this node.
        observed: what was observed of them.
        copies: the snapshots that this node holds in memory.
        view: the newest view. A member reports only while its group is the current one.
        me: the identity of this node.
        now: monotonic, in seconds.
    """
    group = view.group
    if group is None or workers.is_asked_to_end or not group.value.number == workers.group == observed.group:
        return None
    if group.value.node_rank(me) is None:  # the workers are of an earlier incarnation
        return None
    number = workers.group
    before = written.of(number, me)
    status = msgspec.structs.replace(
        before,
        inventory=before.inventory
        or Inventory(group=number, node_id=me.node_id, incarnation=me.incarnation, copies=copies),
        quiesced=_quiesced(before.quiesced, workers, me, now),
        transition=_transition(before.transition, observed, workers, me),
        can_move=before.can_move or workers.can_move,
        stall=_stall(before.stall, observed, me),
        exit=before.exit or exit_report(workers, me, observed.step_s, observed.clocks, now),
    )
    if status == before:
        return None
    return fx.WriteStatus(status, group.mod_revision, written.revision_of(number))


def due_before_end(
    written: WrittenStatus,
    group: Stored[Group],
    copies: tuple[Replica, ...],
    me: Identity,
    *,
    has_failed_to_save: bool,
) -> fx.WriteStatus | None:
    """Return the write due in a group without members, before the job ends. To be called once no worker lives.

    Args:
        written: the status record in etcd.
        group: the group without members.
        copies: the snapshots that this node holds in memory.
        me: the identity of this node.
        has_failed_to_save: it was asked to save what its memory holds, and could not.
    """
    number = group.value.number
    before = written.of(number, me)
    status = msgspec.structs.replace(
        before,
        inventory=before.inventory
        or Inventory(group=number, node_id=me.node_id, incarnation=me.incarnation, copies=copies),
        has_failed_to_save=before.has_failed_to_save or has_failed_to_save,
    )
    return None if status == before else fx.WriteStatus(status, group.mod_revision, written.revision_of(number))


def _quiesced(before: Quiesced | None, workers: LocalWorkers, me: Identity, now: float) -> Quiesced | None:
    due = quiesced(workers, me, now)
    return before if due is None or (before is not None and before.number >= due.number) else due


def _stall(before: StallReport | None, observed: WorkerObservations, me: Identity) -> StallReport | None:
    seen = observed.stalled
    if seen is None or seen.group != observed.group or (seen.stage == "over" and before is None):
        return before
    return StallReport(
        group=seen.group,
        node_id=me.node_id,
        incarnation=me.incarnation,
        stage=seen.stage,
        for_s=seen.for_s,
        limit_s=seen.limit_s,
        step_s=observed.step_s,
        ranks=seen.ranks,
    )


def _transition(
    before: TransitionReport | None, observed: WorkerObservations, workers: LocalWorkers, me: Identity
) -> TransitionReport:
    began = observed.began if observed.began is not None and observed.began.group == workers.group else None
    report = before or TransitionReport(
        group=workers.group,
        node_id=me.node_id,
        incarnation=me.incarnation,
        # A process that set up the script for its first group had no other to wait for.
        stopped_s=workers.started_at - observed.seen_at if workers.before or workers.ended_before else 0.0,
        before=workers.before.step if workers.before is not None else None,
        before_group=workers.before.group if workers.before is not None else 0,
        ended=workers.ended_before,
        step_s=observed.step_s,
        clocks=observed.clocks,
    )
    if began is None or report.stepped_s is not None:
        return report
    return msgspec.structs.replace(
        report,
        entered_s=began.entered - observed.seen_at,
        joined_s=began.joined - observed.seen_at,
        set_up_s=began.set_up - observed.seen_at,
        loaded_s=began.loaded - observed.seen_at,
        stepped_s=began.stepped - observed.seen_at,
        first_step=began.step,
    )
