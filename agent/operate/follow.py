"""Following a job as it changes: its keys are watched in etcd, not asked for again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from agent.core.model import ClusterView
from agent.observe.stderr import standard_error
from agent.store.api import Snapshot, Store
from agent.store.keys import JobKeys, view_of
from agent.store.mirror import Mirror


class Follower:
    """The newest view of a job, whenever it has changed."""

    def __init__(self, store: Store, keys: JobKeys) -> None:
        self._keys = keys
        self._arrived: SimpleQueue[Snapshot] = SimpleQueue()
        self.mirror = Mirror(store, keys.whole(), self._arrived.put, _tell_of_outage)

    def next(self, timeout_s: float | None = None) -> ClusterView | None:
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
        return view_of(snapshot, self._keys, is_whole=True)


@contextmanager
def following(store: Store, keys: JobKeys) -> Iterator[Follower]:
    """Follow a job until the end of the block. The first view comes at once."""
    follower = Follower(store, keys)
    follower.mirror.start()
    try:
        yield follower
    finally:
        follower.mirror.close()


def _tell_of_outage(reason: str) -> None:
    standard_error().write(f"elastic-agent: warning: etcd cannot be reached ({reason}); still trying")
