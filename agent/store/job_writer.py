"""A job's store: carries out the core's effects on the store, and answers each.

Every write is one transaction that compares what the decision rested on, so that a decision from an old view is
refused rather than applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from agent import clock
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.incident import IncidentWrite
from agent.core.member_status import MemberStatus, WrittenStatus
from agent.core.model import Group, Node
from agent.core.records import Stored
from agent.errors import LeaseGone, RecordError, StoreUnavailable
from agent.store import listed_members
from agent.store.api import Compare, Delete, KeyRange, Lease, Put, Store
from agent.store.keys import JobKeys, decode, encode
from agent.store.lease import LeaseKeeper
from agent.store.listed_members import MemberList, pack

Writes = Sequence[Put | Delete]

_INCIDENTS = 200
"""How many are kept."""


class FollowedRecords(Protocol):
    """What the agent sees of the job's records: a `Mirror`, which documents these methods."""

    def catch_up(self) -> int | None:
        """Read and deliver everything now, and return its revision; None if that is not possible."""
        ...

    def refresh(self) -> None:
        """Have everything read and delivered later."""
        ...

    def show(self, writes: Writes, revision: int) -> None:
        """Deliver what was just written."""
        ...


class JobWriter:
    """Runs effects one at a time. Not thread-safe: it lives on the store's thread.

    Args:
        store: where the job's keys are.
        keys: of the job.
        keeper: renews the lease that records of this agent are written under.
        lease_ttl_s: the length of that lease.
        followed: what the agent sees of the job's records.
        is_process_alive: whether the agent of a node record runs on this host; None: unknown.
        now: the clock of the keeper.
    """

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        keeper: LeaseKeeper,
        *,
        lease_ttl_s: float,
        followed: FollowedRecords,
        is_process_alive: Callable[[Node], bool | None],
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._store = store
        self._keys = keys
        self._keeper = keeper
        self._lease_ttl_s = lease_ttl_s
        self._followed = followed
        self._is_process_alive = is_process_alive
        self._now = now
        self._lease_id = 0

    def run(self, effect: fx.StoreEffect) -> ev.WriteAnswered:
        """Carry out one effect. Never raises `StoreUnavailable`: the answer is then `UNKNOWN`."""
        try:
            return self._run(effect)
        except StoreUnavailable as error:
            return ev.WriteAnswered(effect, ev.Outcome.UNKNOWN, reason=str(error))

    def write_incidents(self, write: IncidentWrite) -> tuple[ev.Outcome, int]:
        """Write incidents, and delete what they were made from. Never raises `StoreUnavailable`.

        Returns:
            How the write ended, and the revision of the store.
        """
        keys = self._keys
        compares = [Compare(keys.leader, create_revision=write.leader_revision)]
        writes: list[Put | Delete] = []
        for incident, revision in write.incidents:
            compares.append(Compare(keys.incident(incident.group), mod_revision=revision))
            writes.append(Put(keys.incident(incident.group), encode(incident)))
            if revision == 0:
                writes.append(Delete(keys.change(incident.group)))
                writes.append(Delete(keys.statuses(incident.group - 1), is_prefix=True))
        if self._keeper.has_run_out():  # another may have led since, as for all records of the leader
            return ev.Outcome.UNKNOWN, 0
        try:
            result = self._store.transact(compares, writes)
        except StoreUnavailable:
            return ev.Outcome.UNKNOWN, 0
        return (ev.Outcome.DONE if result.succeeded else ev.Outcome.REFUSED), result.revision

    def _run(self, effect: fx.StoreEffect) -> ev.WriteAnswered:  # noqa: PLR0911 - one for each kind of effect
        match effect:
            case fx.Register(node):
                return self._register(effect, node)
            case fx.TakeOver(fx.NodeIdHolder(_, lease_id)) | fx.Evict(_, lease_id):
                self._store.revoke(lease_id)
                return self._done(effect)
            case fx.Refresh():
                return self._refresh(effect)
            case fx.Deregister():
                self._leave()
                return ev.WriteAnswered(effect, ev.Outcome.DONE)
            case fx.UpdateNode():
                return self._update(effect)
            case fx.WriteStatus():
                return self._write_status(effect)
            case _:
                return self._transact(effect, *self._transaction(effect))

    def _refresh(self, effect: fx.Refresh) -> ev.WriteAnswered:
        """Have everything read again. What is delivered is as new as the answer: the core waits for such a view."""
        revision = self._followed.catch_up()
        if revision is not None:
            return ev.WriteAnswered(effect, ev.Outcome.DONE, revision)
        answer = self._done(effect)
        self._followed.refresh()
        return answer

    def _update(self, effect: fx.UpdateNode) -> ev.WriteAnswered:
        """Write our record anew; where etcd has forgotten our lease, as an old backup does, under the one it has."""
        try:
            return self._transact(effect, *self._own(effect))
        except LeaseGone:
            snapshot = self._store.read((KeyRange(self._keys.node(effect.node.node_id)),))
            stored = [decode(item, Node) for item in snapshot.items]
            if not any(self._take_up(each, effect.node) for each in stored):
                raise
            return self._transact(effect, *self._own(effect))

    def _take_up(self, stored: Stored[Node], node: Node) -> bool:
        """Keep the lease of a record alive from now on, if the record is our own and its lease lives."""
        sent_at = self._now()
        ttl_s = self._store.refresh(stored.lease_id) if stored.value.incarnation == node.incarnation else 0.0
        if ttl_s <= 0.0:
            return False
        self._lease_id = stored.lease_id
        self._keeper.hold(Lease(stored.lease_id, ttl_s), sent_at)
        return True

    def _done(self, effect: fx.StoreEffect) -> ev.WriteAnswered:
        return ev.WriteAnswered(effect, ev.Outcome.DONE, self._store.read(()).revision)

    def _transact(self, effect: fx.StoreEffect, compares: Sequence[Compare], writes: Writes) -> ev.WriteAnswered:
        result = self._store.transact(compares, writes)
        if not result.succeeded:
            return ev.WriteAnswered(effect, ev.Outcome.REFUSED, result.revision)
        self._followed.show(writes, result.revision)  # before the answer: the core then need not have it read again
        return ev.WriteAnswered(effect, ev.Outcome.DONE, result.revision)

    def _transaction(self, effect: fx.StoreEffect) -> tuple[Sequence[Compare], Writes]:
        """What is compared, and what is written if all of it holds."""
        keys = self._keys
        match effect:
            case fx.CreateSpec(spec):
                return [Compare(keys.spec, create_revision=0)], [Put(keys.spec, encode(spec))]
            case fx.StartOver(spec, group, result_revision):
                renewed = [Put(keys.spec, encode(spec)), Put(keys.group, encode(group))]
                last = (keys.result, keys.restore_point, keys.checkpoint, keys.handoff, keys.members)
                ended = [Delete(key) for key in last]
                reports = [Delete(prefix, is_prefix=True) for prefix in (keys.statuses(), keys.changes)]
                return [Compare(keys.result, mod_revision=result_revision)], [*renewed, *ended, *reports]
            case fx.UpdateNode() | fx.Campaign() | fx.WriteSuspicion() | fx.ClearSuspicion():
                return self._own(effect)
            case fx.WriteCheckpoint(checkpoint, group_revision, checkpoint_revision):
                is_current = Compare(keys.group, mod_revision=group_revision)
                is_next = Compare(keys.checkpoint, mod_revision=checkpoint_revision)
                return [is_current, is_next], [Put(keys.checkpoint, encode(checkpoint))]
            case fx.WriteGroup() | fx.WriteRestorePoint() | fx.WriteSpec() | fx.WriteHandoff() | fx.WriteResult():
                return self._led(effect)
            case _:
                raise AssertionError(effect)

    def _write_status(self, effect: fx.WriteStatus) -> ev.WriteAnswered:
        """Write what this node reports about its group. If that is refused, return the record that is there.

        If that says the same already, an earlier write has been applied.
        """
        keys, status = self._keys, effect.status
        as_known = [
            Compare(keys.group, mod_revision=effect.group_revision),
            Compare(keys.status(status), mod_revision=effect.status_revision),
        ]
        answer = self._transact(effect, as_known, [Put(keys.status(status), encode(status))])
        if answer.outcome is ev.Outcome.DONE:
            return answer
        items = self._store.read((KeyRange(keys.status(status)),)).items
        if not items:
            return replace(answer, status=WrittenStatus(status.group))
        there = None
        with contextlib.suppress(RecordError):  # damaged by hand: the next write replaces it
            there = decode(items[0], MemberStatus).value
        outcome = ev.Outcome.DONE if there == status else ev.Outcome.REFUSED
        return replace(answer, outcome=outcome, status=WrittenStatus(status.group, there, items[0].mod_revision))

    def _own(
        self, effect: fx.UpdateNode | fx.Campaign | fx.WriteSuspicion | fx.ClearSuspicion
    ) -> tuple[Sequence[Compare], Writes]:
        """What an agent writes under its own lease."""
        keys = self._keys
        if not self._lease_id:  # else it would outlive the agent, for ever
            raise StoreUnavailable("this agent holds no lease at the moment")
        match effect:
            case fx.UpdateNode(node, create_revision):
                key = keys.node(node.node_id)
                return [Compare(key, create_revision=create_revision)], [Put(key, encode(node), self._lease_id)]
            case fx.Campaign(leader):
                mine = Compare(keys.leader, create_revision=0)
                return [mine], [Put(keys.leader, encode(leader), self._lease_id)]
            case fx.WriteSuspicion(suspect):
                return [], [Put(keys.suspect(suspect), encode(suspect), self._lease_id)]
            case fx.ClearSuspicion(suspect):
                return [], [Delete(keys.suspect(suspect))]

    def _led(
        self, effect: fx.WriteGroup | fx.WriteRestorePoint | fx.WriteSpec | fx.WriteHandoff | fx.WriteResult
    ) -> tuple[Sequence[Compare], Writes]:
        """What only the leader writes."""
        keys = self._keys
        if self._keeper.has_run_out():  # another may have led since; an old backup of etcd's would not show it
            raise StoreUnavailable("this agent's lease has run out")
        lead = [
            Compare(keys.group, mod_revision=effect.group_revision),
            Compare(keys.leader, create_revision=effect.leader_revision),
            Compare(keys.result, create_revision=0),  # a delayed write must not be applied after the job has ended
        ]
        match effect:
            case fx.WriteGroup():
                return [*lead, Compare(keys.spec, mod_revision=effect.spec_revision)], self._group_writes(effect)
            case fx.WriteRestorePoint(restore_point):
                return lead, [Put(keys.restore_point, encode(restore_point))]
            case fx.WriteSpec(spec, spec_revision):
                return [*lead, Compare(keys.spec, mod_revision=spec_revision)], [Put(keys.spec, encode(spec))]
            case fx.WriteHandoff(handoff):
                return lead, [Put(keys.handoff, encode(handoff))]
            case fx.WriteResult(result):
                return lead, [Put(keys.result, encode(result))]

    def _group_writes(self, effect: fx.WriteGroup) -> Writes:
        keys, group, restored = self._keys, effect.group, effect.restored
        stored, listed = pack(group, self._listed(group))
        writes: list[Put | Delete] = [Put(keys.group, encode(stored))]
        if listed is not None:
            writes.append(Put(keys.members, encode(listed)))
        # Usually only the incident is left of these: the rest was deleted when it was written.
        old = group.number - _INCIDENTS
        writes += [Delete(keys.incident(old)), Delete(keys.change(old)), Delete(keys.statuses(old), is_prefix=True)]
        if effect.change is not None:
            writes.append(Put(keys.change(group.number), encode(effect.change)))
        if restored is not None:
            again = (
                (keys.spec, restored.spec),
                (keys.restore_point, restored.restore_point),
                (keys.checkpoint, restored.checkpoint),
            )
            writes += [Put(key, encode(record)) for key, record in again if record is not None]
        return writes

    def _listed(self, group: Group) -> MemberList | None:
        """The list of members in etcd, if this group is to refer to one. It changes only together with the group."""
        if len(group.members) < listed_members.LISTED_FROM:
            return None
        items = self._store.read((KeyRange(self._keys.members),)).items
        with contextlib.suppress(RecordError):  # damaged by hand: a new one replaces it
            return decode(items[0], MemberList).value if items else None
        return None

    def _register(self, effect: fx.Register, node: Node) -> ev.WriteAnswered:
        key = self._keys.node(node.node_id)
        sent_at = self._now()
        # Not a new one for each try: an earlier try that lands late must not put our record under a lease let go of.
        lease = self._living_lease() or self._store.grant(self._lease_ttl_s)
        self._lease_id = lease.lease_id
        self._keeper.hold(lease, sent_at)  # first: should the answer be lost, the record is kept alive all the same
        answer = self._transact(effect, [Compare(key, create_revision=0)], [Put(key, encode(node), lease.lease_id)])
        return answer if answer.outcome is ev.Outcome.DONE else self._refused(effect, key)

    def _living_lease(self) -> Lease | None:
        """The lease that we hold, if it has not ended."""
        ttl_s = self._store.refresh(self._lease_id) if self._lease_id else 0.0
        return Lease(self._lease_id, ttl_s) if ttl_s > 0.0 else None

    def _refused(self, effect: fx.Register, key: str) -> ev.WriteAnswered:
        self._leave()
        snapshot = self._store.read((KeyRange(key),))
        items = snapshot.items
        if not items:
            return ev.WriteAnswered(effect, ev.Outcome.REFUSED)
        stored = decode(items[0], Node)
        if self._take_up(stored, effect.node):  # an earlier try of ours, which was not answered
            return ev.WriteAnswered(effect, ev.Outcome.DONE, snapshot.revision)
        holder = fx.NodeIdHolder(stored.value, items[0].lease_id, self._is_process_alive(stored.value))
        return ev.WriteAnswered(effect, ev.Outcome.REFUSED, holder=holder)

    def _leave(self) -> None:
        self._keeper.drop()
        if self._lease_id:
            lease_id, self._lease_id = self._lease_id, 0
            self._store.revoke(lease_id)
