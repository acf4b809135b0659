"""Plan the next group from a whole view of the job.

The leader calls `plan` after every change, and whenever the plan asked for it. It decides from the present state, never
from what changed, so a missed or repeated event does no harm. The rules:

- At the first start, and after a wait, a group is formed at once if the maximum number of nodes is there. Between
  minimum and maximum it is formed after a settle window without another arrival (five windows at most).
- np is a goal: a running group trains on until the nodes for a larger one are there. Only a *lost* member makes the job
  wait, and only if fewer nodes are left than it must restore: the minimum, or the last size reached if np was never
  reached.
- A newcomer that joins and is lost again costs two restarts. Each time this happens, the next growth waits twice as
  long.
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
  restarted, if the other nodes are enough. So a new node without the data or a module does not end a healthy job.
- If the checkpoint cannot be read, the job waits for it: the next group is tried with another rank 0, after longer and
  longer delays.
- A group whose ranks make no step is ended as if one rank, the one that the others wait for, had failed (`hangs.py`).
- A member that is draining, unfit, or excluded by an operator is left out of the next group, which is due at once.
- A growth restarts every rank. So the group trains on until the standby processes of new and present members are ready,
  since a rank would otherwise spend seconds on imports first; for a minute at most. A loss or a failure does not wait
  for standby processes.
- Once a member has finished, no planned change disturbs the others. While the job is paused, nothing changes at all.
- Before a planned change (join, scale, drain) the ranks of the group stop after the same step (`handoff.py`).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from agent.core.budget import EARLY_S, EXIT_NO_RESTART, agent_exit_code, back_off_s, counts, describe, is_own
from agent.core.cached_records import lost_data
from agent.core.causes import first_failure, with_early_end
from agent.core.effects import RestoredRecords
from agent.core.handoff import PlannedChange, are_ranks_quiesced
from agent.core.hangs import REPORT_WITHIN_S, as_report, in_group
from agent.core.model import CachedRecords, Cause, ClusterView, Failure, Group, Identity, Member, Policy, Stored
from agent.core.neighbours import silent_members
from agent.core.observations import Observations
from agent.core.partitions import PartitionView
from agent.core.proposals import Plan, begin_again, growth_wait_s, names, nodes, required
from agent.core.rank_order import can_grow, warming
from agent.core.totals import count
from agent.errors import EXIT_BUDGET, EXIT_TIMEOUT

_SETTLE_WINDOWS = 5
_LEFT_OUT = "its ranks alone failed twice before their first step"
_WARM_WITHIN_S = 60.0
"""How long a growth waits for standby processes, from when it was first possible."""


def plan(view: ClusterView, seen: Observations, policy: Policy, now: float) -> Plan:
    """Decide the next group, the job's result, or to leave things as they are. See the module's rules."""
    if view.result is not None:
        return Plan(None, f"the job has ended: {view.result.value.reason}")
    cached = lost_data(view)
    if cached is not None:
        return _restore(cached, view, seen, policy, now)
    if view.spec is None:
        return Plan(None, "etcd has lost the job, and no node has it cached")
    planner = _Planner(accuse(view, seen, now), view.spec.value, seen, policy, now)
    if planner.spec.stopped_by:
        return planner.stop()
    if planner.group is None or not planner.group.members:
        return planner.gather()
    return _describe_hang(planner.follow(planner.group), planner.group, view, seen)


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
    heard_at = None if seen.stalled_since is None else seen.stalled_since + REPORT_WITHIN_S
    wakes = [at for at in (planned.wake_at, heard_at) if at is not None]
    report = as_report(group, stalls)
    assert report.failure is not None  # noqa: S101 - a hang is one
    reason = f"{planned.reason}; {describe(report, report.failure)}"
    return replace(planned, reason=reason, wake_at=min(wakes, default=None))


def _restore(cached: CachedRecords, view: ClusterView, seen: Observations, policy: Policy, now: float) -> Plan:
    """Restore what etcd has lost, once all agents have had time to publish their cached records."""
    until = (now if seen.data_lost_since is None else seen.data_lost_since) + policy.lease_ttl_s
    if now < until:
        return Plan(None, "etcd has lost data; waiting for all members to publish their cached records", until)
    group, restored = cached.group, RestoredRecords(cached.spec, cached.resume, cached.checkpoint)
    if group is None or all(m.identity in dict(seen.nodes) for m in group.members):
        kept = begin_again(None, cached.spec.run) if group is None else group
        return Plan(kept, "etcd had lost data; all members are back", restored=restored, is_old=True)
    # A pause must not prevent the records from being restored: the next group is formed as if the job were not paused.
    active = msgspec.structs.replace(cached.spec, paused_by="")
    planner = _Planner(as_cached(cached, view), active, replace(seen, outage_ended_at=None), policy, now)
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


class _Planner(PartitionView):
    """Chooses among the proposals."""

    def stop(self) -> Plan:
        """End the job for an operator, once a group that trains has saved its state."""
        group, reason = self.group, f"stopped by {self.spec.stopped_by}"
        is_whole = group is not None and all(m.identity in self._fit_nodes() for m in group.members)
        if group is not None and group.members and is_whole and not self.view.exits:
            awaited = self.awaited(group, PlannedChange("drain", reason, ()))
            if awaited is not None:
                return awaited
        return self.finish(0, reason, succeeded=False)

    # No group trains

    def gather(self) -> Plan:
        """No group trains: form one as soon as enough nodes are there."""
        if self.spec.paused_by:
            return self.paused()
        members = self.lineup(self.spec.np_max)
        need = required(self.spec, self.group)
        if len(members) >= self.spec.np_max:
            return self.form(members, "start", f"all of {nodes(len(members))} there")
        if len(members) >= need:
            return self._settle(members)
        return self._wait_for_nodes(members, need)

    def _settle(self, members: tuple[Member, ...]) -> Plan:
        until = min(
            self.seen.last_arrival(members) + self.policy.settle_s,
            self.seen.group_since + _SETTLE_WINDOWS * self.policy.settle_s,
        )
        there = self._there(members)
        return self.form(members, "start", there) if self.now >= until else self._wait_a_moment(there, until)

    def _there(self, members: tuple[Member, ...]) -> str:
        return f"{nodes(len(members))} there (np {self.spec.np})"

    def _wait_a_moment(self, there: str, until: float) -> Plan:
        return Plan(None, f"{there}; waiting a moment for more", until)

    def _wait_for_nodes(self, members: tuple[Member, ...], need: int) -> Plan:
        have = ", ".join(member.node_id for member in members) or "none"
        reason = f"waiting for {need - len(members)} of {nodes(need)}; here: {have}"
        if self.group is not None:
            reason += f"; {self.group.reason}{self._who_is_left_out()}"
        if self.policy.elastic_timeout_s is None:
            return Plan(None, reason)
        waits_since = self.now if self.seen.waits_since is None else self.seen.waits_since
        give_up_at = waits_since + self.policy.elastic_timeout_s
        if self.now < give_up_at:
            return Plan(None, reason, give_up_at)
        why = f"gave up after {self.policy.elastic_timeout_s:g} s of {reason}"
        return self.finish(EXIT_TIMEOUT, why)

    # A group trains

    def follow(self, group: Group) -> Plan:
        """A group trains: end it when it is done, replace it after a failure or a loss, else fit it to np."""
        reported = {report.identity: report for report in self.view.exits}
        done = {who for who, report in reported.items() if report.failure is None}
        here = done | {node.value.member.identity for node in self.view.nodes}
        fit = done | self._fit_nodes()
        if all(member.identity in done for member in group.members):
            return self.finish(0, f"all {group.world_size} ranks finished in group {group.number}")
        if self.spec.paused_by:
            return self.begin(group) if self.must_begin(group) else self.paused()
        returning = [m for m in group.members if m.identity not in here and self._may_return(m)]
        if returning:
            return Plan(None, f"etcd was away; waiting for {names(returning)} to return", self._returns_until())
        lost = [m for m in group.members if m.identity not in fit]
        if len(done) < len(reported):
            return self._mend_failure(group, lost, [m for m in group.members if m.identity not in reported])
        if lost:
            return self._replace(group, "lost", self._loss(lost), is_failure=False)
        planned = self._go_on(group, len(done))
        return planned if done else self._resolve_partition(group, planned)

    def _go_on(self, group: Group, done: int) -> Plan:
        """Continue a group in which nothing has failed."""
        draining = {node.value.member.identity for node in self.view.nodes if node.value.is_draining}
        leaving = [member for member in group.members if member.identity in draining]
        if leaving and not done:
            return self._drain(group, f"{names(leaving)} was asked to leave")
        excluded = [member for member in group.members if member.node_id in self.spec.excluded]
        if excluded and not done:
            return self._drain(group, f"{names(excluded)} was excluded by an operator")
        if self.spec.restart_after >= group.number and not done:
            return self.change(group, self.lineup(self.spec.np_max), "restart", "an operator asked for a restart")
        if self.must_begin(group):
            return self.begin(group)
        if done:
            return Plan(None, f"group {group.number}: {done} of {len(group.members)} nodes have finished")
        return self._fit(group)

    def _fit_nodes(self) -> set[Identity]:
        return {node.value.member.identity for node in self.view.nodes if not node.value.unfit}

    def _loss(self, lost: list[Member]) -> str:
        unfit = {node.value.node_id: node.value.unfit for node in self.view.nodes if node.value.unfit}
        return f"lost {names(lost)}" + "".join(f"; {name} is unfit: {why}" for name, why in sorted(unfit.items()))

    def _may_return(self, member: Member) -> bool:
        """Whether a member that is missing right after an outage of etcd has time to return: a lease length, once."""
        until = self._returns_until()
        is_replaced = any(node.value.node_id == member.node_id for node in self.view.nodes)
        return until is not None and self.now < until and member.identity not in self.seen.ever_seen and not is_replaced

    def _returns_until(self) -> float | None:
        ended_at = self.seen.outage_ended_at
        return ended_at + self.policy.lease_ttl_s if ended_at is not None else None

    def _mend_failure(self, group: Group, lost: list[Member], silent: list[Member]) -> Plan:
        found = first_failure(self.view.exits)
        assert found is not None  # noqa: S101 - the caller saw a failure
        report, failure = found
        what = describe(report, failure)
        if failure.exit_code == EXIT_NO_RESTART:
            return self.finish(agent_exit_code(failure), f"{what}, which asks for no restart")
        is_charged = counts(group, self.view.exits, failure)
        if lost:
            is_charged = is_charged and not (failure.is_peer_lost or failure.unreadable)
            return self._replace(group, "lost", self._loss(lost), is_failure=is_charged)
        if failure.unreadable:
            what = f"waiting for the checkpoint: {report.node_id} cannot read {failure.unreadable}"
            return self._replace(group, "failed", what, is_failure=False)
        if failure.is_port_taken:
            return self._replace(group, "port", f"the master's port on {report.node_id} was taken", is_failure=False)
        suspected, is_partition_cause = silent_members(self.view), self.is_partition_cause(failure)
        awaited = [member for member in silent if failure.is_peer_lost or member.identity in suspected]
        how = " of a broken connection" if failure.is_peer_lost else ""
        asked, since = f"{what}{how}; checking the lease of {names(awaited or group.members)}", self._reported_since()
        since = max(since, self.seen.partitioned_since or 0.0) if is_partition_cause else since
        has_cause = not awaited and not is_partition_cause
        waiting = self._wait_for_the_same(failure, silent) if has_cause else self.wait_for_cause(asked, since)
        if waiting is not None:
            return waiting
        without = self.describe_left_out(group, self._remaining(group)) if is_partition_cause else ""
        what = f"{what}; {without}" if without else what
        new = {each.node_id for each in self.tally().left_out} - {each.node_id for each in group.left_out}
        for node_id in sorted(new):
            what += f"; {node_id} is left out until its agent is started again: {_LEFT_OUT}"
        is_excused = is_partition_cause and (failure.is_peer_lost or bool(failure.hang))
        return self._replace(group, "failed", what, is_failure=is_charged and not is_excused)

    def _wait_for_the_same(self, failure: Failure, silent: list[Member]) -> Plan | None:
        """Wait for the other ranks to fail by the same error in the script, most likely at about the same time."""
        until = min(self._reported_since(), self.seen.group_since + EARLY_S) + self.policy.same_within_s
        if not failure.mistake or not silent or self.now >= until:
            return None
        return Plan(None, f"{failure.mistake}; waiting for the same error on {names(silent)}", until)

    def _resolve_partition(self, group: Group, planned: Plan) -> Plan:
        found = self.resolve(group, planned)
        if isinstance(found, Plan):
            return found
        return self._replace(group, "lost", self.describe_left_out(group, found), is_failure=False)

    def _reported_since(self) -> float:
        since = (self.seen.reported_since, self.seen.stalled_since)
        return min((each for each in since if each is not None), default=self.now)

    def _replace(self, group: Group, cause: Cause, reason: str, *, is_failure: bool) -> Plan:
        failures = self.tally(is_failure=is_failure)
        found = first_failure(self.view.exits)
        if is_failure and found is not None and failures.is_mistake_again and self.policy.ends_at_mistakes:
            why = "every rank, twice in a row; --max_restarts=N tries N times"
            return self.finish(agent_exit_code(found[1]), f"{describe(*found)}, as did {why}")
        if is_failure and found is not None and failures.restarts > self.policy.max_restarts:
            code = EXIT_BUDGET if self.policy.max_restarts else agent_exit_code(found[1])
            spent = f"{count(self.policy.max_restarts, 'restart')} without progress"
            return self.finish(code, f"{describe(*found)}, after {spent}")
        until = self.seen.group_since + back_off_s(failures.unread or failures.restarts)
        if cause == "failed" and self.now < until:
            why = "" if failures.unread else f": {count(failures.restarts, 'failure')} without progress"
            return Plan(None, f"{reason}{why}; trying again in a moment", until)
        members = self._remaining(group)
        if len(members) < required(self.spec, group):
            return self.form((), "wait", reason, is_failure=is_failure)
        return self.form(members, cause, reason, is_failure=is_failure)

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

    def _drain(self, group: Group, reason: str) -> Plan:
        members = self.lineup(self.spec.np_max)
        # With too few nodes left it is a wait, but still a drain: no rank hangs, so workers get time to end.
        return self.change(group, members if len(members) >= required(self.spec, group) else (), "drain", reason)

    def _fit(self, group: Group) -> Plan:
        size, goal = len(group.members), self.spec.np_max
        if size > goal:
            members = self.lineup(goal)
            return self.change(group, members, "scale", f"np is now {self.spec.np}")
        grown = self.lineup(goal)
        if can_grow(self.view):
            return self._grow(group, grown)
        if size < self.spec.np_min:
            missing = goal - len(grown)
            return Plan(None, f"training on {nodes(size)}; {missing} more needed for np {self.spec.np}")
        return Plan(None, f"training on {nodes(size)} (np {self.spec.np}){self._who_is_left_out()}")

    def _who_is_left_out(self) -> str:
        left_out = self.group.left_out if self.group is not None else ()
        here = sorted(node.value.node_id for node in self.view.nodes if node.value.identity in left_out)
        return f"; left out: {', '.join(here)} ({_LEFT_OUT})" if here else ""

    def _grow(self, group: Group, grown: tuple[Member, ...]) -> Plan:
        """Admit new nodes: at once if np is reached, else a settle window after the last arrival.

        The window is longer each time that such a node was lost again. While the ranks have stopped for a handoff,
        nodes that arrive are admitted with the others, since no moment is better. Otherwise the growth waits until the
        standby processes of all are ready, for a minute at most.
        """
        is_full = len(grown) == self.spec.np_max and group.flaps == 0
        settle_s = 0.0 if is_full else growth_wait_s(self.policy, group)
        until, there = self.seen.last_arrival(grown) + settle_s, self._there(grown)
        waiting = self._wait_a_moment(there, until)
        cold = [member for member in grown if member.identity in warming(self.view)]
        if cold:
            until = (self.seen.grows_since or self.now) + settle_s + _WARM_WITHIN_S
            training = f"training on {nodes(len(group.members))}"
            waiting = Plan(None, f"{training}; waiting for {names(cold)} to be warm", until)
        if self.now < until and not are_ranks_quiesced(self.seen.handoff_progress, self.policy, self.now):
            return waiting
        new = [member for member in grown if group.node_rank(member.identity) is None]
        return self.change(group, grown, "join", f"{names(new)} joined (np {self.spec.np})" if is_full else there)
