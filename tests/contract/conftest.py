"""What the contract suite runs on: a store in memory and a real etcd behind the same few operations."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from clusters import patient_store
from waiting import wait_for

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.store import connections
from agent.store.api import ChangeBatch, KeyChange, KeyRange, Store, Watch
from agent.store.etcd_protocol import message
from agent.store.memory import MemoryStore

_DEADLINE_S = 60.0
_numbers = itertools.count()


class WaitUntil(Protocol):
    def __call__(self, is_so: Callable[[], bool], *, within_s: float = _DEADLINE_S) -> None: ...


def _wait_until(is_so: Callable[[], bool], *, within_s: float = _DEADLINE_S) -> None:
    """Wait for a condition that other threads or processes cause."""
    wait_for(is_so, "the condition", within_s)


@dataclass
class World:
    """One kind of store: how to connect to it, and the faults that it can be given."""

    name: str
    prefix: str
    connect: Callable[[], Store]
    compact: Callable[[int], None]

    @property
    def everything(self) -> KeyRange:
        return KeyRange(self.prefix, is_prefix=True)


@dataclass
class Follower:
    """Iterates a watch on its own thread and stores the changes."""

    watch: Watch
    batches: list[ChangeBatch] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def changes(self) -> list[KeyChange]:
        return [change for batch in list(self.batches) for change in batch.changes]

    def wait_for_end(self) -> None:
        self.thread.join(_DEADLINE_S)
        assert not self.thread.is_alive(), "the watch did not end in time"

    def _run(self) -> None:
        try:
            for batch in self.watch:
                self.batches.append(batch)
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error


Follow = Callable[[Store, Sequence[KeyRange], int], Follower]


@pytest.fixture
def wait_until() -> WaitUntil:
    return _wait_until


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd"), port=0) as running:
        yield running


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    prefix = f"/test-{next(_numbers)}/"
    opened: list[Store] = []
    if request.param == "memory":
        backing = MemoryStore()
        connect: Callable[[], Store] = backing.client
        compact = backing.compact
    else:
        running: EmbeddedEtcd = request.getfixturevalue("etcd")

        def connect() -> Store:
            return patient_store(running.endpoint)

        def compact(revision: int) -> None:
            compact_etcd(running.endpoint, revision)

    def open_client() -> Store:
        opened.append(connect())
        return opened[-1]

    yield World(request.param, prefix, open_client, compact)
    for store in opened:
        store.close()


@pytest.fixture
def store(world: World) -> Store:
    return world.connect()


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Start watches that are ended with the test."""
    followers: list[Follower] = []

    def start(store: Store, ranges: Sequence[KeyRange], after_revision: int) -> Follower:
        followers.append(Follower(store.watch(ranges, after_revision)))
        return followers[-1]

    yield start
    for follower in followers:
        follower.watch.cancel()
        follower.wait_for_end()


def compact_etcd(endpoint: str, revision: int) -> None:
    """Compact the history, as etcd does from time to time."""
    link = connections.EtcdConnection(endpoint)
    request: Any = message("CompactionRequest")(revision=revision, physical=True)
    link.kv.Compact(request, timeout=_DEADLINE_S)
    link.channel.close()
