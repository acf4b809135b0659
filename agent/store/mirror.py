"""A local copy of a few ranges of the store, delivered whole at every change.

One thread: read everything at revision R, deliver, watch from R + 1, apply each batch, deliver again. After any
break it reads everything again rather than resuming, for three reasons: a watch from an old revision on an emptied
etcd is silent for ever, several ranges have no common point to resume from, and after a compaction there is none.

A snapshot is complete up to its revision. Between several ranges of one watch there is no order, so what a watch of
several brings is shown, but the revision stays that of the last read; whoever must know that the copy has caught up
with a write calls `catch_up`.

What it does not judge: a snapshot may have a lower revision than one before it. That etcd lost data is for the
receiver to see, so it is delivered like any other.

Whatever goes wrong, also in the receiver, the mirror logs it and goes on: an agent that sees nothing any more while
its lease is renewed would hold its place for ever.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from agent.core.backoff import doubled_s
from agent.errors import Compacted, StoreRefused, StoreUnavailable
from agent.observe.log import InternalErrors
from agent.store.api import ChangeBatch, KeyRange, KeyValue, Snapshot, Store, Watch

_BACK_OFF_MIN_S = 0.1
_BACK_OFF_MAX_S = 1.0
_REFUSED_BACK_OFF_S = 2.0
"""What etcd refuses it will refuse again, until somebody changes a role or a password."""

Deliver = Callable[[Snapshot], None]


class Mirror:
    """Keeps ranges of a store in view. All methods may be called from any thread.

    Args:
        store: where to read.
        ranges: what to mirror; may be empty, and changed by `retarget`.
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
        self._picture: _RangesCopy | None = None
        self._woken = threading.Event()
        self._is_closed = False
        self._failures = 0
        """In a row: says how long to wait before the next try."""
        self._is_out = False
        self._mishaps = InternalErrors("the mirror of etcd")
        self._thread = threading.Thread(target=self._run, name="store-mirror", daemon=True)

    def start(self) -> None:
        """Begin; the first snapshot follows as soon as the store answers."""
        self._thread.start()

    def refresh(self) -> None:
        """Have everything read again, after this call, and delivered, also when nothing changed."""
        self._interrupt()

    def catch_up(self) -> int | None:
        """Do what `refresh` has done, on the caller's thread; the watch goes on. Waits for the store, as a call does.

        Returns:
            The revision of what was read and delivered. None: this was not possible; `refresh` was called instead.

        Raises:
            StoreUnavailable: the store did not answer. The watch goes on, for it would not answer the mirror either.
        """
        with self._lock:
            picture = self._picture
        try:
            revision = picture.catch_up() if picture is not None else None
        except StoreUnavailable:
            raise
        except Exception:  # noqa: BLE001 - the mirror's own thread meets it again, and says so
            revision = None
        if revision is None:
            self._interrupt()
        return revision

    def retarget(self, ranges: Sequence[KeyRange], deliver: Deliver | None = None) -> None:
        """Mirror other ranges from now on, and deliver them to another receiver if one is given.

        A snapshot of the old ranges that is under way still goes to the old receiver.
        """
        with self._lock:
            self._target = (tuple(ranges), deliver or self._target[1])
        self._interrupt()

    def close(self) -> None:
        """End the thread. Nothing is delivered afterwards, unless called by the receiver itself."""
        self._is_closed = True
        self._interrupt()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _interrupt(self) -> None:
        """End whatever the thread waits for: a watch, or the end of a back-off."""
        with self._lock:
            self._woken.set()
            if self._watch is not None:
                self._watch.cancel()

    def _run(self) -> None:
        while True:
            self._woken.clear()  # before what it announces is looked at, so that no wake-up is lost
            if self._is_closed:
                return
            try:
                self._follow_or_tell()
            except Exception as error:  # noqa: BLE001 - see the module's last words
                self._mishaps.report(error)
                self._back_off()

    def _follow_or_tell(self) -> None:
        try:
            self._follow()
        except Compacted:
            return
        except StoreUnavailable as error:
            if not self._is_out and not self._is_closed:
                self._is_out = True
                self._on_outage(str(error))
            if isinstance(error, StoreRefused):
                self._woken.wait(_REFUSED_BACK_OFF_S)
            else:
                self._back_off()

    def _back_off(self) -> None:
        self._failures += 1
        self._woken.wait(_back_off_s(self._failures))

    def _follow(self) -> None:
        """Read everything, then apply what the watch brings, until interrupted."""
        with self._lock:
            ranges, deliver = self._target
        picture = _RangesCopy(self._store, ranges, lambda snapshot: self._deliver(deliver, snapshot))
        picture.catch_up()
        self._is_out = False
        self._failures = 0
        try:
            for batch in self._subscribe(picture):
                picture.apply(batch)
        finally:
            picture.end()

    def _deliver(self, deliver: Deliver, snapshot: Snapshot) -> None:
        if not self._is_closed:
            deliver(snapshot)

    def _subscribe(self, picture: _RangesCopy) -> Watch:
        watch = self._store.watch(picture.ranges, picture.revision)
        with self._lock:
            self._watch, self._picture = watch, picture
            if self._woken.is_set():
                watch.cancel()
        return watch


class _RangesCopy:
    """What is known of some ranges. It may be read again beside its watch: what that brings of before is left out."""

    def __init__(self, store: Store, ranges: Sequence[KeyRange], deliver: Deliver) -> None:
        self.ranges = ranges
        self.revision = 0
        """Of the last reading."""
        self._store = store
        self._deliver = deliver
        self._items: dict[str, KeyValue] = {}
        self._turn = threading.RLock()
        """Of one reading or batch after the other, up to its delivery."""
        self._has_ended = False

    def catch_up(self) -> int | None:
        """Read everything and deliver it; return its revision.

        None: this picture has no future, for it has ended or shows lost data.
        """
        with self._turn:
            if self._has_ended:
                return None
            snapshot = self._store.read(self.ranges)
            if snapshot.revision < self.revision:
                return None
            self.revision = snapshot.revision
            self._items = {item.key: item for item in snapshot.items}
            self._deliver(snapshot)
            return snapshot.revision

    def apply(self, batch: ChangeBatch) -> None:
        """Deliver everything with these changes, if any is later than the last reading."""
        with self._turn:
            changes = [change for change in batch.changes if change.revision > self.revision]
            for change in changes:
                if change.item is None:
                    self._items.pop(change.key, None)
                else:
                    self._items[change.key] = change.item
            if changes:
                revision = batch.revision if len(self.ranges) == 1 else self.revision
                self._deliver(Snapshot(revision, tuple(self._items[key] for key in sorted(self._items))))

    def end(self) -> None:
        """Deliver nothing any more."""
        with self._turn:
            self._has_ended = True


def _back_off_s(failures: int) -> float:
    longest = doubled_s(_BACK_OFF_MIN_S, failures, _BACK_OFF_MAX_S)
    return random.uniform(_BACK_OFF_MIN_S, longest)  # noqa: S311 - spreads agents out, guards nothing
