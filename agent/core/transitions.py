"""What this node tells of its workers beside how they ended: how they came to be, and that they make no step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.incident import StallReport, TransitionReport
from agent.core.local_workers import LocalWorkers
from agent.core.model import Clock, ClusterView, Group, Identity


@dataclass(frozen=True)
class WorkerObservations:
    """What was seen of the workers, beside their ends."""

    group: int = 0
    """The newest that was seen."""
    seen_at: float = 0.0
    """When that was."""
    began: ev.RanksStarted | None = None
    paced: ev.StepTimeChanged | None = None
    stalled: ev.RanksStalled | None = None
    clocks: tuple[Clock, ...] = ()
    told: TransitionReport | None = None
    told_stall: StallReport | None = None

    @property
    def step_s(self) -> float:
        """The usual time of a step; 0: not known."""
        return self.paced.step_s if self.paced is not None else 0.0

    def note(
        self, event: ev.RanksStarted | ev.StepTimeChanged | ev.RanksStalled | ev.ClockCompared
    ) -> WorkerObservations:
        """Take in what happened."""
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
        """Take in the number of the current group."""
        return self if number <= self.group else replace(self, group=number, seen_at=now)

    def keep_clocks(self, groups: tuple[Group | None, ...]) -> WorkerObservations:
        """Forget the clocks of all who are in none of these groups: so many come and go in a long job."""
        here = {member.identity for group in groups if group is not None for member in group.members}
        return replace(self, clocks=tuple(clock for clock in self.clocks if clock.who in here))

    def forget_told(self) -> WorkerObservations:
        """What was told may be lost with etcd's data."""
        return replace(self, told=None, told_stall=None)


def tell(
    observed: WorkerObservations, workers: LocalWorkers, view: ClusterView, me: Identity
) -> fx.WriteTransition | fx.WriteStall | None:
    """What is due to be told of the current group's workers."""
    group = view.group
    if group is None or workers.is_told_to_end or not group.value.number == workers.group == observed.group:
        return None
    if group.value.node_rank(me) is None:  # they are of an earlier life of ours
        return None
    stall = _stall(observed, workers, me)
    if stall is not None and stall != observed.told_stall:
        return fx.WriteStall(stall, group.mod_revision)
    account = _account(observed, workers, me)
    return None if account == observed.told else fx.WriteTransition(account, group.mod_revision)


def _stall(observed: WorkerObservations, workers: LocalWorkers, me: Identity) -> StallReport | None:
    seen = observed.stalled
    if seen is None or seen.group != workers.group:
        return None
    told = observed.told_stall
    if seen.stage == "over" and (told is None or told.group != seen.group):
        return None
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


def _account(observed: WorkerObservations, workers: LocalWorkers, me: Identity) -> TransitionReport:
    began = observed.began if observed.began is not None and observed.began.group == workers.group else None
    last = observed.told if observed.told is not None and observed.told.group == workers.group else None
    account = last or TransitionReport(
        group=workers.group,
        node_id=me.node_id,
        incarnation=me.incarnation,
        stopped_s=workers.started_at - observed.seen_at,
        before=workers.before,
        ended=workers.ended_before,
        step_s=observed.step_s,
        clocks=observed.clocks,
    )
    if began is None or account.stepped_s is not None:
        return account
    return msgspec.structs.replace(
        account,
        entered_s=began.entered - observed.seen_at,
        joined_s=began.joined - observed.seen_at,
        loaded_s=began.loaded - observed.seen_at,
        stepped_s=began.stepped - observed.seen_at,
    )
