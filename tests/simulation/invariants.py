"""The design's invariants, checked as things happen in the simulation.

| # | invariant | where |
|---|---|---|
| 1 | one group per number; numbers only grow | `_on_group`, at each write of `group` |
| 2 | all agents of a group agree on it | `on_start`: workers start only for the record of that number |
| 3 | a committed checkpoint was eligible in the group current at that moment; it never goes back | `_on_checkpoint` |
| 4 | no worker of a group starts where one of another lives | `on_start` |
| 5 | an agent's workers die with it | by construction for a kill; `on_exit` for an end of its own |
| 6 | training goes on once faults have ended | `Cluster.run_until`, in every scenario and random cluster |
| 7 | a finished job stays finished | `_on_result`, `_on_group` |
| 8 | a worker failure counts once, a membership change never | `_check_restarts`, at each next group |
| 9 | no step before `restore_point`; the copy it names is the newest on the true history | `on_begin`, `_on_resume` |
| 10 | what `checkpoint` names is readable | `check`, after every step |
| 11 | np and result survive the loss of etcd's data | `_on_spec`; `_on_result` |
| 12 | no step is repeated after a handoff; no rank leaves for one without a newer group | `_on_resume`; `on_leave` |
| 14 | a member's status loses nothing that was in it, while etcd keeps its data | `_on_status` |

Numbers, np and commits that no living agent knows cannot survive the loss of etcd's data: `forget` takes them out of
what is expected. Which steps are true history is known from the ranks (`training.History`), never from the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulation.etcd import KEYS, LOOK_S
from simulation.incidents import Incidents
from simulation.training import World, complete_copies
from simulation.transcript import named

from agent.core.budget import is_own
from agent.core.causes import first_failure
from agent.core.failures import ExitReport
from agent.core.hangs import standing
from agent.core.member_status import MemberStatus
from agent.core.model import CachedRecords, Group, HandoffRequest, Leader, Node, Result, Spec
from agent.core.reasons import Requested
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.core.view import ClusterView
from agent.store.api import ChangeBatch, KeyChange, KeyValue
from agent.store.keys import encode
from trainer_runtime.contract import EXIT_RESTART

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.cluster import Cluster

_PLAIN_WINDOWS = 60
"""So many of training are progress of a script that commits nothing; not taken from the core, which is tested by it."""


class Invariants:
    """What must hold, and what is remembered to check it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.groups: dict[int, Group] = {}
        self.restore_points: dict[int, RestorePoint] = {}
        self.commits: dict[int, Checkpoint] = {}
        self.specs: dict[int, Spec] = {}
        self._rollbacks: dict[int, StateId] = {}
        """Where a group really began."""
        self.incidents = Incidents(cluster)
        self._stood: tuple[World, StateId] | None = None
        """Ranks that were quiesced when the next group was written, and after which step."""
        self._is_stood_in_memory = False
        self.result: Result | None = None
        self.ended_at = float("inf")
        """When the result was written."""
        self._nodes: dict[str, str] = {}
        self._statuses: dict[str, MemberStatus] = {}
        """Those in etcd, by key."""
        self._own_failures: dict[int, int] = {}
        self._run = ""
        self._has_lost_data = False
        self._checked: tuple[KeyValue | None, int] = (None, 0)
        self.handlers = {
            KEYS.spec: self._on_spec,
            KEYS.group: self._on_group,
            KEYS.restore_point: self._on_resume,
            KEYS.checkpoint: self._on_checkpoint,
            KEYS.handoff: self._on_handoff,
            KEYS.result: self._on_result,
        }

    def check(self) -> None:
        """Whatever can be seen at any moment. Nothing can have changed that rests on neither of the two."""
        files = self._cluster.training.files
        seen = (self._cluster.etcd.data.items.get(KEYS.checkpoint), files.deletions)
        if seen == self._checked:
            return
        self._checked = seen
        committed = self._cluster.etcd.record(KEYS.checkpoint, Checkpoint)
        is_newest = committed is not None and committed.number == max(self.commits, default=0)
        if committed is not None and is_newest:  # an old backup may show an older one, until it is mended
            assert files.is_readable(committed), f"{committed.name} cannot be read"

    def forget(self) -> None:
        """With etcd's data all is gone for good that no living agent knows."""
        self._keep_only(self._known())
        self.result = self._stood = None
        self.incidents.forget()
        self._nodes.clear()
        self._statuses.clear()
        self._has_lost_data = True

    def _keep_only(self, known: list[CachedRecords]) -> None:
        number = max((each.number for each in known), default=0)
        restore_point = max((each.restore_point.group for each in known if each.restore_point is not None), default=0)
        count = max((each.checkpoint.number for each in known if each.checkpoint is not None), default=0)
        revision = max((each.spec.revision for each in known), default=0)
        self.groups = {key: group for key, group in self.groups.items() if key <= number}
        self.restore_points = {key: each for key, each in self.restore_points.items() if key <= restore_point}
        self.commits = {key: each for key, each in self.commits.items() if key <= count}
        self.specs = {key: each for key, each in self.specs.items() if key <= revision}

    def _known(self) -> list[CachedRecords]:
        """What is remembered by agents that can publish it: their node id is not held by another one."""
        able = (agent.state for agent in self._cluster.agents if not agent.is_gone and agent.state.holder is None)
        return [state.cached for state in able if state.cached is not None]

    def is_known(self) -> bool:
        """Whether agents that are not about to leave know the last group and the last commit."""
        here = (agent.state for agent in self._cluster.agents if not agent.is_gone)
        stay = [state for state in here if state.drain_until is None and state.leaving is None]
        known = [state.cached for state in stay if state.cached is not None]
        number = max((each.number for each in known), default=0)
        count = max((each.checkpoint.number for each in known if each.checkpoint is not None), default=0)
        return (number, count) == (max(self.groups, default=0), max(self.commits, default=0))

    # Workers

    def on_start(self, agent: Agent, group: Group, run: str) -> None:
        assert agent.ranks.group is None, f"workers of {agent.running} live on {agent.name} when {group.number} starts"
        is_of_others = self._is_of_others()  # first: what is known may change by it
        known = self.groups.get(group.number, group)
        assert run == self._run or is_of_others, f"{agent.name} trains as {run}"
        assert known == group or is_of_others, f"{agent.name} has another group {group.number}"

    def on_set_up(self, agent: Agent, joined: Group, run: str) -> None:
        """Processes are started that wait to be let in: of a node that is no member of the group that runs."""
        assert agent.ranks.group is None, f"workers of {agent.running} live on {agent.name} when others set up"
        assert run == self._run or self._is_of_others(), f"{agent.name} sets up as {run}"
        known = self.groups.get(joined.number)
        is_member = known is not None and known.node_rank(agent.state.identity) is not None
        assert not is_member, f"{agent.name} sets up to join group {joined.number}, and is in it"

    def on_move(self, agent: Agent, group: Group, run: str) -> None:
        """Living ranks enter another group: a newer one, written, and entered in place."""
        last = agent.ranks.group
        assert last is not None
        assert group.in_place, f"ranks on {agent.name} move into group {group.number}, for which all start anew"
        assert group.number > last.number, f"ranks on {agent.name} move from group {last.number} to {group.number}"
        is_of_others = self._is_of_others()
        known = self.groups.get(group.number, group)
        assert (run == self._run and known == group) or is_of_others, f"{agent.name} moves to an unknown group"

    def on_exit(self, agent: Agent) -> None:
        assert agent.ranks.group is None, f"{agent.name} leaves its workers behind"

    def on_gone(self) -> None:
        """An agent has ended, was killed, or lost its node id to another one.

        After a loss of data, what only it knew is gone with it.
        """
        cluster = self._cluster
        if not self._has_lost_data:
            return
        known, spec = self._known(), cluster.etcd.record(KEYS.spec, Spec)
        if spec is not None:
            shown = cluster.group, cluster.restore_point, cluster.checkpoint
            known.append(CachedRecords(spec=spec, group=shown[0], restore_point=shown[1], checkpoint=shown[2]))
        self._keep_only(known)

    def on_refused(self, agent: Agent) -> None:
        """An agent ends since another has its node id: that one lived as it began to wait, or a backup says so."""
        state = agent.state
        assert state.holder is not None
        other = self._cluster.by_serial[state.holder.node.pid]
        since = self._cluster.now - (agent.clock() - state.held_since)
        is_dead = other.gone_at is not None and other.gone_at < since
        etcd, ttl_s = self._cluster.etcd, state.policy.lease_ttl_s
        # A new leader of etcd has just renewed the dead one's lease, and the agent that waits had no request under way.
        is_renewed = etcd.renewed_at + ttl_s >= self._cluster.now
        is_excused = self._cluster.has_jumped or etcd.restored_at >= since or is_renewed
        assert not is_dead or is_excused, f"{agent.name} gives way to one that is dead"

    def on_leave(self, agent: Agent) -> None:
        group, state = agent.ranks.group, agent.state
        assert group is not None
        goes = state.leaving is not None or group.node_rank(state.identity) is None
        assert goes or max(self.groups, default=0) > group.number, f"ranks on {agent.name} leave, and nothing follows"

    def on_own_failure(self, number: int) -> None:
        self._own_failures[number] = self._own_failures.get(number, 0) + 1

    def on_hang(self, number: int) -> None:
        """An agent reports that its ranks are stalled: that may be counted as a failure of theirs."""
        self.on_own_failure(number)

    def on_begin(self, group: Group, restore_point: RestorePoint, copy: StateId | None) -> None:
        told = self.restore_points.get(group.number)
        assert told is None or told == restore_point, f"group {group.number} begins by a record that was never written"
        committed = restore_point.checkpoint.copy if restore_point.checkpoint is not None else None
        if copy != restore_point.copy:
            assert committed in self._cluster.training.files.damaged, "a rollback without damage"
            return
        assert self._cluster.training.history.is_after(copy, committed), "begins behind the committed checkpoint"

    # Records

    def on_write(self, batch: ChangeBatch) -> None:
        for change in batch.changes:
            handler = self.handlers.get(change.key)
            if handler is not None and (change.key == KEYS.spec or not self._is_of_others()):
                handler({each.key for each in batch.changes})
            elif change.key.startswith(KEYS.nodes):
                self._on_node(change)
            elif change.key.startswith(KEYS.statuses()):
                self._on_status(change)
            if change.key.startswith((KEYS.incidents, KEYS.statuses())) and not self._is_of_others():
                self.incidents.on_write(change)

    def _on_node(self, change: KeyChange) -> None:
        node = self._cluster.etcd.record(change.key, Node)
        if node is None:
            self._nodes.pop(change.key, None)
            self.incidents.on_missed()
            return
        if node.unfit:
            self.incidents.on_missed()
        assert self._nodes.setdefault(change.key, node.incarnation) == node.incarnation, f"two are {node.node_id}"

    def _on_status(self, change: KeyChange) -> None:
        """A member reports about a group while that is the current one, and withdraws nothing that it reported."""
        last = self._statuses.pop(change.key, None)
        status = self._cluster.etcd.record(change.key, MemberStatus)
        if status is None:
            return
        self._statuses[change.key] = status
        group, writer = self._cluster.group, self._cluster.etcd.writer
        assert group is not None
        assert status.group == group.number, f"{change.key} is written in group {group.number}"
        is_member = group.node_rank(status.identity) is not None
        spec = self._cluster.spec
        is_ending = not group.members and spec is not None and spec.ending is not None
        assert is_member or is_ending, f"{change.key} is of {status.identity}, no member"
        assert writer is not None
        assert status.incarnation.partition(".")[0] == writer.state.me.incarnation, f"{writer.name} writes {change.key}"
        if last is None or (is_ending and last.identity != status.identity):  # its agent was restarted meanwhile
            return
        assert last.identity == status.identity, f"{change.key} of {last.identity} is written by {status.identity}"
        for name in ("inventory", "exit"):
            before, now = getattr(last, name), getattr(status, name)
            assert before is None or now == before, f"{change.key}: {name} was {before} and is {now}"
        before, now = last.quiesced, status.quiesced
        assert before is None or now == before or (now is not None and now.number > before.number), change.key
        moved, moves = last.transition, status.transition
        has_stepped = moved is not None and moved.stepped_s is not None
        assert moved is None or moves is not None, f"{change.key}: the transition is gone"
        assert not has_stepped or moves == moved, f"{change.key}: {moved} became {moves}"
        assert last.stall is None or status.stall is not None, f"{change.key}: the stall is gone"

    def _check_leads(self) -> None:
        """Only the leader writes this."""
        leader, writer = self._cluster.etcd.record(KEYS.leader, Leader), self._cluster.etcd.writer
        assert writer is not None
        assert leader is not None, f"{writer.name} writes, and nobody leads"
        mine = writer.state.me.incarnation
        assert leader.incarnation.partition(".")[0] == mine, f"{writer.name} writes, and {leader.node_id} leads"

    def _is_of_others(self) -> bool:
        """Whether a newcomer has begun a job of its own in an etcd that lost ours."""
        spec = self._cluster.spec
        if spec is None or spec.run == self._run:
            return False
        if any(known.spec.run == self._run for known in self._known()):
            return True
        self._adopt(spec)
        return False

    def _adopt(self, spec: Spec) -> None:
        """Nobody remembers the job that was lost: this is the job now, as etcd shows it."""
        group, restore_point, committed = self._cluster.group, self._cluster.restore_point, self._cluster.checkpoint
        self._run = spec.run
        self.specs = {spec.revision: spec}
        self.groups = {group.number: group} if group is not None else {}
        self.restore_points = {restore_point.group: restore_point} if restore_point is not None else {}
        self.commits = {committed.number: committed} if committed is not None else {}

    def _on_spec(self, keys: set[str]) -> None:
        spec = self._cluster.etcd.record(KEYS.spec, Spec)
        assert spec is not None, "nobody deletes the spec"
        is_new = spec.run != self._run
        if is_new and self.specs and KEYS.result not in keys:
            assert self._has_lost_data, "another run in place of one that has not ended"
            if KEYS.group not in keys and any(known.spec.run == self._run for known in self._known()):
                return  # of a newcomer that knows nothing: its job ends when the lost one is restored
            self.groups.clear()
            self.restore_points.clear()
        if is_new:
            self.specs.clear()
            self.commits.clear()
            self._stood = None
        self._run = spec.run
        assert spec.revision >= max(self.specs, default=0), "np goes back"
        known = self.specs.setdefault(spec.revision, spec)
        assert known == spec, f"the spec's revision {spec.revision} was rewritten"

    def _on_group(self, keys: set[str]) -> None:
        group = self._cluster.etcd.record(KEYS.group, Group)
        assert group is not None, "nobody deletes the group"
        assert self.result is None or KEYS.result in keys, "a finished job gets another group"
        last = max(self.groups, default=0)
        known = self.groups.setdefault(group.number, group)
        assert encode(known) == encode(group), f"group {group.number} was rewritten"
        assert group.number >= last, f"group {group.number} follows {last}"
        spec = self._cluster.spec
        if KEYS.result not in keys:
            self._check_leads()
            assert spec is not None
            assert len(group.members) <= max(spec.np_max, len(known.members) if group.number == last else 0), "above np"
        identities = [member.identity for member in group.members]
        assert len(set(identities)) == len(identities), "a member twice"
        if group.number > last:
            self._check_restarts(self.groups.get(group.number - 1), group, keys)
            if not {KEYS.result, KEYS.spec} & keys:  # started over, or restored
                self.incidents.on_group(group, keys)
            self._note_quiesced(self.groups.get(group.number - 1), group)

    def _note_quiesced(self, last: Group | None, group: Group) -> None:
        world = self._cluster.training.world_of(last) if last is not None else None
        if self._is_stood_in_memory:  # and one who held it may be gone by now
            self._stood, self._is_stood_in_memory = None, False
        if world is None or world.copy is None or not world.standstill.number:
            return
        committed = self._cluster.checkpoint
        is_saved = committed is not None and committed.copy == world.copy
        if committed is not None and is_saved and committed.handoff == world.standstill.number:
            self._stood = (world, world.copy)
        elif group.cause in ("join", "scale", "restart") and self._have_all_reported(world):
            self._stood, self._is_stood_in_memory = (world, world.copy), True

    def _have_all_reported(self, world: World) -> bool:
        """Whether all members reported in time that their ranks are quiesced, with snapshots."""
        told = self._cluster.etcd.records(KEYS.statuses(world.group.number), MemberStatus)
        quiesced = [each.quiesced for each in told if each.quiesced is not None]
        here = [each for each in quiesced if each.number == world.standstill.number and not each.is_late]
        assert all(each.step == world.step for each in here), f"ranks are quiesced after step {world.step}: {quiesced}"
        return len(here) == len(world.group.members)

    def _check_restarts(self, last: Group | None, group: Group, keys: set[str]) -> None:
        if last is None or not last.members:
            return
        view = self._cluster.etcd.writer.decided_from if self._cluster.etcd.writer is not None else None
        reports = view.exits if view is not None and KEYS.spec not in keys else ()
        stalls = standing(view.stalls) if view is not None else ()
        bases = {last.restarts}
        if self._has_progressed(last, reports):
            if any(each.step_s for each in reports):
                bases = {0}
            elif any(each.step_s for each in stalls):  # a hang may be what is counted
                bases.add(0)
        if self._may_be_plain(last, view):
            bases.add(0)
        own = [each for each in reports if each.failure is not None and is_own(each.failure)]
        is_free = any(each.step > last.step for each in reports)  # after a new step a restart may be asked for
        charged = [each for each in own if not (is_free and each.failure.exit_code == EXIT_RESTART)]
        if own and group.cause in ("failed", "lost", "wait"):
            costs = {1} if len(charged) == len(own) else {0, 1} if charged or stalls else {0}
            found = first_failure(reports)
            if found is not None and found[1].unreadable:  # whatever failed after that
                costs = {0}
            counts = {base + cost for base in bases for cost in costs}
            assert group.restarts in counts, f"failures do not count: {last.restarts} then {group.restarts}"
        writer = self._cluster.etcd.writer
        # A lease that a new leader of etcd's renewed, without an outage, ends later than anybody waits for it.
        renewed_at = self._cluster.etcd.renewed_at
        outlived = self._cluster.now < renewed_at + self._cluster.policy.lease_ttl_s + 2 * LOOK_S
        is_blind = self._cluster.has_jumped or outlived or writer is None or writer.state.is_store_lost
        if not self._own_failures.get(last.number) and not is_blind:  # else it may have waited too short, or for nobody
            assert group.restarts in (0, last.restarts), f"a change of members counts: {group.reason}"
        assert group.restarts <= last.restarts + 1, "a failure counts twice"

    def _has_progressed(self, last: Group, reports: Sequence[ExitReport]) -> bool:
        """Whether as many new steps were made as fill the window, at the time that they are told to take."""
        made = max((last.step, *(each.step for each in reports))) - last.counted_from
        window_s, pace_s = self._cluster.policy.progress_window_s, self._cluster.training.pace_s
        return made >= max(1, round(window_s / pace_s))

    def _may_be_plain(self, last: Group, view: ClusterView | None) -> bool:
        """Whether no script has told what it commits, and this one has run for as long as makes up for that."""
        world = self._cluster.training.world_of(last)
        if world is None or view is None or any(node.value.restoring_group for node in view.nodes):
            return False
        return self._cluster.now - world.started_at >= _PLAIN_WINDOWS * self._cluster.policy.progress_window_s

    def _on_resume(self, keys: set[str]) -> None:
        restore_point = self._cluster.etcd.record(KEYS.restore_point, RestorePoint)
        if restore_point is None:
            self.restore_points.clear()
            return
        known = self.restore_points.get(restore_point.group)
        assert known is None or known == restore_point, f"the beginning of group {restore_point.group} was rewritten"
        if known is not None:
            return
        assert restore_point.group > max(self.restore_points, default=0), "a beginning goes back"
        self._check_leads()
        group = self._cluster.etcd.record(KEYS.group, Group)
        assert group is not None
        if KEYS.group in keys:  # restored
            self.restore_points[restore_point.group] = restore_point
            return
        best = self._newest(group)
        assert restore_point.copy == best, (
            f"group {group.number} begins after {named(restore_point.copy)}, not {named(best)}"
        )
        history = self._cluster.training.history
        if self._stood is not None:
            (world, copy), self._stood = self._stood, None
            may_go_on = world.copy != copy and history.is_after(restore_point.copy, copy)  # they were never notified
            assert may_go_on or restore_point.copy == copy, (
                f"{named(copy)} was handed over, not {named(restore_point.copy)}"
            )
        assert all(history.is_after(restore_point.copy, cut) for cut in restore_point.lineage), (
            f"no lineage: {restore_point}"
        )
        self.restore_points[restore_point.group] = restore_point

    def _newest(self, group: Group) -> StateId | None:
        """The copy that the group should begin from, by the true history and what its members said they hold."""
        etcd, history = self._cluster.etcd, self._cluster.training.history
        view = etcd.writer.decided_from if etcd.writer is not None else None
        told = view.inventories if view is not None else ()
        members = {member.identity for member in group.members}
        assert {each.identity for each in told} >= members, "not all members have said what they hold"
        copies = complete_copies(held for each in told if each.identity in members for held in each.copies)
        if not members:  # before the job is stopped, one agent saves what it alone holds
            copies = [copy for each in told for copy in complete_copies(each.copies)]
        committed = etcd.record(KEYS.checkpoint, Checkpoint)
        floor = committed.copy if committed is not None else None
        found = [copy for copy in copies if self._is_true(copy) and history.is_after(copy, floor)]
        return max(found, key=history.depth, default=floor)

    def _is_true(self, copy: StateId) -> bool:
        """Whether the job's history goes, or may go on, through this copy."""
        last = self.restore_points.get(max(self.restore_points, default=0))
        if last is None or copy.run != self._run:
            return False
        begun = self._rollbacks.get(last.group, last.copy)
        return copy.group == last.group or self._cluster.training.history.is_after(begun, copy)

    def _on_checkpoint(self, keys: set[str]) -> None:
        committed = self._cluster.etcd.record(KEYS.checkpoint, Checkpoint)
        if committed is None:
            self.commits.clear()
            return
        last = self.commits.get(max(self.commits, default=0))
        if last is not None and committed.number <= last.number:
            assert self.commits.get(committed.number) == committed, f"commit {committed.number} was rewritten"
            assert committed.number == last.number, "a commit goes back"
            return
        self.commits[committed.number] = committed
        if KEYS.group in keys:  # restored
            return
        group = self._cluster.etcd.record(KEYS.group, Group)
        writer = self._cluster.etcd.writer
        assert group is not None
        assert writer is not None
        if group.members:
            assert any(member.link == writer.serial for member in group.members), f"{writer.name} commits, no member"
            assert max(self.restore_points, default=0) == group.number, "a commit before the group's beginning"
        else:
            assert writer.state.saving == committed.copy, f"{writer.name} commits without a group, and is not the last"
        assert self._is_true(committed.copy), f"{named(committed.copy)} is not of the true history"
        history = self._cluster.training.history
        if last is not None and not committed.is_rollback:
            assert history.is_after(committed.copy, last.copy), "a commit goes back"
        if committed.is_rollback:
            assert last is not None
            assert last.copy in self._cluster.training.files.damaged, "a rollback without damage"
            self._rollbacks[group.number] = committed.copy

    def _on_handoff(self, _: set[str]) -> None:
        handoff = self._cluster.etcd.record(KEYS.handoff, HandoffRequest)
        if handoff is None:
            return
        self._check_leads()
        group = self._cluster.group
        assert group is not None
        assert handoff.group == group.number, f"a handoff of group {handoff.group} in {group.number}"

    def _on_result(self, keys: set[str]) -> None:
        result = self._cluster.etcd.record(KEYS.result, Result)
        if result is None:
            assert KEYS.spec in keys, "a result is deleted only when the job is started over"
            self.result = None
            return
        assert self.result is None or self.result == result, "a result was rewritten"
        self._check_leads()
        self.result, self.ended_at = result, self._cluster.now
        is_reset = isinstance(result.reason, Requested) and result.reason.what == "reset"
        has_failed_to_save = any(each.has_failed_to_save for each in self._statuses.values())
        if not result.succeeded and not is_reset and not has_failed_to_save:
            self._check_saved()

    def _check_saved(self) -> None:
        """A job that ends before its ranks have finished has saved the newest state that an agent held."""
        committed = self._cluster.etcd.record(KEYS.checkpoint, Checkpoint)
        floor = committed.copy if committed is not None else None
        writer, history = self._cluster.etcd.writer, self._cluster.training.history
        assert writer is not None
        assert writer.decided_from is not None
        here = [agent for agent in self._cluster.agents if agent.state.identity in writer.decided_from.present]
        for agent in [each for each in here if not each.is_gone]:
            for copy in complete_copies(agent.state.copies):
                is_newer = copy != floor and self._is_true(copy) and history.is_after(copy, floor)
                assert not is_newer, f"{agent.name} holds {named(copy)}, and {named(floor)} is saved"
