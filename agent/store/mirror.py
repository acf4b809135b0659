"""A local copy of some ranges of the store, delivered as a whole at every change.

The mirror's thread reads everything at revision R, delivers it, watches from R + 1, applies each batch and delivers
again. After any interruption it reads everything again instead of resuming the watch, for three reasons: a watch from
an old revision of an etcd that was emptied stays silent for ever, several ranges have no common revision to resume
from, and after a compaction the revision no longer exists.

A snapshot of one range is complete up to its revision. Events of several ranges in one watch are not ordered relative
to each other, so their changes are delivered while the snapshot's revision stays that of the last read. A caller that
must be sure that the copy includes a write of its own passes it to `show`; for any other write it calls `catch_up`.

A snapshot may have a lower revision than the one before it, because etcd lost data. The mirror delivers it like any
other; detecting the loss is up to the receiver.

Whatever fails, in the receiver too, the mirror logs it and continues: an agent that no longer sees any change while
its lease is renewed would stay a member for ever.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence

from agent.core.backoff import doubled_s
from agent.errors import Compacted, StoreRefused, StoreUnavailable
from agent.observe.log import InternalErrors
from agent.store.api import ChangeBatch, Delete, KeyChange, KeyRange, KeyValue, Put, Snapshot, Store, Watch

_BACK_OFF_MIN_S = 0.1
_BACK_OFF_MAX_S = 1.0
_REFUSED_BACK_OFF_S = 2.0
"""Longer, because etcd refuses again until an administrator changes a role or a password."""

Deliver = Callable[[Snapshot], None]


class Mirror:
    """Keeps a copy of ranges of a store up to date. All methods may be called from any thread.

    Args:
        store: the store to read.
        ranges: the ranges to mirror; may be empty, and can be changed by `retarget`.
        deliver: called on the mirror's thread with each new snapshot; must not block.
        on_outage: called on the mirror's thread once per outage, with the reason. The next snapshot ends the outage.
    """

    def __init__(
        self, store: Store, ranges: Sequence[KeyRange], deliver: Deliver, on_outage: Callable[[str], None]
    ) -> None:
        self._store = store
        self._on_outage = on_outage
        self._lock = threading.Lock()
        self._target = (tuple(ranges), deliver)
        self._watch: Watch | None = None
        self._copy: _RangesCopy | None = None
        self._ended_lease = 0
        """The last lease that is known to have ended. 0: none."""
        self._interrupted = threading.Event()
        self._is_closed = False
        self._failures = 0
        """Consecutive failures; determines the back-off before the next attempt."""
        self._is_in_outage = False
        self._mishaps = InternalErrors("the mirror of etcd")
        self._thread = threading.Thread(target=self._run, name="store-mirror", daemon=True)

    def start(self) -> None:
        """Start the thread; the first snapshot is delivered as soon as the store answers."""
        self._thread.start()

    def refresh(self) -> None:
        """Read everything again, after this call, and deliver it even if nothing changed. Does not block."""
        self._interrupt()

    def note_lease_end(self, lease_id: int) -> None:
        """Read everything again if the copy still has a key of this lease, which has ended. Does not block.

        Usually the watch shows that such keys are gone. It stays silent if etcd was emptied.
        """
        with self._lock:
            self._ended_lease = lease_id
            copy = self._copy
        if copy is not None and copy.has_lease(lease_id):
            self._interrupt()

    def catch_up(self) -> int | None:
        """Read everything again on the caller's thread and deliver it, without ending the watch. Blocks like any call.

        Returns:
            The revision that was read and delivered. None: this was not possible, and `refresh` was called instead.

        Raises:
            StoreUnavailable: the store did not answer. The watch stays, for the mirror would get no answer either.
        """
        with self._lock:
            copy = self._copy
        try:
            revision = copy.catch_up() if copy is not None else None
        except StoreUnavailable:
            raise
        except Exception:  # noqa: BLE001 - the mirror's own thread meets the same error, and logs it
            revision = None
        if revision is None:
            self._interrupt()
        return revision

    def show(self, writes: Sequence[Put | Delete], revision: int) -> None:
        """Deliver what this client has just written, before the watch does.

        Nothing is delivered if there is no copy at the moment, or if it has one range: then the watch delivers all
        changes in order.

        Args:
            writes: of one transaction that was applied.
            revision: its revision.
        """
        with self._lock:
            copy = self._copy
        if copy is not None:
            copy.show(writes, revision)

    def retarget(self, ranges: Sequence[KeyRange], deliver: Deliver | None = None) -> None:
        """Mirror other ranges from now on, and deliver them to another receiver if one is given.

        A snapshot of the old ranges that is being delivered still goes to the old receiver.
        """
        with self._lock:
            self._target = (tuple(ranges), deliver or self._target[1])
        self._interrupt()

    def close(self) -> None:
        """End the thread. Nothing is delivered afterwards, unless the receiver itself called this."""
        self._is_closed = True
        self._interrupt()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _interrupt(self) -> None:
        """End what the thread waits for: the watch, or a back-off."""
        with self._lock:
            self._interrupted.set()
            if self._watch is not None:
                self._watch.cancel()

    def _run(self) -> None:
        while True:
            self._interrupted.clear()  # before reading what it signals, so that no interruption is lost
            if self._is_closed:
                return
            try:
                self._follow_or_report()
            except Exception as error:  # noqa: BLE001 - the mirror must not end; see the module's docstring
                self._mishaps.report(error)
                self._back_off()

    def _follow_or_report(self) -> None:
        try:
            self._follow()
        except Compacted:
            return
        except StoreUnavailable as error:
            if not self._is_in_outage and not self._is_closed:
                self._is_in_outage = True
                self._on_outage(str(error))
            if isinstance(error, StoreRefused):
                self._interrupted.wait(_REFUSED_BACK_OFF_S)
            else:
                self._back_off()

    def _back_off(self) -> None:
        self._failures += 1
        self._interrupted.wait(_back_off_s(self._failures))

    def _follow(self) -> None:
        """Read everything, then apply the changes of a watch, until interrupted."""
        with self._lock:
            ranges, deliver = self._target
        copy = _RangesCopy(self._store, ranges, lambda snapshot: self._deliver(deliver, snapshot))
        copy.catch_up()
        self._is_in_outage = False
        self._failures = 0
        try:
            for batch in self._subscribe(copy):
                copy.apply(batch)
        finally:
            copy.end()

    def _deliver(self, deliver: Deliver, snapshot: Snapshot) -> None:
        if not self._is_closed:
            deliver(snapshot)

    def _subscribe(self, copy: _RangesCopy) -> Watch:
        watch = self._store.watch(copy.ranges, copy.revision)
        with self._lock:
            self._watch, self._copy = watch, copy
            if copy.has_lease(self._ended_lease):  # it was read before that was known
                self._interrupted.set()
            if self._interrupted.is_set():
                watch.cancel()
        return watch


class _RangesCopy:
    """The current content of some ranges.

    It can be read again while its watch runs: the watch's older changes are then ignored.
    """

    def __init__(self, store: Store, ranges: Sequence[KeyRange], deliver: Deliver) -> None:
        self.ranges = ranges
        self.revision = 0
        """Revision of the last read."""
        self._store = store
        self._deliver = deliver
        self._items = RangeItems(ranges)
        self._lock = threading.RLock()
        """Held during a read or the application of a batch, including the delivery."""
        self._has_ended = False

    def catch_up(self) -> int | None:
        """Read everything and deliver it.

        Returns:
            The revision. None: this copy can no longer be used, because it has ended or because the store lost data.
        """
        with self._lock:
            if self._has_ended:
                return None
            snapshot = self._store.read(self.ranges)
            if snapshot.revision < self.revision:
                return None
            self.revision = snapshot.revision
            self._items.reset(snapshot)
            self._deliver(snapshot)
            return snapshot.revision

    def apply(self, batch: ChangeBatch) -> None:
        """Apply the changes that are newer than the last read, and deliver everything if there are any."""
        with self._lock:
            changes = [change for change in batch.changes if change.revision > self.revision]
            if self._items.apply(changes):
                self._deliver(self._items.snapshot(batch.revision if len(self.ranges) == 1 else self.revision))

    def show(self, writes: Sequence[Put | Delete], revision: int) -> None:
        """See `Mirror.show`."""
        with self._lock:
            if not self._has_ended and self.revision < revision and len(self.ranges) > 1:
                self._items.show(writes, revision)
                self._deliver(self._items.snapshot(self.revision))

    def has_lease(self, lease_id: int) -> bool:
        """Whether it delivers changes, and has a key of this lease."""
        with self._lock:
            return not self._has_ended and self._items.has_lease(lease_id)

    def end(self) -> None:
        """Deliver nothing from now on."""
        with self._lock:
            self._has_ended = True


class RangeItems:
    """The items of some ranges: as read, with later changes, and with this client's own writes ahead of the watch."""

    def __init__(self, ranges: Sequence[KeyRange]) -> None:
        self._ranges = ranges
        self._items: dict[str, KeyValue] = {}
        self._own_revision = 0
        self._shown: dict[str, int] = {}
        """Keys of own writes that the watch has not delivered yet, and their revisions. Older changes are ignored."""

    def reset(self, snapshot: Snapshot) -> None:
        """Begin again from what was read."""
        self._items = dict(snapshot.by_key)
        self._shown.clear()
        self._own_revision = 0

    def apply(self, changes: Sequence[KeyChange]) -> bool:
        """Apply changes of a watch; return whether there were any that are not older than what is here."""
        newer = [change for change in changes if change.revision > self._shown.get(change.key, 0)]
        for change in changes:
            if change.revision >= self._shown.get(change.key, change.revision + 1):
                del self._shown[change.key]
        self._take(newer)
        return bool(newer)

    def show(self, writes: Sequence[Put | Delete], revision: int) -> None:
        """Apply the writes of a transaction of this revision, as far as they concern these ranges."""
        changes = [change for write in writes for change in self._changes(write, revision)]
        self._take(changes)
        self._shown |= {change.key: revision for change in changes}
        self._own_revision = revision

    def has_lease(self, lease_id: int) -> bool:
        """Whether an item is bound to this lease. 0: no."""
        return lease_id != 0 and any(item.lease_id == lease_id for item in self._items.values())

    def snapshot(self, revision: int) -> Snapshot:
        """Return all items, as of this revision."""
        return Snapshot(revision, self._items.copy(), self._own_revision)

    def _take(self, changes: Sequence[KeyChange]) -> None:
        for change in changes:
            if change.item is None:
                self._items.pop(change.key, None)
            else:
                self._items[change.key] = change.item

    def _changes(self, write: Put | Delete, revision: int) -> Iterator[KeyChange]:
        match write:
            case Put(key, value, lease_id):
                if any(each.contains(key) for each in self._ranges):
                    old = self._items.get(key)
                    created = old.create_revision if old is not None else revision
                    yield KeyChange(key, KeyValue(key, value, created, revision, lease_id), revision)
            case Delete(key, is_prefix):
                deleted = KeyRange(key, is_prefix)
                keys = [each for each in self._items if deleted.contains(each)] if is_prefix else [key]
                yield from (KeyChange(each, None, revision) for each in keys)


def _back_off_s(failures: int) -> float:
    longest_s = doubled_s(_BACK_OFF_MIN_S, failures, _BACK_OFF_MAX_S)
    return random.uniform(_BACK_OFF_MIN_S, longest_s)  # noqa: S311 - spreads the agents' attempts; not for security
