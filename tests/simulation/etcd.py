"""The simulated etcd: the store in memory that the contract tests hold to etcd's promises, with etcd's misfortunes.

All agents share one `Etcd`; each has a `Client`, whose calls can be lost on the way there or back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from agent.core.records import Record
from agent.errors import StoreUnavailable
from agent.store.api import (
    ChangeBatch,
    Compare,
    Delete,
    KeyRange,
    KeyValue,
    Lease,
    Put,
    Snapshot,
    TransactionResult,
)
from agent.store.keys import JobKeys, decode, group_in
from agent.store.memory import MemoryStore, _Data, _LeaseState

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.cluster import Cluster

    from agent.core.view import ClusterView

KEYS = JobKeys("job")

ETCD = -1
"""Etcd's place in the network; agents have their serial numbers."""

LATE_S = 3.0

LOOK_S = 0.5
"""How often it looks for leases that have ended: as often as etcd."""

_UNANSWERED_S = 7.0
"""For how long a connection without an answer lasts: then a request has none to go by, for a new one needs answers."""

FATES = ("landed", "lost", "late")
"""What becomes of a write whose answer is lost."""

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class _ToldData(_Data):
    """Tells of each write as it lands, and ends leases as late as etcd does."""

    on_write: Callable[[ChangeBatch], None]

    def end_due_leases(self) -> None:
        """No call does it: see `look`."""

    def look(self) -> None:
        super().end_due_leases()

    def apply(self, writes: Iterable[Put | Delete]) -> None:
        before = self.revision
        super().apply(writes)
        if self.revision != before:
            self.on_write(self.history[-1])


class Etcd(MemoryStore):
    """What all agents share, and what can befall it."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(lambda: cluster.now)
        self.cluster = cluster
        self._data = self.data = _ToldData(lambda: cluster.now)
        self.data.on_write = self._on_write
        self._connection.data = self.data
        self.is_frozen = False
        self.renewed_at = 0.0
        """When all leases were last renewed, for whom nobody asked."""
        self.restored_at = float("-inf")
        """When a backup brought back what was over."""
        self.late: list[Callable[[], object]] = []
        """Requests that reached it while it was frozen."""
        self.losses = 0
        """How often it has lost its data."""
        self.writer: Agent | None = None
        """Whose request it is working on; None: nobody's."""
        self._records: dict[str, tuple[KeyValue, Record]] = {}
        self._saved: tuple[int, dict[str, KeyValue], dict[int, float]] | None = None

    def record(self, key: str, kind: type[R]) -> R | None:
        """Return what a key holds now, decoded."""
        item = self.data.items.get(key)
        if item is None:
            return None
        known = self._records.get(key)
        if known is None or known[0] is not item:
            stored = group_in(self.data.items, KEYS) if key == KEYS.group else decode(item, kind)
            assert stored is not None
            known = self._records[key] = (item, stored.value)
        return known[1]  # type: ignore[return-value] - a key has one kind

    def records(self, prefix: str, kind: type[R]) -> list[R]:
        """Return what all keys under a prefix hold, by key."""
        found = (self.record(key, kind) for key in sorted(self.data.items) if key.startswith(prefix))
        return [each for each in found if each is not None]

    def _on_write(self, batch: ChangeBatch) -> None:
        self.cluster.on_write(batch, self.writer)

    def tick(self) -> None:
        """Look for leases that have ended."""
        with self.data.changed:
            self.data.look()

    # What befalls it

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self, *, is_new_leader: bool) -> None:
        """Go on: with the requests that waited, and, under a new leader, with all leases as if just renewed."""
        self.is_frozen = False
        if is_new_leader:
            self.renew_all()
        waiting, self.late = self.late, []
        for land in waiting:
            land()
        self.tick()

    def renew_all(self) -> None:
        """A new leader does not know when leases were last renewed."""
        self.renewed_at = self.cluster.now
        for lease in self.data.leases.values():
            lease.ends_at = self.cluster.now + lease.ttl_s

    def break_watches(self) -> None:
        """Restart: connections break, nothing is lost."""
        self.data.wipes += 1

    def wipe(self) -> None:
        """Start again from nothing."""
        super().wipe()
        self.losses += 1

    def save(self) -> None:
        """Make a backup."""
        leases = {lease_id: lease.ttl_s for lease_id, lease in self.data.leases.items()}
        self._saved = (self.data.revision, dict(self.data.items), leases)

    def restore(self) -> None:
        """Start again from the last backup, or from nothing."""
        self.wipe()
        if self._saved is not None:
            self.data.revision, items, leases = self._saved[0], dict(self._saved[1]), self._saved[2]
            self.data.items = items
            self.data.leases = {key: _LeaseState(ttl_s, self.cluster.now + ttl_s) for key, ttl_s in leases.items()}
            self.data.compacted = self.data.revision + 1
            self.restored_at = self.cluster.now


class Client(MemoryStore):
    """One agent's way to etcd."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._data = cluster.etcd.data
        self._connection.data = cluster.etcd.data
        self.cluster = cluster
        self.agent: Agent
        self.fate: str | None = None
        """What becomes of the next write, whose answer is lost."""

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        return self._call(lambda: super(Client, self).read(ranges), is_write=False)

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        return self._call(lambda: super(Client, self).transact(compares, writes))

    def grant(self, ttl_s: float) -> Lease:
        return self._call(lambda: super(Client, self).grant(ttl_s))

    def refresh(self, lease_id: int) -> float:
        return self._call(lambda: self._refresh(lease_id), is_write=False)

    def _refresh(self, lease_id: int) -> float:
        """Renew a lease, but none that has ended and is still there."""
        lease = self._data.leases.get(lease_id)
        if lease is not None and lease.ends_at <= self.cluster.now:
            super().revoke(lease_id)
        return super().refresh(lease_id)

    def revoke(self, lease_id: int) -> None:
        return self._call(lambda: super(Client, self).revoke(lease_id))

    def _call(self, call: Callable[[], T], *, is_write: bool = True) -> T:
        cluster, etcd, me = self.cluster, self.cluster.etcd, self.agent
        if me.is_gone:
            raise StoreUnavailable("the agent is dead")
        if not cluster.network.is_open(me.serial, ETCD):
            raise StoreUnavailable("no way to etcd")
        if etcd.is_frozen:
            if is_write and cluster.random.random() < 0.5:
                etcd.late.append(self._later(call))
            raise StoreUnavailable("etcd does not answer")
        if not cluster.network.is_open(ETCD, me.serial):
            if is_write and cluster.network.cut_for_s(ETCD, me.serial) < _UNANSWERED_S:
                self._land(call)  # but no renewal, which follows an answer
            raise StoreUnavailable("no way back from etcd")
        if is_write and self._loses_answer():
            self._lose_answer(call)
            raise StoreUnavailable("the answer was lost")
        if me.dies_at_call is not None and is_write:
            return self._die(call)
        return self._land(call)

    def _loses_answer(self) -> bool:
        loss = self.cluster.loss
        return self.fate is not None or (loss > 0.0 and self.cluster.random.random() < loss)

    def _lose_answer(self, call: Callable[[], object]) -> None:
        """The request lands, lands late, or never does; the caller is not notified which."""
        fate, self.fate = self.fate or self.cluster.random.choice(FATES), None
        if fate == "landed":
            self._land(call)
        if fate == "late":
            self.cluster.after(self.cluster.random.uniform(0.0, 2 * LATE_S), self._later(call))

    def _land(self, call: Callable[[], T]) -> T:
        etcd = self.cluster.etcd
        if etcd.is_frozen:
            raise StoreUnavailable("etcd does not answer")
        before, etcd.writer = etcd.writer, self.agent
        try:
            return call()
        finally:
            etcd.writer = before

    def _later(self, call: Callable[[], object]) -> Callable[[], None]:
        """Return what lets this request land, for whose answer nobody waits any more."""
        losses, decided_from = self.cluster.etcd.losses, self.agent.decided_from
        return lambda: self._land_late(call, losses, decided_from)

    def _land_late(self, call: Callable[[], object], losses: int, decided_from: ClusterView | None) -> None:
        if self.cluster.etcd.losses != losses:  # it was in the memory of an etcd that is gone, or on the way there
            return
        since, self.agent.decided_from = self.agent.decided_from, decided_from
        with contextlib.suppress(StoreUnavailable):
            answer = self._land(call)
            if isinstance(answer, TransactionResult):
                what = "landed" if answer.succeeded else "refused"
                self.cluster.transcript.name(f"late write {what}", self.agent.name)
        self.agent.decided_from = since

    def _die(self, call: Callable[[], T]) -> T:
        """The agent is killed before or after this call, in the midst of an effect."""
        has_landed = self.agent.dies_at_call == "after"
        if has_landed:
            self._land(call)
        self.cluster.kill(self.agent)
        raise StoreUnavailable("the agent is dead")
