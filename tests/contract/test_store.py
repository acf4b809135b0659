"""The store's promises, one sentence each, kept alike by the store in memory and by a real etcd."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from agent.errors import Compacted, LeaseGone, StoreUnavailable
from agent.store.api import Compare, Delete, KeyRange, Put, Store

if TYPE_CHECKING:
    from tests.contract.conftest import Follow, WaitUntil, World

SHORT_S = 5.0
"""A lease that runs out while a test waits for it, and not between two lines because the machine is busy."""


def test_a_new_key_has_one_revision_for_creation_and_change(store: Store, world: World) -> None:
    """A key's create and mod revision are the revision of the transaction that made it."""
    result = store.transact([], [Put(world.prefix + "a", b"1")])
    (item,) = store.read([world.everything]).items
    assert result.succeeded
    assert (item.key, item.value) == (world.prefix + "a", b"1")
    assert (item.create_revision, item.mod_revision, item.lease_id) == (result.revision, result.revision, 0)


def test_a_rewritten_key_keeps_its_create_revision(store: Store, world: World) -> None:
    """Only a deletion makes a key new again."""
    first = store.transact([], [Put(world.prefix + "a", b"1")]).revision
    second = store.transact([], [Put(world.prefix + "a", b"2")]).revision
    (item,) = store.read([world.everything]).items
    assert (item.create_revision, item.mod_revision) == (first, second)
    store.transact([], [Delete(world.prefix + "a")])
    third = store.transact([], [Put(world.prefix + "a", b"3")]).revision
    (item,) = store.read([world.everything]).items
    assert (item.create_revision, item.mod_revision) == (third, third)


def test_a_read_of_several_ranges_is_sorted_and_at_one_revision(store: Store, world: World) -> None:
    """Ranges may be given in any order, overlap, and be empty."""
    written = store.transact([], [Put(world.prefix + name, b"") for name in ("c/2", "c/1", "a", "b")]).revision
    wanted = [
        KeyRange(world.prefix + "c/", is_prefix=True),
        KeyRange(world.prefix + "a"),
        KeyRange(world.prefix + "c/1"),
        KeyRange(world.prefix + "none"),
    ]
    snapshot = store.read(wanted)
    assert [item.key for item in snapshot.items] == [world.prefix + name for name in ("a", "c/1", "c/2")]
    assert snapshot.revision == written


def test_a_prefix_ends_where_it_ends(store: Store, world: World) -> None:
    """A prefix with its slash holds no key of a longer name; a single key holds nothing below it."""
    store.transact([], [Put(world.prefix + name, b"") for name in ("job/x", "job-2/x", "job0", "job")])
    assert [item.key for item in store.read([KeyRange(world.prefix + "job/", is_prefix=True)]).items] == [
        world.prefix + "job/x"
    ]
    assert [item.key for item in store.read([KeyRange(world.prefix + "job")]).items] == [world.prefix + "job"]


def test_a_read_without_ranges_gives_the_revision(store: Store, world: World) -> None:
    """Nothing wanted is still answered, by the store as it is now."""
    written = store.transact([], [Put(world.prefix + "a", b"")]).revision
    snapshot = store.read([])
    assert (snapshot.revision, snapshot.items) == (written, ())


def test_the_empty_prefix_is_everything(store: Store, world: World) -> None:
    """All keys of the store begin with nothing."""
    store.transact([], [Put(world.prefix + "a", b"")])
    assert world.prefix + "a" in [item.key for item in store.read([KeyRange("", is_prefix=True)]).items]


def test_create_only_lets_one_of_two_win(world: World) -> None:
    """Of two clients that compare a key's absence, one writes."""
    one, two = world.connect(), world.connect()
    absent = Compare(world.prefix + "leader", create_revision=0)
    assert one.transact([absent], [Put(absent.key, b"one")]).succeeded
    refused = two.transact([absent], [Put(absent.key, b"two")])
    assert not refused.succeeded
    assert two.read([world.everything]).items[0].value == b"one"
    assert refused.revision == two.read([]).revision


def test_a_compare_of_the_mod_revision_refuses_an_old_view(store: Store, world: World) -> None:
    """A write that rests on an older value of the key does not land."""
    key = world.prefix + "group"
    old = store.transact([], [Put(key, b"1")]).revision
    new = store.transact([Compare(key, mod_revision=old)], [Put(key, b"2")])
    assert new.succeeded
    assert not store.transact([Compare(key, mod_revision=old)], [Put(key, b"3")]).succeeded
    assert store.transact([Compare(key, create_revision=old, mod_revision=new.revision)], []).succeeded
    assert not store.transact([Compare(key, create_revision=new.revision, mod_revision=new.revision)], []).succeeded


def test_a_transaction_is_all_or_nothing_and_one_revision(store: Store, world: World) -> None:
    """One failed compare rejects every write; writes of one transaction have one revision."""
    before = store.transact([], [Put(world.prefix + "x/1", b""), Put(world.prefix + "x/2", b"")]).revision
    writes: list[Put | Delete] = [
        Put(world.prefix + "a", b""),
        Put(world.prefix + "b", b""),
        Delete(world.prefix + "x/", is_prefix=True),
    ]
    missing = Compare(world.prefix + "none", mod_revision=before)
    present = Compare(world.prefix + "x/1", mod_revision=before)
    assert not store.transact([present, missing], writes).succeeded
    assert [item.mod_revision for item in store.read([world.everything]).items] == [before, before]
    after = store.transact([present], writes)
    assert [(item.key, item.mod_revision) for item in store.read([world.everything]).items] == [
        (world.prefix + "a", after.revision),
        (world.prefix + "b", after.revision),
    ]
    assert after.revision == before + 1


def test_deleting_nothing_is_no_revision(store: Store, world: World) -> None:
    """A transaction that changes nothing succeeds and leaves the store's revision."""
    before = store.read([]).revision
    assert store.transact([], [Delete(world.prefix, is_prefix=True)]).revision == before


@pytest.mark.parametrize("second", [Put("{}a", b"2"), Delete("{}a"), Delete("{}", is_prefix=True)])
def test_writing_a_key_twice_in_one_transaction_is_refused(store: Store, world: World, second: Put | Delete) -> None:
    """The order within a transaction has no meaning, so it is a mistake of the caller."""
    again = replace(second, key=second.key.format(world.prefix))
    with pytest.raises(ValueError, match=r"twice|duplicate"):
        store.transact([], [Put(world.prefix + "a", b"1"), again])
    assert store.read([world.everything]).items == ()


def test_a_key_lives_as_long_as_its_lease(store: Store, world: World, follow: Follow, wait_until: WaitUntil) -> None:
    """When a lease expires, its keys are deleted in one revision, and a watch reports it."""
    lease = store.grant(SHORT_S)
    assert lease.ttl_s >= SHORT_S
    keys = [world.prefix + "nodes/a", world.prefix + "leader"]
    written = store.transact([], [*(Put(key, b"", lease.lease_id) for key in keys), Put(world.prefix + "stays", b"")])
    assert [item.lease_id for item in store.read([KeyRange(key) for key in keys]).items] == [lease.lease_id] * 2
    follower = follow(store, [world.everything], written.revision)
    wait_until(lambda: len(follower.changes) == 2)
    assert {(change.key, change.item) for change in follower.changes} == {(key, None) for key in keys}
    assert [item.key for item in store.read([world.everything]).items] == [world.prefix + "stays"]


def test_a_renewed_lease_lives_on(store: Store, world: World, wait_until: WaitUntil) -> None:
    """A lease that is renewed outlives its length; one beside it does not."""
    renewed, left = store.grant(SHORT_S), store.grant(SHORT_S)
    store.transact([], [Put(world.prefix + "a", b"", renewed.lease_id), Put(world.prefix + "b", b"", left.lease_id)])

    def has_only_the_renewed() -> bool:
        assert store.refresh(renewed.lease_id) == renewed.ttl_s
        return [item.key for item in store.read([world.everything]).items] == [world.prefix + "a"]

    wait_until(has_only_the_renewed)


def test_revoking_a_lease_deletes_its_keys_at_once(store: Store, world: World) -> None:
    """After a revocation the keys are gone, a renewal returns zero, and another revocation is fine."""
    lease = store.grant(60)
    store.transact([], [Put(world.prefix + "a", b"", lease.lease_id)])
    store.revoke(lease.lease_id)
    assert store.read([world.everything]).items == ()
    assert store.refresh(lease.lease_id) == 0.0
    store.revoke(lease.lease_id)


def test_a_write_under_a_gone_lease_does_not_land(store: Store, world: World) -> None:
    """It raises, and no write of the transaction is applied."""
    lease = store.grant(60)
    store.revoke(lease.lease_id)
    with pytest.raises(LeaseGone, match="lease"):
        store.transact([], [Put(world.prefix + "a", b""), Put(world.prefix + "b", b"", lease.lease_id)])
    assert store.read([world.everything]).items == ()


def test_rewriting_a_key_without_a_lease_frees_it(store: Store, world: World) -> None:
    """The last write decides whether a key has a lease."""
    lease = store.grant(60)
    store.transact([], [Put(world.prefix + "a", b"", lease.lease_id)])
    store.transact([], [Put(world.prefix + "a", b"")])
    store.revoke(lease.lease_id)
    assert [item.lease_id for item in store.read([world.everything]).items] == [0]


def test_a_watch_yields_every_change_in_order(world: World, follow: Follow, wait_until: WaitUntil) -> None:
    """Puts and deletions of another client arrive in order, each once, and only those of the watched ranges."""
    writer, reader = world.connect(), world.connect()
    follower = follow(reader, [KeyRange(world.prefix + "in/", is_prefix=True)], reader.read([]).revision)
    revisions = []
    for number in range(20):
        writer.transact([], [Put(world.prefix + "out", b"")])
        revisions.append(writer.transact([], [Put(world.prefix + "in/a", b"%d" % number)]).revision)
    revisions.append(writer.transact([], [Delete(world.prefix + "in/", is_prefix=True)]).revision)
    wait_until(lambda: len(follower.changes) == 21)
    values = [change.item.value for change in follower.changes if change.item]
    assert values == [b"%d" % number for number in range(20)]
    assert follower.changes[-1].item is None
    assert [change.item.mod_revision for change in follower.changes if change.item] == revisions[:-1]
    assert [change.revision for change in follower.changes] == revisions
    assert follower.batches[-1].revision == revisions[-1]


def test_a_watch_begins_after_the_revision_given(
    store: Store, world: World, follow: Follow, wait_until: WaitUntil
) -> None:
    """A watch from an old revision yields the later changes; changes up to it are not repeated."""
    first = store.transact([], [Put(world.prefix + "a", b"1")]).revision
    store.transact([], [Put(world.prefix + "a", b"2")])
    store.transact([], [Delete(world.prefix + "a")])
    follower = follow(store, [world.everything], first)
    store.transact([], [Put(world.prefix + "a", b"4")])
    wait_until(lambda: len(follower.changes) == 3)
    assert [change.item and change.item.value for change in follower.changes] == [b"2", None, b"4"]


def test_a_revision_comes_whole(store: Store, world: World, follow: Follow, wait_until: WaitUntil) -> None:
    """The events of one transaction in one range are never split over batches."""
    follower = follow(store, [world.everything], store.read([]).revision)
    for _ in range(5):
        store.transact([], [Put(f"{world.prefix}{number}", b"") for number in range(10)])
    wait_until(lambda: len(follower.changes) == 50)
    assert all(len(batch.changes) % 10 == 0 for batch in follower.batches)
    assert [batch.revision for batch in follower.batches] == sorted({batch.revision for batch in follower.batches})


def test_one_watch_follows_several_ranges(store: Store, world: World, follow: Follow, wait_until: WaitUntil) -> None:
    """Changes of each range arrive once, also when the ranges overlap."""
    ranges = [KeyRange(world.prefix + "group"), KeyRange(world.prefix + "n/", is_prefix=True)]
    follower = follow(store, [*ranges, KeyRange(world.prefix + "n/1")], store.read([]).revision)
    store.transact([], [Put(world.prefix + "group", b""), Put(world.prefix + "n/1", b""), Put(world.prefix + "x", b"")])
    last = store.transact([], [Put(world.prefix + "n/2", b"")]).revision
    wait_until(lambda: len(follower.changes) == 3)
    assert sorted(change.key for change in follower.changes) == [world.prefix + key for key in ("group", "n/1", "n/2")]
    assert follower.batches[-1].revision == last


def test_a_watch_from_a_forgotten_revision_raises(store: Store, world: World, follow: Follow) -> None:
    """After a compaction, a watch from an older revision raises."""
    old = store.transact([], [Put(world.prefix + "a", b"1")]).revision
    for _ in range(3):
        new = store.transact([], [Put(world.prefix + "a", b"2")]).revision
    world.compact(new)
    follower = follow(store, [world.everything], old)
    follower.wait_for_end()
    assert isinstance(follower.error, Compacted)


def test_a_watch_from_the_present_survives_a_compaction(
    store: Store, world: World, follow: Follow, wait_until: WaitUntil
) -> None:
    """What has been seen may be forgotten."""
    store.transact([], [Put(world.prefix + "a", b"1")])
    now = store.transact([], [Put(world.prefix + "a", b"2")]).revision
    follower = follow(store, [world.everything], now)
    world.compact(now)
    store.transact([], [Put(world.prefix + "a", b"3")])
    wait_until(lambda: len(follower.changes) == 1)


def test_cancel_ends_a_waiting_watch(store: Store, world: World, follow: Follow, wait_until: WaitUntil) -> None:
    """From another thread, promptly, without an error, and without a thread left behind."""
    threads = threading.active_count()
    follower = follow(store, [world.everything, KeyRange("other")], store.read([]).revision)
    follower.watch.cancel()
    wait_until(lambda: not follower.thread.is_alive())
    assert follower.error is None
    wait_until(lambda: threading.active_count() <= threads)


def test_a_cancelled_watch_yields_nothing(store: Store, world: World) -> None:
    """Also if it is cancelled before the iteration begins, and twice."""
    watch = store.watch([world.everything], store.read([]).revision)
    watch.cancel()
    watch.cancel()
    assert list(watch) == []


def test_a_watch_without_ranges_waits_for_its_end(store: Store, follow: Follow) -> None:
    """It yields nothing until it is cancelled."""
    follower = follow(store, [], store.read([]).revision)
    follower.watch.cancel()
    follower.wait_for_end()
    assert (follower.batches, follower.error) == ([], None)


def test_closing_a_client_ends_its_watches_and_no_others(world: World, follow: Follow, wait_until: WaitUntil) -> None:
    """A closed client raises at every call; its watches end without an error."""
    one, two = world.connect(), world.connect()
    now = one.read([]).revision
    mine, other = follow(one, [world.everything], now), follow(two, [world.everything], now)
    one.close()
    mine.wait_for_end()
    assert mine.error is None
    with pytest.raises(StoreUnavailable):
        one.read([])
    two.transact([], [Put(world.prefix + "a", b"")])
    wait_until(lambda: len(other.changes) == 1)
