"""Following a job as it changes: its keys are watched in etcd, not asked for again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from agent.core.model import ClusterView
from agent.observe.stderr import standard_error
from agent.store.api import KeyRange, Snapshot, Store
from agent.store.keys import JobKeys, view_of
from agent.store.mirror import Mirror

V = TypeVar("V")


class Follower(Generic[V]):
    """The newest view of a job, whenever it has changed: what `read` makes of a snapshot of `ranges`."""

    def __init__(self, store: Store, ranges: Sequence[KeyRange], read: Callable[[Snapshot], V]) -> None:
        self._read = read
        self._arrived: SimpleQueue[Snapshot] = SimpleQueue()
        self.mirror = Mirror(store, ranges, self._arrived.put, _tell_of_outage)

    def next(self, timeout_s: float | None = None) -> V | None:
        """Wait for a newer view, and skip those that are older by now. None: none came in time.

        Raises:
            RecordError: a record cannot be read.
        """
        try:
            snapshot = self._arrived.get(timeout=timeout_s)
            while not self._arrived.empty():
                snapshot = self._arrived.get_nowait()
        except Empty:
            return None
        return self._read(snapshot)


@contextmanager
def following(store: Store, keys: JobKeys) -> Iterator[Follower[ClusterView]]:
    """Follow a job of ranks until the end of the block. The first view comes at once."""
    with started(Follower(store, keys.whole(), lambda snapshot: view_of(snapshot, keys, is_whole=True))) as follower:
        yield follower


@contextmanager
def started(follower: Follower[V]) -> Iterator[Follower[V]]:
    """Follow until the end of the block."""
    follower.mirror.start()
    try:
        yield follower
    finally:
        follower.mirror.close()


def _tell_of_outage(reason: str) -> None:
    standard_error().write(f"elastic-agent: warning: etcd cannot be reached ({reason}); still trying")
