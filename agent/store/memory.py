"""An in-memory store for tests, with the same guarantees as etcd: one lock, and a list of all changes.

Every `MemoryStore` is one client. `client()` returns another client of the same data, so that several agents can meet
in one process and each can lose its connection separately.

Leases expire by the given clock. They are checked at every call, and by every running watch when the next lease is
due. A test with its own clock calls `tick` after it has moved the clock.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.errors import Compacted, LeaseGone, StoreUnavailable
from agent.store.api import (
    ChangeBatch,
    Compare,
    Delete,
    KeyChange,
    KeyRange,
    KeyValue,
    Lease,
    Put,
    Snapshot,
    Store,
    TransactionResult,
    Watch,
)


@dataclass
class _LeaseState:
    ttl_s: float
    ends_at: float


@dataclass
class _Data:
    """The data that all clients share. Accessed only while holding `changed`."""

    clock: Callable[[], float]
    changed: threading.Condition = field(default_factory=threading.Condition)
    revision: int = 1
    compacted: int = 0
    wipes: int = 0
    items: dict[str, KeyValue] = field(default_factory=dict)
    history: list[ChangeBatch] = field(default_factory=list)
    leases: dict[int, _LeaseState] = field(default_factory=dict)
    leases_granted: int = 0

    def holds(self, compare: Compare) -> bool:
        item = self.items.get(compare.key)
        create_revision, mod_revision = (item.create_revision, item.mod_revision) if item else (0, 0)
        wanted = (compare.create_revision, compare.mod_revision)
        return wanted[0] in {None, create_revision} and wanted[1] in {None, mod_revision}

    def check_leases(self, writes: Iterable[Put | Delete]) -> None:
        for write in writes:
            if isinstance(write, Put) and write.lease_id and write.lease_id not in self.leases:
                raise LeaseGone(f"the lease {write.lease_id} of {write.key} is gone")

    def apply(self, writes: Iterable[Put | Delete]) -> None:
        """Apply all writes as one revision; a transaction that changes nothing creates no revision."""
        by_key = {change.key: change for write in writes for change in self._changes(write, self.revision + 1)}
        if not by_key:
            return
        self.revision += 1
        changes = tuple(by_key.values())
        for change in changes:
            if change.item is None:
                del self.items[change.key]
            else:
                self.items[change.key] = change.item
        self.history.append(ChangeBatch(self.revision, changes))
        self.changed.notify_all()

    def _changes(self, write: Put | Delete, revision: int) -> Iterator[KeyChange]:
        match write:
            case Put(key, value, lease_id):
                old = self.items.get(key)
                created = old.create_revision if old else revision
                yield KeyChange(key, KeyValue(key, value, created, revision, lease_id), revision)
            case Delete(key, is_prefix):
                wanted = KeyRange(key, is_prefix)
                yield from (KeyChange(each, None, revision) for each in sorted(self.items) if wanted.contains(each))

    def end_lease(self, lease_id: int) -> None:
        self.leases.pop(lease_id, None)
        self.apply([Delete(item.key) for item in list(self.items.values()) if item.lease_id == lease_id])

    def end_due_leases(self) -> None:
        now = self.clock()
        for lease_id in [key for key, lease in self.leases.items() if lease.ends_at <= now]:
            self.end_lease(lease_id)

    def next_end_s(self) -> float | None:
        """Return the time until the next lease expires; None if there is no lease."""
        ends = [lease.ends_at for lease in self.leases.values()]
        return max(0.0, min(ends) - self.clock()) if ends else None


@dataclass
class _MemoryConnection:
    """The connection of one client to the data."""

    data: _Data
    is_reachable: bool = True
    is_closed: bool = False
    breaks: int = 0

    def check(self) -> None:
        if self.is_closed or not self.is_reachable:
            raise StoreUnavailable("the store in memory cannot be reached")

    def epoch(self) -> tuple[int, int]:
        """Return a value that changes whenever running watches must fail."""
        return self.breaks, self.data.wipes


class MemoryStore(Store):
    """One client of a store in memory; `api.py` lists its guarantees."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._data = _Data(clock)
        self._connection = _MemoryConnection(self._data)

    def client(self) -> MemoryStore:
        """Return another client of the same data, with its own connection."""
        other = MemoryStore()
        other._data, other._connection = self._data, _MemoryConnection(self._data)
        return other

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        """Read all ranges at one revision."""
        with self._locked() as data:
            keys = [key for key in sorted(data.items) if any(each.contains(key) for each in ranges)]
            return Snapshot.of(data.revision, (data.items[key] for key in keys))

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        """Apply all writes if all compares hold, else none."""
        _check_written_once(writes)
        with self._locked() as data:
            succeeded = all(map(data.holds, compares))
            if succeeded:
                data.check_leases(writes)
                data.apply(writes)
            return TransactionResult(succeeded, data.revision)

    def grant(self, ttl_s: float) -> Lease:
        """Grant a lease of `ttl_s` seconds."""
        with self._locked() as data:
            data.leases_granted += 1
            data.leases[data.leases_granted] = _LeaseState(ttl_s, data.clock() + ttl_s)
            data.changed.notify_all()  # running watches wait until the next lease expires
            return Lease(data.leases_granted, ttl_s)

    def refresh(self, lease_id: int) -> float:
        """Renew a lease; return its length in seconds, 0.0 if it is gone."""
        with self._locked() as data:
            lease = data.leases.get(lease_id)
            if lease is None:
                return 0.0
            lease.ends_at = data.clock() + lease.ttl_s
            return lease.ttl_s

    def revoke(self, lease_id: int) -> None:
        """End a lease now and delete its keys. Does nothing if the lease is already gone."""
        with self._locked() as data:
            data.end_lease(lease_id)

    def watch(self, ranges: Sequence[KeyRange], after_revision: int) -> Watch:
        """Subscribe to all changes of the ranges with a revision above `after_revision`."""
        with self._locked():
            return _MemoryWatch(self._connection, ranges, after_revision)

    def close(self) -> None:
        """End this client. Its running watches end."""
        with self._data.changed:
            self._connection.is_closed = True
            self._data.changed.notify_all()

    # Time and faults, controlled by tests

    def tick(self) -> None:
        """End the leases that have expired by the clock."""
        with self._data.changed:
            self._data.end_due_leases()

    def disconnect(self) -> None:
        """Make every call of this client fail, and its running watches."""
        with self._data.changed:
            self._connection.is_reachable = False
            self._connection.breaks += 1
            self._data.changed.notify_all()

    def reconnect(self) -> None:
        """Undo `disconnect`."""
        with self._data.changed:
            self._connection.is_reachable = True

    def compact(self, revision: int) -> None:
        """Drop the history below a revision."""
        with self._data.changed:
            self._data.compacted = revision
            self._data.history = [batch for batch in self._data.history if batch.revision >= revision]
            self._data.changed.notify_all()

    def wipe(self) -> None:
        """Lose all data, like an etcd started on an empty disk. Running watches of all clients fail."""
        with self._data.changed:
            self._data.items.clear()
            self._data.history.clear()
            self._data.leases.clear()
            self._data.revision, self._data.compacted = 1, 0
            self._data.wipes += 1
            self._data.changed.notify_all()

    @contextmanager
    def _locked(self) -> Iterator[_Data]:
        with self._data.changed:
            self._connection.check()
            self._data.end_due_leases()
            yield self._data


class _MemoryWatch(Watch):
    """A subscription: a position in the history."""

    def __init__(self, connection: _MemoryConnection, ranges: Sequence[KeyRange], after_revision: int) -> None:
        self._connection = connection
        self._data = connection.data
        self._epoch = connection.epoch()
        self._ranges = tuple(ranges)
        self._seen = after_revision
        self._is_cancelled = False

    def __iter__(self) -> Iterator[ChangeBatch]:
        """Yield batches until cancelled. Raises `Compacted` or `StoreUnavailable`."""
        while (batch := self._wait_for_batch()) is not None:
            yield batch

    def cancel(self) -> None:
        """End the iteration, from any thread."""
        with self._data.changed:
            self._is_cancelled = True
            self._data.changed.notify_all()

    def _wait_for_batch(self) -> ChangeBatch | None:
        with self._data.changed:
            while not (self._is_cancelled or self._connection.is_closed):
                self._data.end_due_leases()
                if self._epoch != self._connection.epoch():
                    raise StoreUnavailable("the connection to the store in memory broke")
                if self._seen + 1 < self._data.compacted:
                    raise Compacted(
                        f"the history before revision {self._data.compacted} is compacted: read everything again"
                    )
                batch = self._next_batch()
                if batch is not None:
                    return batch
                self._data.changed.wait(self._data.next_end_s())
            return None

    def _next_batch(self) -> ChangeBatch | None:
        first = bisect.bisect_right(self._data.history, self._seen, key=lambda batch: batch.revision)
        for batch in self._data.history[first:]:
            self._seen = batch.revision
            changes = [each for each in batch.changes if any(wanted.contains(each.key) for wanted in self._ranges)]
            if changes:
                return ChangeBatch(batch.revision, tuple(changes))
        return None


def _check_written_once(writes: Sequence[Put | Delete]) -> None:
    """Reject what etcd rejects: a key put twice, or put and deleted, in one transaction."""
    put = [write.key for write in writes if isinstance(write, Put)]
    deleted = [KeyRange(write.key, write.is_prefix) for write in writes if isinstance(write, Delete)]
    twice = [key for key in put if put.count(key) > 1 or any(each.contains(key) for each in deleted)]
    if twice:
        raise ValueError(f"a transaction writes {twice[0]!r} twice")
