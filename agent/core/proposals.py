"""Proposals of what a leader may write next: a group, its restore point, a handoff request, the job's result.

`planner.py` chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from agent.core import lineage
from agent.core.backoff import doubled_s
from agent.core.budget import FailureCount, exit_code, highest_step, tally
from agent.core.causes import first_failure
from agent.core.effects import Refresh, RestoredRecords
from agent.core.handoff import PlannedChange, prepare_change
from agent.core.member_status import MemberStatus
from agent.core.model import Cause, Group, HandoffRequest, Member, Result, Spec
from agent.core.observations import Observations
from agent.core.policy import Policy
from agent.core.reasons import (
    Beginning,
    CheckpointOnDisk,
    EndingReason,
    Finished,
    GroupReason,
    NodeIds,
    PlanReason,
    Requested,
    Waiting,
)
from agent.core.saved_states import Checkpoint, RestorePoint
from agent.core.view import ClusterView

STEADY_S = 600.0
"""Seconds in one group after which earlier losses of new nodes no longer delay its growth. Also the longest delay."""
HELD_WAITS = 8
"""A growth that lasted this many times as long as the wait before it counts as a success."""


Action = Group | Spec | HandoffRequest | RestorePoint | Result | Refresh
"""What a leader can do: write one of these records, or read everything again before it decides."""


@dataclass(frozen=True)
class Plan:
    """What to do now, if anything; why; and when to plan again at the latest."""

    action: Action | None
    reason: PlanReason
    wake_at: float | None = None
    restored: RestoredRecords | None = None
    """Written with the group, if etcd has lost these records."""
    is_old: bool = False
    """The group is not a new one, but a record that etcd has lost."""


def required(spec: Spec, group: Group | None) -> int:
    """How many nodes the job needs to train on after a loss."""
    return spec.np_min if group is None or group.reached == 0 else min(spec.np_min, group.reached)


def begin_again(last: Group | None, run: str) -> Group:
    """The first group of a new run, numbered after the last group of the run before. It has no members yet."""
    number = last.number + 1 if last is not None else 1
    reason = Requested(what="start over")
    return Group(run=run, number=number, members=(), cause="wait", reason=reason, restarts=0, step=0, reached=0)


@dataclass(frozen=True)
class Proposals:
    """The input of every plan, and the plans that are possible."""

    view: ClusterView
    spec: Spec
    seen: Observations
    policy: Policy
    now: float

    @property
    def group(self) -> Group | None:
        """The current group."""
        return self.view.group.value if self.view.group is not None else None

    def lineup(self, size: int, *, is_picky: bool = True, needs_set_up: bool = True) -> tuple[Member, ...]:
        """The members of a next group of up to `size` nodes.

        Args:
            size: the largest number of nodes.
            is_picky: take only nodes that are known to reach the group.
            needs_set_up: of these, take only such as need no set-up before they enter it.
        """
        failures = self.tally()
        return self.view.order.lineup(
            size,
            last=failures.placed_last,
            left_out=failures.left_out,
            is_picky=is_picky,
            needs_set_up=needs_set_up,
        )

    def tally(self, *, is_failure: bool = False) -> FailureCount:
        """The count of failures once the current group has ended."""
        return self._with_failure if is_failure else self._without_failure

    @cached_property
    def _with_failure(self) -> FailureCount:
        return self._tally(is_failure=True)

    @cached_property
    def _without_failure(self) -> FailureCount:
        return self._tally(is_failure=False)

    def _tally(self, *, is_failure: bool) -> FailureCount:
        last = self.group
        if last is None:
            return FailureCount()
        window_s = self.policy.progress_window_s
        failures = tally(last, self.view.exits, self._plain_s(last), window_s, is_failure=is_failure)
        found = self.view.order.lineup(
            self.spec.np_max, last=failures.placed_last, left_out=failures.left_out, is_picky=False
        )
        # If no other node can take the place of a node, leaving it out would only make the job wait: then the restart
        # budget decides.
        left_out = failures.left_out if len(found) >= required(self.spec, last) else last.left_out
        return replace(failures, left_out=tuple(each for each in left_out if each in self.view.present))

    def must_begin(self, group: Group) -> bool:
        """Whether the restore point of the group is not written yet."""
        return self.view.restore_point is None or self.view.restore_point.value.group < group.number

    def begin(self, group: Group) -> Plan:
        """Write where the group begins, once all members have reported their inventory."""
        held = {holding.identity: holding.copies for holding in self.view.inventories}
        silent = [member for member in group.members if member.identity not in held]
        if silent:
            return Plan(None, Waiting(what="inventory", node_ids=node_ids(silent)))
        committed = self.view.checkpoint.value if self.view.checkpoint is not None else None
        last = lineage.as_begun(
            self.view.restore_point.value if self.view.restore_point is not None else None, committed
        )
        copy = lineage.choose(held.values(), last, committed, self.spec.run)
        if committed is not None and copy == committed.copy and committed.node not in {"", group.members[0].node_id}:
            return self._fetch(committed)
        restore_point = lineage.follow(group.number, copy, last, committed, self.spec.run)
        return Plan(restore_point, Beginning(group=group.number, step=copy.step if copy is not None else None))

    def _fetch(self, committed: Checkpoint) -> Plan:
        """Form a group in which the node whose local disk has the checkpoint comes first; else wait for that node."""
        members = self.lineup(self.spec.np_max)
        reason = CheckpointOnDisk(node_id=committed.node, checkpoint=committed.name)
        if members and members[0].node_id == committed.node and not self.spec.paused_by:
            return self.form(members, "join", reason)
        return Plan(None, Waiting(what="checkpoint", because=reason))

    def paused(self) -> Plan:
        """Do nothing while the job is paused."""
        return Plan(None, Requested(what="pause", by=self.spec.paused_by))

    def change(self, group: Group, members: tuple[Member, ...], cause: Cause, reason: GroupReason) -> Plan:
        """Change a group that trains, as planned: once its ranks have stopped for a handoff, if they can."""
        return self.awaited(group, PlannedChange(cause, reason, members)) or self.form(members, cause, reason)

    def awaited(self, group: Group, change: PlannedChange) -> Plan | None:
        """Wait until the ranks of the group have stopped for a handoff. None: there is nothing (more) to wait for."""
        if self.must_begin(group):
            return None
        match prepare_change(group, change, self.view, self.seen.handoff_progress, self.policy, self.now):
            case HandoffRequest() as request:
                return Plan(request, change.reason)
            case float() as until:
                return Plan(None, Waiting(what="handoff", because=change.reason), until)
            case None:
                return None

    def form(self, members: tuple[Member, ...], cause: Cause, reason: GroupReason, *, is_failure: bool = False) -> Plan:
        """Form the next group."""
        last, failures = self.group, self.tally(is_failure=is_failure)
        reached = max(len(members), last.reached if last is not None else 0)
        group = Group(
            run=self.spec.run,
            number=1 if last is None else last.number + 1,
            members=members,
            cause=cause,
            reason=reason,
            restarts=failures.restarts,
            counted_from=failures.counted_from,
            step=0 if last is None else highest_step(last, self.view.exits),
            reached=min(reached, self.spec.np_max),
            grown_by=self._newcomers(members) if cause == "join" else (),
            flaps=self._flaps(cause),
            placed_last=failures.placed_last,
            failed_alone=failures.failed_alone,
            failed_early=failures.failed_early,
            left_out=failures.left_out,
            failed_reads=failures.failed_reads,
            script_error=failures.script_error,
            in_place=bool(members) and self._may_enter_in_place(is_failure=is_failure),
        )
        return Plan(group, reason)

    def _may_enter_in_place(self, *, is_failure: bool) -> bool:
        """Whether groups are entered in place, and ranks that did so last have not failed by themselves at once."""
        last, found = self.group, first_failure(self.view.exits)
        if not (is_failure and last is not None and last.in_place and found is not None):
            return self.spec.in_place
        is_by_itself = found[1].signal is None
        has_begun = highest_step(last, self.view.exits) > last.step
        return self.spec.in_place and (has_begun or not is_by_itself)

    def _newcomers(self, members: tuple[Member, ...]) -> tuple[str, ...]:
        """Ids of the nodes that are not in the current group."""
        before = self.group.members if self.group is not None else ()
        return tuple(sorted({member.node_id for member in members} - {member.node_id for member in before}))

    def _flaps(self, cause: Cause) -> int:
        """How many growths in a row soon lost a new node again. The loss of another node resets the count."""
        last = self.group
        if last is None or self._ran_s(last) >= STEADY_S:
            return 0
        if last.cause != "join" or cause not in {"lost", "wait"}:
            return last.flaps
        here, grown_by = self.view.present, set(last.grown_by)
        has_lost = any(member.node_id in grown_by and member.identity not in here for member in last.members)
        has_held = self._ran_s(last) >= HELD_WAITS * growth_wait_s(self.policy, last)
        return last.flaps + 1 if has_lost and not has_held else 0

    def _ran_s(self, group: Group) -> float:
        return self.now - self.seen.came_at if group.members else 0.0

    def _plain_s(self, group: Group) -> float:
        """How long the group ran until a fault, if no script has ever asked where to begin; otherwise 0."""
        if not group.members or any(node.value.restoring_group for node in self.view.nodes):
            return 0.0
        return (self.now if self.seen.fault_at is None else self.seen.fault_at) - self.seen.came_at

    def end(self, reason: EndingReason) -> Plan:
        """End the job, once what its ranks or the agents' memory have is saved (`ending.py`)."""
        return Plan(msgspec.structs.replace(self.spec, ending=reason, revision=self.spec.revision + 1), reason)

    def write_result(self, reason: Finished | EndingReason) -> Plan:
        """End the job now."""
        number = self.group.number if self.group is not None else 0
        succeeded, code = isinstance(reason, Finished), exit_code(reason)
        result = Result(run=self.spec.run, group=number, succeeded=succeeded, exit_code=code, reason=reason)
        return Plan(result, reason)


def growth_wait_s(policy: Policy, group: Group) -> float:
    """How long to wait after the last arrival before a growth. Longer each time that a new node was lost again."""
    return doubled_s(policy.settle_s, group.flaps, STEADY_S)


def node_ids(members: Sequence[Member]) -> NodeIds:
    """The node ids of these members, in rank order."""
    return tuple(member.node_id for member in members)


def of_members(group: Group, statuses: Iterable[MemberStatus]) -> tuple[MemberStatus, ...]:
    """Only the statuses of members of this group, about it, by node id. If it has none: of every node."""
    members = group.node_ranks
    mine = (each for each in statuses if each.group == group.number and (not members or each.identity in members))
    return tuple(sorted(mine, key=lambda each: each.node_id))
