"""The mirror: what it delivers, when, and what it does about outages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from structlog.testing import capture_logs
from waiting import wait_for

from agent.errors import Compacted, StoreUnavailable
from agent.store.api import ChangeBatch, Delete, KeyRange, Put, Snapshot, Watch
from agent.store.memory import MemoryStore
from agent.store.mirror import Mirror, _back_off_s

A = KeyRange("a/", is_prefix=True)
B = KeyRange("b")


class Receiver:
    """Stores a mirror's reports, and lets a test wait for them."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.outages: list[str] = []
        self._changed = threading.Condition()

    def deliver(self, snapshot: Snapshot) -> None:
        with self._changed:
            self.snapshots.append(snapshot)
            self._changed.notify_all()

    def on_outage(self, reason: str) -> None:
        with self._changed:
            self.outages.append(reason)
            self._changed.notify_all()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, 60.0), (self.snapshots, self.outages)

    def wait_for_keys(self, *keys: str) -> Snapshot:
        self.wait_for(lambda: [[item.key for item in each.items] for each in self.snapshots[-1:]] == [list(keys)])
        return self.snapshots[-1]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def mirror(store: MemoryStore, receiver: Receiver) -> Iterator[Mirror]:
    mirror = Mirror(store.client(), [A], receiver.deliver, receiver.on_outage)
    mirror.start()
    receiver.wait_for(lambda: len(receiver.snapshots) == 1)
    yield mirror
    mirror.close()


@pytest.mark.usefixtures("mirror")
def test_each_change_brings_the_whole_picture(store: MemoryStore, receiver: Receiver) -> None:
    """One complete sorted snapshot per revision; changes of other keys cause none."""
    store.transact([], [Put("a/2", b"")])
    store.transact([], [Put("c", b"")])
    last = store.transact([], [Put("a/1", b""), Delete("a/none")])
    assert receiver.wait_for_keys("a/1", "a/2").revision == last.revision
    store.transact([], [Delete("a/2")])
    receiver.wait_for_keys("a/1")
    assert len(receiver.snapshots) == 4


def test_a_refresh_delivers_though_nothing_changed(mirror: Mirror, receiver: Receiver) -> None:
    """Who asks gets an answer."""
    mirror.refresh()
    receiver.wait_for(lambda: len(receiver.snapshots) == 2)
    assert receiver.snapshots[0] == receiver.snapshots[1]


def test_to_catch_up_delivers_at_once_and_the_watch_goes_on(
    store: MemoryStore, mirror: Mirror, receiver: Receiver
) -> None:
    """The snapshot has been delivered when the call returns; later changes arrive by the same watch."""
    mirror.retarget([A, B])
    receiver.wait_for(lambda: len(receiver.snapshots) == 2)
    wait_for(lambda: mirror._copy is not None and mirror._copy.ranges == (A, B), "the watch of both")
    watch = mirror._watch
    last = store.transact([], [Put("c", b"")])
    mirror.catch_up()
    assert receiver.snapshots[-1].revision == last.revision
    store.transact([], [Put("b", b"")])
    assert receiver.wait_for_keys("b").revision == last.revision
    assert mirror._watch is watch


class Delayed:
    """A watch that can be made to pause before it yields a batch."""

    def __init__(self, watch: Watch, may_go_on: threading.Event) -> None:
        self._watch = watch
        self._may_go_on = may_go_on

    def __iter__(self) -> Iterator[ChangeBatch]:
        for batch in self._watch:
            assert self._may_go_on.wait(60.0)
            yield batch

    def cancel(self) -> None:
        self._watch.cancel()


def test_what_a_watch_brings_late_does_not_undo_what_was_read(
    store: MemoryStore, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key is deleted and written again; the watch yields both changes after the mirror has caught up."""
    client, may_go_on = store.client(), threading.Event()
    watch = client.watch
    monkeypatch.setattr(client, "watch", lambda *what: Delayed(watch(*what), may_go_on))
    store.transact([], [Put("a/1", b"old")])
    mirror = Mirror(client, [A], receiver.deliver, receiver.on_outage)
    mirror.start()
    wait_for(lambda: mirror._copy is not None, "the watch")
    store.transact([], [Delete("a/1")])
    store.transact([], [Put("a/1", b"new")])
    mirror.catch_up()
    may_go_on.set()
    store.transact([], [Put("a/2", b"")])
    receiver.wait_for_keys("a/1", "a/2")
    mirror.close()
    values = [[item.value for item in snapshot.items] for snapshot in receiver.snapshots]
    assert values == [[b"old"], [b"new"], [b"new", b""]]


def test_what_was_written_is_shown_before_the_watch_delivers_it_and_is_not_undone_by_it(
    store: MemoryStore, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch then delivers older changes of the same keys, and at last a newer one."""
    client, may_go_on = store.client(), threading.Event()
    watch = client.watch
    monkeypatch.setattr(client, "watch", lambda *what: Delayed(watch(*what), may_go_on))
    mirror = Mirror(client, [A, B], receiver.deliver, receiver.on_outage)
    mirror.start()
    wait_for(lambda: mirror._copy is not None, "the watch")
    first = receiver.snapshots[0].revision
    store.transact([], [Put("a/1", b"old"), Put("a/2", b"old"), Put("c", b"")])
    own = Put("a/1", b"mine"), Delete("a/2"), Delete("a/none")
    written = store.transact([], own)
    mirror.show(own, written.revision)
    shown = receiver.snapshots[-1]
    assert (shown.revision, shown.own_revision, [item.key for item in shown.items]) == (
        first,
        written.revision,
        ["a/1"],
    )
    may_go_on.set()
    store.transact([], [Put("b", b"")])
    last = receiver.wait_for_keys("a/1", "b")
    assert (last.own_revision, last.by_key["a/1"].value) == (written.revision, b"mine")
    store.transact([], [Put("a/2", b"new"), Delete("a/1")])
    receiver.wait_for_keys("a/2", "b")
    mirror.close()
    assert all(item.value != b"old" for snapshot in receiver.snapshots for item in snapshot.items)


def test_an_item_that_is_shown_equals_the_one_that_is_read(
    store: MemoryStore, mirror: Mirror, receiver: Receiver
) -> None:
    """Its revisions and its lease are compared in later transactions."""
    mirror.retarget([A, B])
    wait_for(lambda: mirror._copy is not None and mirror._copy.ranges == (A, B), "the watch of both")
    for value in (b"first", b"second"):
        own = [Put("b", value, store.grant(60).lease_id)]
        mirror.show(own, store.transact([], own).revision)
        assert receiver.wait_for_keys("b").items == store.read([A, B]).items
    mirror.catch_up()
    assert receiver.snapshots[-1].own_revision == 0, "it has been read"


def test_nothing_is_shown_where_the_watch_delivers_everything_in_order(
    store: MemoryStore, mirror: Mirror, receiver: Receiver
) -> None:
    wait_for(lambda: mirror._copy is not None, "the watch")
    mirror.show([Put("a/1", b"")], store.transact([], []).revision + 1)
    assert len(receiver.snapshots) == 1


def test_lost_data_is_noticed_by_an_agent_that_catches_up(store: MemoryStore, receiver: Receiver) -> None:
    """Everything is read again, followed by a new watch: the old one could stay silent for ever."""
    client = store.client()
    store.transact([], [Put("a/1", b"")])
    mirror = Mirror(client, [A], receiver.deliver, receiver.on_outage)
    mirror.start()
    wait_for(lambda: mirror._copy is not None, "the watch")
    copy = mirror._copy
    assert copy is not None
    copy.revision += 100  # as if much more had been seen before it was lost
    mirror.catch_up()
    receiver.wait_for(lambda: len(receiver.snapshots) == 2)
    wait_for(lambda: mirror._copy is not copy, "another watch")
    mirror.close()


def test_catching_up_without_a_store_raises_and_keeps_the_watch(
    store: MemoryStore, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading on the mirror's thread as well would only load a store that is late already."""
    client = store.client()
    mirror = Mirror(client, [A], receiver.deliver, receiver.on_outage)
    mirror.start()
    wait_for(lambda: mirror._copy is not None, "the watch")
    copy = mirror._copy
    assert copy is not None

    def fail(_ranges: Sequence[KeyRange]) -> Snapshot:
        raise StoreUnavailable("late")

    with monkeypatch.context() as late:
        late.setattr(client, "read", fail)
        with pytest.raises(StoreUnavailable):
            mirror.catch_up()
    store.transact([], [Put("a/1", b"")])
    receiver.wait_for_keys("a/1")
    assert mirror._copy is copy
    assert not receiver.outages
    mirror.close()


@pytest.mark.parametrize("is_held", [True, False], ids=["its key is still there", "another lease"])
def test_a_lease_that_has_ended_is_a_reason_to_read_again_only_if_its_key_is_still_there(
    store: MemoryStore, mirror: Mirror, receiver: Receiver, *, is_held: bool
) -> None:
    lease_id = store.grant(60.0).lease_id
    store.transact([], [Put("a/1", b"", lease_id)])
    receiver.wait_for_keys("a/1")
    wait_for(lambda: mirror._copy is not None, "the watch")
    copy = mirror._copy
    mirror.note_lease_end(lease_id if is_held else lease_id + 1)
    store.transact([], [Put("a/2", b"")])
    receiver.wait_for_keys("a/1", "a/2")
    assert (mirror._copy is not copy) is is_held


def test_a_lease_that_has_ended_while_everything_is_read_is_a_reason_to_read_again(
    store: MemoryStore, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = store.client()
    lease_id = store.grant(60.0).lease_id
    store.transact([], [Put("a/1", b"", lease_id)])
    mirror, read = Mirror(client, [A], receiver.deliver, receiver.on_outage), client.read
    reads = 0

    def read_and_learn(ranges: Sequence[KeyRange]) -> Snapshot:
        nonlocal reads
        reads += 1
        snapshot = read(ranges)
        if reads == 1:
            mirror.note_lease_end(lease_id)
            store.revoke(lease_id)
        return snapshot

    monkeypatch.setattr(client, "read", read_and_learn)
    mirror.start()
    receiver.wait_for_keys()
    mirror.close()
    assert reads == 2


def test_other_ranges_go_to_their_own_receiver(store: MemoryStore, mirror: Mirror, receiver: Receiver) -> None:
    """After a change of target everything is read again; the old receiver receives nothing more."""
    store.transact([], [Put("a/1", b""), Put("b", b"")])
    receiver.wait_for_keys("a/1")
    other = Receiver()
    mirror.retarget([B], other.deliver)
    other.wait_for_keys("b")
    told_before = len(receiver.snapshots)
    store.transact([], [Delete("a/1")])
    store.transact([], [Delete("b")])
    other.wait_for_keys()
    assert len(receiver.snapshots) == told_before
    mirror.retarget([A, B])
    store.transact([], [Put("a/2", b"")])
    other.wait_for_keys("a/2")


class CountedStore(MemoryStore):
    """Counts how often it is read."""

    def __init__(self, other: MemoryStore) -> None:
        super().__init__()
        self._data, self._connection = other._data, other._connection
        self.reads = 0

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        self.reads += 1
        return super().read(ranges)


def test_an_outage_is_reported_once_and_ends_by_itself(receiver: Receiver, store: MemoryStore) -> None:
    """The mirror keeps trying; afterwards it delivers the missed changes without any event."""
    client = CountedStore(store.client())
    mirror = Mirror(client, [A], receiver.deliver, receiver.on_outage)
    mirror.start()
    receiver.wait_for_keys()
    client.disconnect()
    receiver.wait_for(lambda: len(receiver.outages) == 1)
    store.transact([], [Put("a/1", b"")])
    mirror.refresh()  # a try more, that fails too
    tries = client.reads
    wait_for(lambda: client.reads >= tries + 2, "a try that began after that")
    client.reconnect()
    receiver.wait_for_keys("a/1")
    client.disconnect()
    receiver.wait_for(lambda: len(receiver.outages) == 2)
    mirror.close()
    assert len(receiver.snapshots) == 2


@pytest.mark.parametrize("failures", [1, 1024, 10**9])
def test_it_tries_again_within_a_second_however_often_it_has_failed(failures: int) -> None:
    assert 0.1 <= _back_off_s(failures) <= 1.0


def test_a_mirror_that_has_failed_5000_times_delivers_once_the_store_is_back(
    receiver: Receiver, store: MemoryStore
) -> None:
    client = CountedStore(store.client())
    client.disconnect()
    mirror = Mirror(client, [A], receiver.deliver, receiver.on_outage)
    mirror._failures = 5000
    mirror.start()
    wait_for(lambda: client.reads >= 2 or not mirror._thread.is_alive(), "two tries")
    client.reconnect()
    assert mirror._thread.is_alive()
    receiver.wait_for_keys()
    mirror.close()


@pytest.mark.usefixtures("mirror")
def test_lost_data_is_delivered_like_any_other(store: MemoryStore, receiver: Receiver) -> None:
    """A revision below one already seen is for the receiver to judge."""
    store.transact([], [Put("a/1", b"")])
    before = receiver.wait_for_keys("a/1")
    store.wipe()
    assert receiver.wait_for_keys().revision < before.revision


class ForgetfulStore(MemoryStore):
    """Its first watch begins in a past that is already forgotten."""

    is_first = True

    def watch(self, ranges: Sequence[KeyRange], after_revision: int) -> Watch:
        if not self.is_first:
            return super().watch(ranges, after_revision)
        self.is_first = False
        raise Compacted("forgotten")


def test_a_forgotten_past_is_read_again_and_is_no_outage(receiver: Receiver) -> None:
    """The mirror continues from the current state."""
    store = ForgetfulStore()
    mirror = Mirror(store, [A], receiver.deliver, receiver.on_outage)
    mirror.start()
    receiver.wait_for(lambda: len(receiver.snapshots) == 2)
    store.transact([], [Put("a/1", b"")])
    receiver.wait_for_keys("a/1")
    mirror.close()
    assert receiver.outages == []


class FaultyReceiver(Receiver):
    """Has a fault at each of its first calls."""

    faults = 3

    def deliver(self, snapshot: Snapshot) -> None:
        self._fail()
        super().deliver(snapshot)

    def on_outage(self, reason: str) -> None:
        super().on_outage(reason)
        self._fail()

    def _fail(self) -> None:
        if self.faults:
            self.faults -= 1
            raise UnicodeError("nobody foresaw this")


def test_an_unexpected_error_is_reported_once_and_the_mirror_continues(store: MemoryStore) -> None:
    """A mirror that had ended would leave an agent that sees nothing and keeps its place."""
    receiver = FaultyReceiver()
    mirror = Mirror(store, [A], receiver.deliver, receiver.on_outage)
    with capture_logs() as said:
        mirror.start()
        store.transact([], [Put("a/1", b"")])
        receiver.wait_for_keys("a/1")
        assert [repr(each["exc_info"]) for each in said] == ["UnicodeError('nobody foresaw this')"]
        receiver.faults = 1
        store.disconnect()
        receiver.wait_for(lambda: len(receiver.outages) == 1)
        store.reconnect()
        store.transact([], [Put("a/2", b"")])
        receiver.wait_for_keys("a/1", "a/2")
    mirror.close()


def test_nothing_comes_after_the_end(store: MemoryStore, mirror: Mirror, receiver: Receiver) -> None:
    """A closed mirror is silent; closing twice, or before the start, is fine."""
    mirror.close()
    store.transact([], [Put("a/1", b"")])
    mirror.refresh()
    mirror.close()
    Mirror(store, [A], receiver.deliver, receiver.on_outage).close()
    assert len(receiver.snapshots) == 1
    assert not mirror._thread.is_alive()


def test_a_receiver_may_end_the_mirror(store: MemoryStore, receiver: Receiver) -> None:
    """Closing from the mirror's own thread does not wait for itself."""
    done = threading.Event()

    def deliver(_snapshot: Snapshot) -> None:
        mine.close()
        done.set()

    mine = Mirror(store, [A], deliver, receiver.on_outage)
    mine.start()
    assert done.wait(60.0)
    mine.close()
