"""A job's store: carries out the core's effects on the store, and answers each.

Every write is one transaction that compares what the decision rested on, so that a decision from an old view is
refused rather than applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.core import events as ev
from agent.core.model import Node
from agent.errors import StoreUnavailable
from agent.store.api import Compare, Delete, KeyRange, Lease, Put, Store
from agent.store.keys import JobKeys, decode, encode
from agent.store.lease import LeaseKeeper

Writes = Sequence[Put | Delete]


class JobStore:
    """Runs effects one at a time. Not thread-safe: it lives on the store's thread."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        keeper: LeaseKeeper,
        *,
        lease_ttl_s: float,
        refresh_view: Callable[[], None],
        is_process_alive: Callable[[Node], bool | None],
    ) -> None:
        self._store = store
        self._keys = keys
        self._keeper = keeper
        self._lease_ttl_s = lease_ttl_s
        self._refresh_view = refresh_view
        self._is_process_alive = is_process_alive
        self._lease_id = 0

    def run(self, effect: ev.StoreEffect) -> ev.Answered:
        """Carry out one effect. Never raises `StoreUnavailable`: the answer is then `UNKNOWN`."""
        try:
            return self._run(effect)
        except StoreUnavailable as error:
            return ev.Answered(effect, ev.Outcome.UNKNOWN, reason=str(error))

    def _run(self, effect: ev.StoreEffect) -> ev.Answered:
        match effect:
            case ev.Register(node):
                return self._register(effect, node)
            case ev.TakeOver(holder):
                self._store.revoke(holder.lease_id)
                return self._done(effect)
            case ev.Refresh():
                answer = self._done(effect)
                self._refresh_view()
                return answer
            case ev.Deregister():
                self._leave()
                return ev.Answered(effect, ev.Outcome.DONE)
            case _:
                return self._transact(effect, *self._transaction(effect))

    def _done(self, effect: ev.StoreEffect) -> ev.Answered:
        return ev.Answered(effect, ev.Outcome.DONE, self._store.read(()).revision)

    def _transact(self, effect: ev.StoreEffect, compares: Sequence[Compare], writes: Writes) -> ev.Answered:
        result = self._store.transact(compares, writes)
        outcome = ev.Outcome.DONE if result.succeeded else ev.Outcome.REFUSED
        return ev.Answered(effect, outcome, result.revision)

    def _transaction(self, effect: ev.StoreEffect) -> tuple[Sequence[Compare], Writes]:  # noqa: PLR0911 - one a kind
        keys = self._keys
        match effect:
            case ev.CreateSpec(spec):
                return [Compare(keys.spec, create_revision=0)], [Put(keys.spec, encode(spec))]
            case ev.StartOver(spec, group, result_revision):
                renewed = [Put(keys.spec, encode(spec)), Put(keys.group, encode(group))]
                ended = [Delete(keys.result), Delete(keys.reports(), is_prefix=True)]
                return [Compare(keys.result, mod_revision=result_revision)], [*renewed, *ended]
            case ev.UpdateNode(node, create_revision):
                key = keys.node(node.node_id)
                return [Compare(key, create_revision=create_revision)], [Put(key, encode(node), self._lease_id)]
            case ev.Campaign(leader):
                mine = Compare(keys.leader, create_revision=0)
                return [mine], [Put(keys.leader, encode(leader), self._lease_id)]
            case ev.WriteGroup():
                return self._write_group(effect)
            case ev.WriteReport(report, group_revision):
                key = keys.report(report.group, report.node_id)
                return [Compare(keys.group, mod_revision=group_revision)], [Put(key, encode(report))]
            case ev.WriteResult(result, group_revision, leader_revision):
                lead = self._lead(group_revision, leader_revision)
                return [*lead, Compare(keys.result, create_revision=0)], [Put(keys.result, encode(result))]
            case _:
                raise AssertionError(effect)

    def _write_group(self, effect: ev.WriteGroup) -> tuple[Sequence[Compare], Writes]:
        keys, group = self._keys, effect.group
        lead = self._lead(effect.group_revision, effect.leader_revision)
        lead.append(Compare(keys.spec, mod_revision=effect.spec_revision))
        writes: list[Put | Delete] = [Put(keys.group, encode(group))]
        writes.append(Delete(keys.reports(group.number - 2), is_prefix=True))
        if effect.spec is not None:
            writes.append(Put(keys.spec, encode(effect.spec)))
        return lead, writes

    def _lead(self, group_revision: int, leader_revision: int) -> list[Compare]:
        return [
            Compare(self._keys.group, mod_revision=group_revision),
            Compare(self._keys.leader, create_revision=leader_revision),
        ]

    def _register(self, effect: ev.Register, node: Node) -> ev.Answered:
        key = self._keys.node(node.node_id)
        lease = self._store.grant(self._lease_ttl_s)
        self._lease_id = lease.lease_id
        self._keeper.hold(lease)  # first: should the answer be lost, the record is kept alive all the same
        answer = self._transact(effect, [Compare(key, create_revision=0)], [Put(key, encode(node), lease.lease_id)])
        return answer if answer.outcome is ev.Outcome.DONE else self._refused(effect, key, lease)

    def _refused(self, effect: ev.Register, key: str, lease: Lease) -> ev.Answered:
        self._leave()
        snapshot = self._store.read((KeyRange(key),))
        items = snapshot.items
        if not items:
            return ev.Answered(effect, ev.Outcome.REFUSED)
        stored = decode(items[0], Node)
        if stored.value.incarnation == effect.node.incarnation:  # an earlier try of ours, which was not answered
            self._lease_id = items[0].lease_id
            self._keeper.hold(Lease(self._lease_id, lease.ttl_s))
            return ev.Answered(effect, ev.Outcome.DONE, snapshot.revision)
        holder = ev.Holder(stored.value, items[0].lease_id, self._is_process_alive(stored.value))
        return ev.Answered(effect, ev.Outcome.REFUSED, holder=holder)

    def _leave(self) -> None:
        self._keeper.drop()
        if self._lease_id:
            lease_id, self._lease_id = self._lease_id, 0
            self._store.revoke(lease_id)
