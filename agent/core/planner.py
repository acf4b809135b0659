"""Plan the next group from a whole view of the job.

The leader calls `plan` after every change, and whenever the plan asked for it. It decides from the present state, never
from what changed, so a missed or repeated event does no harm. The rules:

- At the first start, and after a wait, a group is formed at once if the maximum number of nodes is there. Between
  minimum and maximum it is formed after a settle window without another arrival (five windows at most).
- np is a goal: a running group trains on until the nodes for a larger one are there. Only a *lost* member makes the job
  wait, and only if fewer nodes are left than it must have: the minimum, or the largest size that it has had if that is
  smaller.
- A newcomer that joins and is lost again makes all ranks start anew twice (no failure is counted). Each time this
  happens, the next growth waits twice as long.
- To wait is a decision too: a group without members, under the next number, so that no older group can come back.
- A worker that failed because of a broken connection is a consequence. The plan waits until the cause is known: the
  exit report of the peer, or the end of the peer's lease, and never longer. Watched records may arrive late, so the
  plan reads everything once more before it stops waiting.
- A failure next to a suspected member waits for that member in the same way.
- Members that do not reach each other although their leases live, and that make no step, cannot train together. The
  largest set of members that reach each other goes on, if it is large enough (`reachability.py`). The others join again
  once they reach them.
- Once all members have reported their inventory, the leader writes where the group begins (`lineage.py`). If that is a
  checkpoint on the local disk of one node, rank 0 must run there, and the group waits for that node.
- If the ranks of one node alone fail before their first step, twice in a row, the node is left out until its agent is
  restarted, if the other nodes are enough. So a new node without the data or a module does not end a healthy job, even
  if its script asks for no restart.
- If the checkpoint cannot be read, the job waits for it: the next group is tried with another rank 0, after longer and
  longer delays.
- A group whose ranks make no step is ended as if one rank, the one that the others wait for, had failed (`hangs.py`).
- If groups are entered in place, the ranks of the other nodes keep their processes after a failure. If these nodes are
  enough, they go on without the nodes that failed, and these join again once they have set up. If ranks that have just
  entered a group in place fail by themselves before they make a step, the next group is started anew.
- A member that is draining, unfit, or excluded by an operator is left out of the next group, which is due at once.
- A leader whose agent was just restarted cannot tell an old backup of etcd from the job as it is. It decides nothing
  until the nodes that were there before it have had time to publish newer records (`cached_records.py`).
- If groups are entered in place, newcomers are admitted once they have set up, and once the group has made a step:
  ranks that have not cannot move. Otherwise a growth restarts every rank, so the group trains on until the standby
  processes of new and present members are ready, since a rank would otherwise spend seconds on imports first; for a
  minute at most. A loss or a failure does not wait for standby processes.
- Once a member has finished, no planned change disturbs the others. While the job is paused, no
  group is formed, unless etcd has lost its data.
- Before a planned change (join, scale, drain) the ranks of the group stop after the same step (`handoff.py`).
- Before a job ends because an operator asked for it, because of failures, or because too few nodes were there for too
  long, what its ranks or the agents' memory have is saved (`ending.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

import msgspec

from agent.core.budget import EARLY_S, FailureCount, back_off_s, counts, highest_step, is_own
from agent.core.cached_records import lost_data
from agent.core.causes import first_failure, with_early_end
from agent.core.effects import RestoredRecords
from agent.core.ending import Ending
from agent.core.failures import Failure
from agent.core.handoff import PlannedChange, are_ranks_quiesced, can_hand_off
from agent.core.hangs import REPORT_WITHIN_S, as_report, in_group
from agent.core.model import CachedRecords, Cause, Group, Member
from agent.core.neighbours import silent_members
from agent.core.observations import Observations
from agent.core.policy import Policy
from agent.core.proposals import Plan, begin_again, growth_wait_s, node_ids, required
from agent.core.reasons import (
    DataLost,
    Ended,
    Finished,
    Finishing,
    GroupReason,
    Hanging,
    NodesJoined,
    NodesLost,
    NotRetried,
    Requested,
    Training,
    Waiting,
    WorkersFailed,
)
from agent.core.records import Identity, Stored
from agent.core.view import ClusterView
from trainer_runtime.contract import EXIT_NO_RESTART

_NO_RESTART_WITHIN_S = 5.0
"""How long after one rank the others may ask for no restart, too. Until then it is not known if one node alone does."""
_WARM_WITHIN_S = 60.0
"""How long a growth waits for standby processes, from when it was first possible."""


def plan(view: ClusterView, seen: Observations, policy: Policy, now: float) -> Plan:
    """Decide the next group, the job's result, or to leave things as they are. See the module's rules."""
    if view.result is not None:
        return Plan(None, Ended(result=view.result.value.reason))
    cached = lost_data(view)
    if cached is not None:
        return _restore(cached, view, seen, policy, now)
    if view.spec is None:
        return Plan(None, DataLost(state="unknown"))
    planner = _Planner(accuse(view, seen, now), view.spec.value, seen, policy, now)
    return planner.wait_for_newer_records() or _choose(planner, view)


def _choose(planner: _Planner, view: ClusterView) -> Plan:
    if planner.spec.ending is not None:
        return planner.save_and_end(planner.spec.ending)
    if planner.group is None or not planner.group.members:
        return planner.gather()
    return _describe_hang(planner.follow(planner.group), planner.group, view, planner.seen)


def accuse(view: ClusterView, seen: Observations, now: float) -> ClusterView:
    """The view as if the rank that the others wait for had failed, if the group hangs and no rank has failed itself."""
    group = view.group.value if view.group is not None else None
    if any(report.failure is not None and is_own(report.failure) for report in view.exits):
        return view
    if group is not None:
        view = view.with_exits(with_early_end(group, view.exits))
    stalls = in_group(group, view.stalls, view.exits) if group is not None else ()
    if group is None or seen.stalled_since is None or not stalls:
        return view
    have_all_reported = len(stalls) == len(group.members)
    if not have_all_reported and now < seen.stalled_since + REPORT_WITHIN_S:
        return view
    accused = as_report(group, stalls)
    return view.with_exits((*(each for each in view.exits if each.identity != accused.identity), accused))


def _describe_hang(planned: Plan, group: Group, view: ClusterView, seen: Observations) -> Plan:
    """Add what is known of a hang to a plan without an action."""
    stalls = in_group(group, view.stalls, view.exits)
    if planned.action is not None or not stalls:
        return planned
    overdue_at = None if seen.stalled_since is None else seen.stalled_since + REPORT_WITHIN_S
    wakes = [at for at in (planned.wake_at, overdue_at) if at is not None]
    report = as_report(group, stalls)
    assert report.failure is not None  # noqa: S101 - a hang is one
    reason = Hanging(because=planned.reason, first=report.failure.in_short(report.node_id))
    return replace(planned, reason=reason, wake_at=min(wakes, default=None))


def _restore(cached: CachedRecords, view: ClusterView, seen: Observations, policy: Policy, now: float) -> Plan:
    """Restore what etcd has lost, once all agents have had time to publish their cached records."""
    until = (now if seen.data_lost_since is None else seen.data_lost_since) + policy.lease_ttl_s
    if now < until:
        return Plan(None, DataLost(state="collecting"), until)
    group, restored = cached.group, RestoredRecords(cached.spec, cached.restore_point, cached.checkpoint)
    if group is None or group.node_ranks.keys() <= seen.nodes.keys():
        kept = begin_again(None, cached.spec.run) if group is None else group
        return Plan(kept, DataLost(state="restored"), restored=restored, is_old=True)
    # A pause must not prevent the records from being restored: the next group is formed as if the job were not paused.
    active = msgspec.structs.replace(cached.spec, paused_by="")
    planner = _Planner(as_cached(cached, view), active, replace(seen, outage=None), policy, now)
    return replace(planner.follow(group), restored=restored)


def as_cached(cached: CachedRecords, view: ClusterView) -> ClusterView:
    """The view as if etcd showed the cached records that it has lost."""
    spec_revision = view.spec.mod_revision if view.spec is not None else 0
    group_revision = view.group.mod_revision if view.group is not None else 0
    return replace(
        view,
        spec=Stored(cached.spec, 0, spec_revision),
        group=Stored(cached.group, 0, group_revision) if cached.group is not None else None,
        checkpoint=Stored(cached.checkpoint, 0, 0) if cached.checkpoint is not None else None,
    ).with_exits(())


def _members_in(group: Group, who: Iterable[Identity]) -> list[Member]:
    """Those of the group, in rank order."""
    ranks = sorted(group.node_ranks[each] for each in who if each in group.node_ranks)
    return [group.members[rank] for rank in ranks]


class _Planner(Ending):
    """Chooses among the proposals."""

    def wait_for_newer_records(self) -> Plan | None:
        """Wait for nodes that may know newer records than etcd shows. None: no node may, or all have had the time.

        If etcd is an old backup, this agent, which was restarted, does not know what was lost. Nodes that were there
        before do, but may not have noticed the loss yet. (An agent that takes over no record of its node id leads only
        once the lease of the leader in that backup has ended: by then they have noticed.)
        """
        restart = self.seen.restart
        if restart is None or self.now >= restart.at + self.policy.lease_ttl_s:
            return None
        older = tuple(node.value.node_id for node in self.view.nodes if node.create_revision <= restart.revision)
        waiting = Waiting(what="newer records", node_ids=older)
        return Plan(None, waiting, restart.at + self.policy.lease_ttl_s) if older else None

    def follow(self, group: Group) -> Plan:
        """A group trains: end it when it is done, replace it after a failure or a loss, else fit it to np."""
        reported = {report.identity: report for report in self.view.exits}
        done = {who for who, report in reported.items() if report.failure is None}
        if group.node_ranks.keys() <= done:
            return self.write_result(Finished(ranks=group.world_size, group=group.number))
        if self.spec.paused_by:
            return self.begin(group) if self.must_begin(group) else self.paused()
        lost = self._unfit_members(group, done)
        returning = [m for m in lost if m.identity not in self.view.present and self._may_return(m)]
        if returning:
            until = min(self._returns_until(member) for member in returning)
            return Plan(None, Waiting(what="return", node_ids=node_ids(returning)), until)
        if len(done) < len(reported):
            return self._mend_failure(group, lost, [m for m in group.members if m.identity not in reported])
        if lost:
            return self._replace(group, "lost", self._loss(lost), is_failure=False)
        planned = self._go_on(group, len(done))
        return planned if done else self._resolve_partition(group, planned)

    def _go_on(self, group: Group, done: int) -> Plan:
        """Continue a group in which nothing has failed."""
        leaving = _members_in(group, (node.identity for node in self.view.draining))
        if leaving and not done:
            return self._drain(group, Requested(what="leave", node_ids=node_ids(leaving)))
        ids = set(self.spec.excluded)
        excluded = [member for member in group.members if member.node_id in ids] if ids else []
        if excluded and not done:
            return self._drain(group, Requested(what="exclude", node_ids=node_ids(excluded)))
        if self.spec.restart_after >= group.number and not done:
            return self.change(group, self.lineup(self.spec.np_max), "restart", Requested(what="restart"))
        if self.must_begin(group):
            return self.begin(group)
        if done:
            return Plan(None, Finishing(group=group.number, done=done, nodes=len(group.members)))
        return self._fit(group)

    def _unfit_members(self, group: Group, done: AbstractSet[Identity] = frozenset()) -> list[Member]:
        """The members that are gone or cannot train, without those whose ranks are done."""
        gone = group.node_ranks.keys() - self.view.present.keys()
        return _members_in(group, (gone | {node.identity for node in self.view.unfit}) - done)

    def _loss(self, lost: list[Member]) -> NodesLost:
        unfit = {node.node_id: node.unfit for node in self.view.unfit if node.unfit is not None}
        return NodesLost(node_ids=node_ids(lost), unfit=tuple((node_id, unfit[node_id]) for node_id in sorted(unfit)))

    def _may_return(self, member: Member) -> bool:
        """Whether a member that is missing right after an outage of etcd has time to return: a lease length, once.

        It has none if its neighbours do not hear it either.
        """
        who = member.identity
        if member.node_id in self.view.node_ids or self.now >= self._returns_until(member):
            return False
        return not (who in self.seen.came_since_outage or any(who == silent for silent, _ in self.seen.silent_since))

    def _returns_until(self, member: Member) -> float:
        """Until when. Later outages do not give it more time: an etcd that is away every other moment has many."""
        if self.seen.outage is None:
            return float("-inf")
        gone_since = self.seen.gone_since.get(member.identity, self.now)
        return min(self.seen.outage.ended_at, gone_since) + self.policy.lease_ttl_s

    def _mend_failure(self, group: Group, lost: list[Member], silent: list[Member]) -> Plan:
        found = first_failure(self.view.exits)
        assert found is not None  # noqa: S101 - the caller saw a failure
        report, failure = found
        reason = WorkersFailed(first=failure.in_short(report.node_id))
        planned = self._end_without_restart(group, reason, failure, silent)
        if planned is not None:
            return planned
        is_charged = counts(group, self.view.exits, failure)
        if lost:
            is_charged = is_charged and not (failure.is_peer_lost or failure.unreadable)
            return self._replace(group, "lost", self._loss(lost), is_failure=is_charged)
        if failure.unreadable:
            return self._replace(group, "failed", reason, is_failure=False)
        if failure.is_port_taken:
            return self._replace(group, "port", reason, is_failure=False)
        suspected, is_partition_cause = silent_members(self.view), self.is_partition_cause(failure)
        awaited = [member for member in silent if failure.is_peer_lost or member.identity in suspected]
        asked = Waiting(what="lease", node_ids=node_ids(awaited or group.members), because=reason)
        since = self._reported_since()
        since = max(since, self.seen.partitioned_since or 0.0) if is_partition_cause else since
        has_cause = not awaited and not is_partition_cause
        waiting = self._wait_for_the_same(reason, silent) if has_cause else self.wait_for_cause(asked, since)
        if waiting is not None:
            return waiting
        without = self.without(group, self._remaining(group)).node_ids if is_partition_cause else ()
        new = {each.node_id for each in self.tally().left_out} - {each.node_id for each in group.left_out}
        reason = msgspec.structs.replace(reason, unreachable=without, left_out=tuple(sorted(new)))
        is_excused = is_partition_cause and (failure.is_peer_lost or failure.hang is not None)
        own = {each.node_id for each in self.view.exits if each.failure is not None and is_own(each.failure)}
        failed = frozenset({*own, report.node_id})
        return self._replace(group, "failed", reason, is_failure=is_charged and not is_excused, failed=failed)

    def _end_without_restart(
        self, group: Group, reason: WorkersFailed, failure: Failure, silent: list[Member]
    ) -> Plan | None:
        """End the job if a rank asks for it, but not for the only node that cannot run the script."""
        if failure.exit_code != EXIT_NO_RESTART:
            return None
        until = self._reported_since() + _NO_RESTART_WITHIN_S
        waiting = Plan(None, Waiting(what="same error", node_ids=node_ids(silent), because=reason), until)
        is_awaited = bool(silent) and self.now < until
        if not self._can_do_without(group, reason.first.node_id):
            # A rank that left as rank 0 did is not the cause, but may be the first that is reported.
            is_consequence = failure.is_peer_lost and is_awaited
            return waiting if is_consequence else self.end(NotRetried(first=reason.first, why="asked"))
        return waiting if is_awaited else None

    def _can_do_without(self, group: Group, node_id: str) -> bool:
        """Whether this node joined a group that trained, its ranks alone failed at once, and the others are enough."""
        others = [member for member in self.lineup(self.spec.np_max) if member.node_id != node_id]
        is_newcomer = node_id in group.grown_by or node_id == group.failed_early
        return is_newcomer and self.tally().failed_early == node_id and len(others) >= required(self.spec, group)

    def _wait_for_the_same(self, reason: WorkersFailed, silent: list[Member]) -> Plan | None:
        """Wait for the other ranks to fail by the same error in the script, most likely at about the same time."""
        until = min(self._reported_since(), self.seen.group_since + EARLY_S) + self.policy.same_within_s
        if not reason.first.script_error or not silent or self.now >= until:
            return None
        return Plan(None, Waiting(what="same error", node_ids=node_ids(silent), because=reason), until)

    def _resolve_partition(self, group: Group, planned: Plan) -> Plan:
        found = self.resolve(group, planned)
        if isinstance(found, Plan):
            return found
        return self._replace(group, "lost", self.without(group, found), is_failure=False)

    def _reported_since(self) -> float:
        since = (self.seen.reported_since, self.seen.stalled_since)
        return min((each for each in since if each is not None), default=self.now)

    def _replace(
        self,
        group: Group,
        cause: Cause,
        reason: GroupReason,
        *,
        is_failure: bool,
        failed: AbstractSet[str] = frozenset(),
    ) -> Plan:
        """Form the next group after a failure or a loss. `failed`: nodes whose ranks failed, if their agents live."""
        failures = self.tally(is_failure=is_failure)
        found = first_failure(self.view.exits)
        if is_failure and found is not None:
            first = found[1].in_short(found[0].node_id)
            if failures.is_script_error_again and self.policy.ends_at_script_errors:
                return self.end(NotRetried(first=first, why="script error"))
            if failures.restarts > self.policy.max_restarts:
                return self.end(NotRetried(first=first, why="budget", restarts=self.policy.max_restarts))
        has_new_steps = highest_step(group, self.view.exits) > group.step
        wait_s = back_off_s(failures.failed_reads or (0 if has_new_steps else failures.restarts))
        until = self.seen.group_since + wait_s
        if cause == "failed" and self.now < until:
            counted = 0 if failures.failed_reads else failures.restarts
            return Plan(None, Waiting(what="retry", because=reason, failures=counted, within_s=wait_s), until)
        members = self._without(group, failed, failures) or self._remaining(group)
        if len(members) < required(self.spec, group):
            return self.form((), "wait", reason, is_failure=is_failure)
        return self.form(members, cause, reason, is_failure=is_failure)

    def _without(self, group: Group, failed: AbstractSet[str], failures: FailureCount) -> tuple[Member, ...]:
        """The members that go on without the nodes whose ranks failed, which join again once these have set up.

        Empty: all are to wait for them, since too few others can train, or since the job has failed twice at the same
        step: the cause may be in the data, and not in the node.
        """
        is_same_step = highest_step(group, self.view.exits) <= group.step
        if not (failed and self.spec.in_place) or (failures.restarts > 1 and is_same_step):
            return ()
        found = self.lineup(self.spec.np_max + len(failed))
        others = tuple(member for member in found if member.node_id not in failed)[: self.spec.np_max]
        stay = [member for member in others if group.node_rank(member.identity) is not None]
        can_move = bool(stay) and all(member.identity in self.view.movable for member in stay)
        return others if can_move and len(others) >= required(self.spec, group) else ()

    def _remaining(self, group: Group) -> tuple[Member, ...]:
        """The members that go on after a loss.

        After a partition these are the ones that reach each other. Nodes that are known to reach the group are
        preferred, if they are enough.
        """
        need, found = required(self.spec, group), first_failure(self.view.exits)
        failure = found[1] if found is not None else None
        tries = [self.connected_members(group)] if self.is_partition_cause(failure) else []
        tries.append(self.lineup(self.spec.np_max))
        enough = (members for members in tries if len(members) >= need)
        return next(enough, self.lineup(self.spec.np_max, is_picky=False))

    def _drain(self, group: Group, reason: GroupReason) -> Plan:
        members = self.lineup(self.spec.np_max)
        if len(members) < required(self.spec, group):  # then the others wait until a newcomer has set up
            members = self.lineup(self.spec.np_max, needs_set_up=False)
        # With too few nodes left it is a wait, but still a drain: no rank hangs, so workers get time to end.
        members = members if len(members) >= required(self.spec, group) else ()
        awaited = self.awaited(group, PlannedChange("drain", reason, members))
        if awaited is not None:
            return awaited
        stays = {member.identity for member in members} & {member.identity for member in group.members}
        is_saved = are_ranks_quiesced(self.seen.handoff_progress, self.policy, self.now)
        if not stays and not is_saved and self.leaving() and can_hand_off(group, self.view):
            members = ()  # those that leave save what their memory holds, before others go on
        return self.form(members, "drain", reason)

    def _fit(self, group: Group) -> Plan:
        size, goal = len(group.members), self.spec.np_max
        if not self.spec.in_place and all(member.identity in self.view.movable for member in group.members):
            spec = msgspec.structs.replace(self.spec, in_place=True, revision=self.spec.revision + 1)
            return Plan(spec, Training(nodes=size, np=self.spec.np))
        if size > goal:
            members = self.lineup(goal)
            return self.change(group, members, "scale", Requested(what="np", np=self.spec.np))
        grown = self.lineup(goal)
        # A group that is entered in place makes a step first: ranks that have not cannot move, and would be ended.
        is_ready = not group.in_place or all(member.identity in self.view.started for member in group.members)
        if is_ready and self.view.order.can_grow:
            return self._grow(group, grown)
        if size < goal and self.view.order.new:
            ready = {member.identity for member in grown}
            later = [each for each in self.lineup(goal, needs_set_up=False) if each.identity not in ready]
            if later:
                return Plan(None, Waiting(what="set up", node_ids=node_ids(later), because=Training(nodes=size)))
        if size < self.spec.np_min:
            return Plan(None, Training(nodes=size, np=self.spec.np, missing=goal - len(grown)))
        return Plan(None, Training(nodes=size, np=self.spec.np, left_out=self.left_out()))

    def _grow(self, group: Group, grown: tuple[Member, ...]) -> Plan:
        """Admit new nodes: at once if np is reached, else a settle window after the last arrival.

        The window is longer each time that such a node was lost again. While the ranks have stopped for a handoff,
        nodes that arrive are admitted with the others, since no moment is better. Otherwise the growth waits until the
        standby processes of all are ready, for a minute at most.
        """
        is_full = len(grown) == self.spec.np_max and group.flaps == 0
        settle_s = 0.0 if is_full else growth_wait_s(self.policy, group)
        until, there = self.seen.last_arrival(grown) + settle_s, self.there(grown)
        waiting = self.wait_a_moment(there, until)
        nodes = self.view.present
        cold = [] if self.spec.in_place else [each for each in grown if nodes[each.identity].value.is_warming]
        if cold:
            until = (self.seen.grows_since or self.now) + settle_s + _WARM_WITHIN_S
            training = Training(nodes=len(group.members))
            waiting = Plan(None, Waiting(what="warm", node_ids=node_ids(cold), because=training), until)
        if self.now < until and not are_ranks_quiesced(self.seen.handoff_progress, self.policy, self.now):
            return waiting
        new = [member for member in grown if group.node_rank(member.identity) is None]
        joined = NodesJoined(node_ids=node_ids(new), np=self.spec.np)
        return self.change(group, grown, "join", joined if is_full else there)
