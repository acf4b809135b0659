"""What must hold of incidents, and of what they are made of; checked against what really happened.

- With each group after a start its change is written: its cause and its members. Its incident says the same. Once a
  group has a successor, or has made its first step, it has one incident, which is complete if all members reported.
- Workers that it names did end in the group before; the first one was first, and the others came as much later as it
  says, within the error that it tells. (Not once a clock has jumped.)
- The replayed steps that it counts were repeated, and no others.
- No phase is below zero; from the last step to the first one after it lies all that was lost, and more than the time
  from the start of the workers.
- What a run has lost only grows. Each record is written a few times at the most.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.etcd import KEYS, LATE_S

from agent.core.incident import GroupChange, Incident, TransitionReport
from agent.core.member_status import MemberStatus
from agent.store.api import KeyChange
from agent.store.job_writer import _INCIDENTS
from agent.store.keys import encode

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.cluster import Cluster

    from agent.core.model import Group

_STARTED_AT = 1000.0
_SOON_S = 0.01
_BEFORE_S = 1.0
"""So long before a failure something else may have been wrong with the group, of which nothing is known here."""
_VALUES = 5
"""Different values of a transition report or an incident: as it begins, once all have stopped, with the first step.
After etcd has lost data reports may be newer."""
_WRITES = 40
"""Of each, repeated ones included: answers are lost."""


@dataclass(frozen=True)
class _End:
    """When a worker really ended, and as whose."""

    node_id: str
    rank: int
    at: float


class Incidents:
    """What really happened, and whether the records say so."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ends: dict[int, list[_End]] = {}
        self._written: dict[int, float] = {}
        """When each group was."""
        self._changes: dict[int, GroupChange] = {}
        """As they were written with groups whose records etcd has not lost since."""
        self._groups: dict[int, Group] = {}
        self._reached: dict[tuple[int, str], int] = {}
        """By group and node: the step that its ranks of earlier groups had made when all had made one of this group."""
        self._stepped: dict[tuple[int, str], float] = {}
        """When that was reported."""
        self._stalled: set[int] = set()
        """Groups in which ranks made no step for a while."""
        self._missed: set[int] = set()
        """Groups in which a node's record was gone for a while, or for good."""
        self._last: Incident | None = None
        self._forgotten_at = -math.inf
        self._step_s = 0.0
        """The longest step of an incident."""
        self._values: dict[str, set[bytes]] = {}
        self._writes = Counter[str]()

    def forget(self) -> None:
        """Etcd has lost its data."""
        self._last, self._forgotten_at = None, self._cluster.now
        self._changes.clear()
        self._values.clear()
        self._writes.clear()

    def on_end(self, agent: Agent, group: Group, local_rank: int) -> None:
        """A worker has ended, by itself or by force."""
        rank = group.first_rank(agent.ranks.node_rank) + local_rank
        self._ends.setdefault(group.number, []).append(_End(agent.name, rank, self._cluster.now))

    def on_missed(self) -> None:
        """The record of a node is gone, or says that the node is unfit."""
        if (group := self._cluster.group) is not None:
            self._missed.add(group.number)

    def on_group(self, group: Group, keys: set[str]) -> None:
        """The next group was written: with why it is."""
        assert KEYS.change(group.number) in keys, f"group {group.number} has no change"
        change = self._cluster.etcd.record(KEYS.change(group.number), GroupChange)
        assert change is not None
        about = (change.run, change.group, change.cause, change.reason)
        assert about == (group.run, group.number, group.cause, group.reason), change
        assert [place.node_id for place in change.members] == [member.node_id for member in group.members]
        self._written[group.number] = self._cluster.now
        self._changes[group.number] = change
        self._groups[group.number] = group

    def missing(self, until: float) -> list[str]:
        """What is not recorded of groups that had a successor by then, or whose ranks had all made a step.

        Older incidents than those that are kept are deleted.
        """
        found = []
        kept_from = max(self._changes, default=0) - _INCIDENTS + 1
        for number, change in self._changes.items():
            if number < kept_from:
                continue
            incident = self._cluster.etcd.record(KEYS.incident(number), Incident)
            reports = [self._stepped.get((number, each.node_id), math.inf) for each in change.members]
            have_all_stepped = bool(reports) and max(reports) <= until
            has_successor = self._written.get(number + 1, math.inf) <= until
            if incident is None and (has_successor or have_all_stepped):
                found.append(f"group {number} has no incident")
            elif incident is not None and have_all_stepped and not incident.phases.is_complete:
                found.append(f"the incident of group {number} is not complete")
        return found

    def on_write(self, change: KeyChange) -> None:
        """Something was told of the workers, or an incident was written."""
        if change.item is None:
            return
        key, value = change.key, change.item.value
        self._writes[key] += 1
        assert self._writes[key] <= _WRITES, f"{key} is written again and again"
        if key.startswith(KEYS.incidents):
            self._on_incident(key)
        else:
            status = self._cluster.etcd.record(key, MemberStatus)
            assert status is not None
            if status.stall is not None:
                self._stalled.add(status.group)
            if status.transition is None:
                return
            self._on_transition(status.transition)
            value = encode(status.transition)
        values = self._values.setdefault(key, set())
        values.add(value)
        assert len(values) <= _VALUES, f"{key} has changed more often than there is news"

    def _on_transition(self, report: TransitionReport) -> None:
        begun = [report.entered_s, report.joined_s, report.set_up_s, report.loaded_s, report.stepped_s]
        known = [each for each in (report.stopped_s, *begun) if each is not None]
        assert len(known) in {1, 6}, report
        assert known == sorted(known), report
        assert report.stopped_s >= 0.0, report
        group = self._cluster.group
        if report.stepped_s is not None and group is not None:
            rank = group.node_rank(report.identity)
            assert rank is not None
            ranks = self._cluster.by_serial[group.members[rank].link].ranks
            self._reached.setdefault((group.number, report.node_id), ranks.before)
            self._stepped.setdefault((group.number, report.node_id), self._cluster.now)
            self._groups[group.number] = group

    def _on_incident(self, key: str) -> None:
        incident = self._cluster.etcd.record(key, Incident)
        assert incident is not None
        spent = [getattr(incident.phases, name) or 0.0 for name in incident.phases.__struct_fields__]
        assert min(spent) >= 0.0, incident
        self._check_totals(incident)
        self._check_ended(incident)
        change = self._changes.get(incident.group)
        if change is not None:
            about = (incident.run, incident.group, incident.cause, incident.reason, incident.at, incident.members)
            assert about == (change.run, change.group, change.cause, change.reason, change.at, change.members), incident
        if incident.ended and incident.phases.stop_s is None and not self._cluster.has_jumped:
            self._check_order(incident)
        if incident.phases.is_complete:
            self._check_complete(incident)

    def _check_totals(self, incident: Incident) -> None:
        if self._cluster.now < self._forgotten_at + 2 * LATE_S:  # it may have been under way, and follows what is lost
            return
        last, self._last = self._last, incident
        if last is None or last.run != incident.run:
            return
        assert incident.group >= last.group, f"{incident} after {last}"
        before = incident.before if incident.group > last.group else incident.totals
        least = last.totals if incident.group > last.group else last.before
        for name in ("incidents", "downtime_s", "replayed_steps"):
            assert getattr(before, name) >= getattr(least, name) - 1e-9, f"{name} shrinks: {incident} after {last}"
        # Each incident counts its replayed steps as long as they were then; later ones may not know how long that was.
        self._step_s = max(self._step_s, incident.step_s)
        lost_s = incident.totals.downtime_s - incident.totals.replayed_steps * self._step_s
        has_time = lost_s <= self._cluster.now - _STARTED_AT + _SOON_S
        assert has_time or self._cluster.has_jumped, f"more is lost than there was time: {incident}"

    def _check_ended(self, incident: Incident) -> None:
        if not incident.ended:
            return
        # By rank: an agent that lost its node id to another one reports under its next id.
        ends = {end.rank: end.at for end in self._ends.get(incident.group - 1, [])}
        told = [each for each in incident.ended if not each.failure.hang]
        for each in told:
            assert each.failure.rank in ends, f"{each} did not end in group {incident.group - 1}"
        first = incident.ended[0]
        if first.failure.hang or self._cluster.has_jumped:
            return
        began = ends[first.failure.rank]
        for each in told:
            if each.error_s is not None:
                off_s = abs(ends[each.failure.rank] - began - each.after_s)
                assert off_s <= each.error_s + _SOON_S, f"{each} was {off_s:.3f} s off"

    def _check_order(self, incident: Incident) -> None:
        """Of those that were reported the first one was first, as far as clocks were compared."""
        first, *others = incident.ended
        ends = {end.rank: end.at for end in self._ends.get(incident.group - 1, [])}
        for each in others:
            is_cause = not (each.failure.is_peer_lost or first.failure.is_peer_lost)
            if is_cause and each.error_s is not None and not (first.failure.hang or each.failure.hang):
                after_s = ends[each.failure.rank] - ends[first.failure.rank]
                assert after_s >= -each.error_s - _SOON_S, f"{each} was first, not {first}"

    def _check_complete(self, incident: Incident) -> None:
        """Where the group began, what it did again, and how long nobody trained."""
        group = self._groups[incident.group]
        world = self._cluster.training.world_of(group)
        assert world is not None
        assert world.made, f"nobody has made a step of group {group.number}"
        assert incident.step == world.began_after, incident
        number, reached = world.reached_before
        replayed = max(0, reached - incident.step)
        is_claim = not incident.is_first_start and incident.reached is not None and incident.trained_before == number
        is_right = incident.replayed_steps == replayed or number in self._cluster.training.trained_on
        assert is_right or not is_claim, f"{replayed} steps were replayed: {incident}"
        if self._cluster.has_jumped:
            return
        lost_s = incident.phases.total_s
        assert lost_s >= world.stepped_at - world.started_at - _SOON_S, f"more was lost: {incident}"
        assert lost_s <= world.stepped_at - self._fault_at(incident) + _BEFORE_S, f"less was lost: {incident}"

    def _fault_at(self, incident: Incident) -> float:
        """When what made this group happened at the earliest."""
        first = incident.ended[0] if incident.ended else None
        if incident.group - 1 in self._stalled | self._missed:  # something was wrong with it before
            return self._written.get(incident.group - 1, _STARTED_AT)
        if first is None or first.failure.hang or first.failure.is_peer_lost or incident.cause != "failed":
            return self._written.get(incident.group - 1, _STARTED_AT)
        ends = [end.at for end in self._ends.get(incident.group - 1, []) if end.node_id == first.node_id]
        return min(ends)
