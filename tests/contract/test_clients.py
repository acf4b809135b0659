"""What is each store's own: etcd's endpoints and prefixes, and the faults that the store in memory can be given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.errors import Compacted, ConfigError, StoreUnavailable
from agent.store.access import parse_endpoints
from agent.store.api import KeyRange, Put
from agent.store.etcd_protocol import disjoint, prefix_end
from agent.store.memory import MemoryStore

if TYPE_CHECKING:
    from tests.contract.conftest import Follow, WaitUntil


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("etcd", ("etcd:2379",)),
        ("10.0.0.1:1, http://b:2/,", ("10.0.0.1:1", "b:2")),
        ("https://a,https://b:1", ("a:2379", "b:1")),
        ("[::1]", ("[::1]:2379",)),
        ("http://[fe80::1]:5", ("[fe80::1]:5",)),
        ("unix:/tmp/a/client", ("unix:/tmp/a/client",)),
    ],
)
def test_endpoints_are_hosts_and_ports(text: str, endpoints: tuple[str, ...]) -> None:
    """The scheme may be left out, and so may etcd's own port."""
    assert parse_endpoints(text) == endpoints


@pytest.mark.parametrize(
    "text", ["", ",", "a:", "a:b", "a:0", "a:65536", "::1", "[::1", "a b", "ftp://a:1", "a/b:1", "unix:a"]
)
def test_a_bad_endpoint_is_named(text: str) -> None:
    """One line with the value given and the format wanted."""
    with pytest.raises(ConfigError, match=r"want host:port"):
        parse_endpoints(text)


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"a/", b"a0"), (b"a\xff\xff", b"b"), (b"\xff", b"\0"), (b"", b"\0")],
)
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    """The last byte that can grow does; if there is none, everything above belongs to the prefix."""
    assert prefix_end(prefix) == end


def test_ranges_within_others_are_dropped() -> None:
    """What is left covers the same keys, each once, in the order given."""
    wide, deep, single = KeyRange("a/", is_prefix=True), KeyRange("a/b/", is_prefix=True), KeyRange("a/")
    assert disjoint([deep, wide, single, wide]) == (wide,)
    assert disjoint([single, deep, KeyRange("b")]) == (single, deep, KeyRange("b"))


def test_leases_in_memory_run_out_by_the_clock_given(follow: Follow, wait_until: WaitUntil) -> None:
    """The clock is stopped until the test moves it; a running watch yields the deletion."""
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    lease = store.grant(5)
    written = store.transact([], [Put("a", b"", lease.lease_id)]).revision
    follower = follow(store, [KeyRange("a")], written)
    now[0] = 4.9
    assert store.refresh(lease.lease_id) == 5
    now[0] = 9.8
    store.tick()
    assert len(store.read([KeyRange("a")]).items) == 1
    now[0] = 9.9
    store.tick()
    wait_until(lambda: len(follower.changes) == 1)
    assert store.refresh(lease.lease_id) == 0.0


def test_each_client_in_memory_can_be_cut_off_alone(follow: Follow) -> None:
    """A broken watch stays broken, also if the client is connected again before the next iteration."""
    store = MemoryStore()
    cut = store.client()
    watch = cut.watch([KeyRange("a")], 1)
    cut.disconnect()
    with pytest.raises(StoreUnavailable):
        cut.read([])
    store.transact([], [Put("a", b"")])
    cut.reconnect()
    follower = follow(cut, [KeyRange("a")], 1)
    with pytest.raises(StoreUnavailable):
        list(watch)
    assert next(iter(store.watch([KeyRange("a")], 1))).revision == 2
    assert follower.error is None


def test_a_wipe_breaks_watches_and_begins_anew() -> None:
    """Like an etcd on an empty disk, it counts from the beginning, and old leases mean nothing."""
    store = MemoryStore()
    lease = store.grant(60)
    store.transact([], [Put("a", b"", lease.lease_id)])
    watch = store.watch([KeyRange("a")], 2)
    store.wipe()
    with pytest.raises(StoreUnavailable):
        list(watch)
    assert (store.read([KeyRange("a")]).revision, store.refresh(lease.lease_id)) == (1, 0.0)


def test_a_slow_watch_in_memory_is_notified_that_it_missed_something() -> None:
    """Its place in the history was compacted away while it did not look."""
    store = MemoryStore()
    watch = store.watch([KeyRange("a")], 1)
    for _ in range(3):
        last = store.transact([], [Put("a", b"")]).revision
    store.compact(last)
    with pytest.raises(Compacted):
        list(watch)
