"""A shard on one server, which is its primary, its replica or neither, with the connections of its workers and primary.

Methods that change the shard are called with `lock` held, unless their description says that they take it. A push is
answered when every replica of the map has applied it. While a replica does not answer, pushes wait until a newer map
has removed it.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from trainer_runtime.ps.frames import BrokenError, FrameConnection, MessageKind
from trainer_runtime.ps.persistence import ShardPersistence
from trainer_runtime.ps.replica_sender import ReplicaSender
from trainer_runtime.ps.shard import Shard, ShardChange
from trainer_runtime.ps.shard_connection import Endpoint
from trainer_runtime.ps.worker_progress import Mode
from trainer_runtime.shard_map import ShardPlace, ShardServer

log = logging.getLogger(__name__)

_RETRY_S = 0.1
_REPORT_MISSING_EVERY_S = 10.0
_WARN_EVERY_TRIES = 50
"""Failed attempts to create a replica until a warning is logged."""
_COPY_ERRORS = (BrokenError, OSError, RuntimeError, MemoryError)
"""Errors of an attempt to create a replica. Torch raises RuntimeError when memory is exhausted."""
WAIT_WORKERS_S = 60.0
GRACE_S = 5.0


@dataclass(frozen=True)
class ShardHostSettings:
    """Settings that all shards of a server share.

    `open_persistence` returns the object that keeps a shard on disk, and first fills the shard from disk if its last
    argument is true. `report_replica` reports to the agent whether the replica of a shard is complete, with the number
    of the map that this refers to.
    """

    me: ShardServer
    servers: tuple[Endpoint, ...]
    secret: bytes
    mode: Mode
    open_persistence: Callable[[int, Shard, threading.Condition, bool], ShardPersistence | None]
    report_replica: Callable[[int, int, bool], None]
    workers: int = 0
    """Number of workers of the job. In modes in which workers wait for each other, they begin together."""
    wait_workers_s: float = WAIT_WORKERS_S
    """How long the first worker that has made a step waits for workers that have not joined yet."""
    grace_s: float = GRACE_S
    """How long workers wait for one whose connection has ended, or that has not connected to a new primary yet."""
    tls: ssl.SSLContext | None = None
    """TLS context for connections between servers. None: they are not encrypted."""


class MissingWorkers:
    """Logs at intervals which workers the others wait for on a shard, and since when.

    Times are those of one clock, in seconds.
    """

    def __init__(self, shard: int) -> None:
        self.report_at = math.inf
        """When to call `update` again. Infinite: no worker is missing."""
        self._shard = shard
        self._workers: list[int] = []
        self._since = 0.0

    def update(self, workers: list[int], now: float) -> None:
        """Set the missing workers. A call after a long interval begins a new wait."""
        if workers != self._workers or now > self.report_at + _REPORT_MISSING_EVERY_S:
            self._workers, self._since = workers, now
            self.report_at = now + _REPORT_MISSING_EVERY_S if workers else math.inf
        elif now >= self.report_at:
            self.report_at += _REPORT_MISSING_EVERY_S
            names = ", ".join(f"worker {worker}" for worker in workers)
            log.warning("shard %d waits; missing: %s (%.0f s)", self._shard, names, now - self._since)


class ShardHost:
    """One shard on this server."""

    def __init__(self, number: int, settings: ShardHostSettings) -> None:
        self.number = number
        self.lock = threading.Condition()
        self.shard = Shard(settings.mode)
        self.is_primary = False
        self.map_number = 0
        """Number of the newest map that was applied."""
        self.connections: dict[int, FrameConnection] = {}
        """The newest connection of each worker."""
        self.incarnations: dict[int, int] = {}
        """Incarnation of the process that has this connection, by worker."""
        self.primary_connection: FrameConnection | None = None
        """Connection from the primary, if this server has or receives a replica."""
        self.primary_map = 0
        """Number of the map with which the primary began to send the replica; older maps are ignored."""
        self.era = 0
        """Era of the rows; 0: there are no rows, or the replica is not complete."""
        self._settings = settings
        self._place: ShardPlace | None = None
        self._sender: ReplicaSender | None = None
        """Sends changes to a complete replica."""
        self._sender_server: ShardServer | None = None
        self._complete_map = 0
        """Number of the map with which the replica was last reported to be complete."""
        self._copying_to: ShardServer | None = None
        self._persistence: ShardPersistence | None = None
        self._missing = MissingWorkers(number)
        self._absence_limit_s = settings.grace_s
        """How long workers wait for one that has not connected to this server yet."""

    # Roles

    def apply_place(self, number: int, place: ShardPlace) -> None:
        """Apply the place of the shard in a new map. Takes the lock."""
        with self.lock:
            if number <= self.map_number or number < self.primary_map:
                return
            self.map_number, self._place = number, place
            if place.primary == self._settings.me:
                self._become_primary(place)
            else:
                self._resign_primary(place)
            self.lock.notify_all()

    def close(self) -> None:
        """Close all connections, and write the shard to disk. Takes the lock."""
        with self.lock:
            for connection in (
                *self.connections.values(),
                *([self.primary_connection] if self.primary_connection else []),
            ):
                connection.close()
            self.connections.clear()
            self._close_sender()
            persistence, self._persistence = self._persistence, None
            self._place = None
            self.lock.notify_all()
        if persistence is not None:
            persistence.close()

    def _become_primary(self, place: ShardPlace) -> None:
        if self.primary_connection is not None:
            self.primary_connection.close()
            self.primary_connection = None
        if not self.is_primary or self.era != place.era:
            if self.era != place.era:
                self._discard_outdated()
            self._load(place)
            self.is_primary = True  # only now, as loading may fail
        wanted = place.replica or place.joining
        if self._sender_server != wanted:
            self._close_sender()
        if self._sender is not None and place.joining == self._sender_server:
            self._report(is_complete=True)
        elif self._sender is None and place.replica is not None:
            self._report(is_complete=False)
        elif self._sender is None and place.joining is not None and self._copying_to != place.joining:
            self._copying_to = place.joining
            threading.Thread(target=self._copy_to, args=(place.joining,), name="ps-copy", daemon=True).start()

    def _discard_outdated(self) -> None:
        """Stop the replica and the persistence of outdated rows: another server has had the shard since."""
        self._close_sender()
        self._drop_persistence()

    def _load(self, place: ShardPlace) -> None:
        """Serve the replica's rows if they are complete and current, otherwise the rows on disk."""
        is_new = self.era != place.era
        if is_new:
            for connection in self.connections.values():
                connection.close()  # the workers connect again, and the new shard registers them
            self.shard = Shard(self._settings.mode)
            self.era = place.era
        self._persistence = self._settings.open_persistence(self.number, self.shard, self.lock, is_new)
        if self._settings.mode.waits:
            begins = not self.shard.applied or (is_new and place.era == 1)
            self._absence_limit_s = self._settings.wait_workers_s if begins else self._settings.grace_s
            self.shard.expect(self._settings.workers, begins=begins)

    def _resign_primary(self, place: ShardPlace) -> None:
        """Stop being the primary. The server has at most a replica then."""
        if self.is_primary:
            self.is_primary = False
            self.era = 0
            self._close_sender()
            for connection in self.connections.values():
                connection.close()
            self.connections.clear()
            self.shard = Shard(self._settings.mode)
            self._drop_persistence()
        if self._settings.me not in (place.replica, place.joining) and self.primary_connection is not None:
            self.primary_connection.close()
            self.primary_connection = None
            self.era = 0

    def _drop_persistence(self) -> None:
        persistence, self._persistence = self._persistence, None
        if persistence is not None:
            threading.Thread(target=persistence.drop, name="ps-persistence-end").start()

    # Changes

    def wait_primary(self) -> None:
        """Wait until the state of the replica is certain. Raises `BrokenError` if this server is not the primary."""
        self.lock.wait_for(lambda: not self.is_primary or not self._is_replica_uncertain())
        if not self.is_primary:
            raise BrokenError(f"shard {self.number} has moved to another server")

    def apply_changes(self, changes: Sequence[ShardChange]) -> None:
        """Apply changes here and on the replica. Raises `BrokenError` if this server is no longer the primary.

        In that case the changes are discarded here, and the worker sends them to the new primary.
        """
        for change in changes:
            self._replicate(lambda sender, change=change: sender.send(change))  # type: ignore[misc]
            self.shard.apply(change)
            self._replicate(lambda sender: sender.wait())
        if changes:
            self.lock.notify_all()
            self.wait_primary()

    def send_to_replica(self, kind: MessageKind, payload: bytes) -> None:
        """Send any other change of the shard's state to the replica. Raises `BrokenError` as `apply_changes`."""
        self._replicate(lambda sender: sender.send_message(kind, payload))
        self.wait_primary()

    def leave(self, worker: int, connection: FrameConnection) -> None:
        """Handle the end of a worker's connection: the worker has a grace period, unless it rests or has left."""
        if self.connections.get(worker) is not connection:
            return
        del self.connections[worker]
        if self.is_primary and worker in self.shard.progress.steps:
            self.shard.progress.disconnect(worker, time.monotonic() + self._settings.grace_s)
        elif self.is_primary:
            self.apply_changes(self.shard.leave(worker, int(time.time())))
        self.lock.notify_all()

    def wait_change(self) -> None:
        """Wait until the shard has changed or a missing worker is overdue. Raises `BrokenError` as `apply_changes`."""
        now = time.monotonic()
        progress = self.shard.progress
        progress.limit_wait(now + self._absence_limit_s)
        late = progress.overdue(now)
        self._missing.update(sorted(progress.absent), now)
        if late:  # one at a time: the others may connect meanwhile
            log.warning("shard %d goes on without worker %d, which has not connected in time", self.number, late[0])
            self.apply_changes(self.shard.leave(late[0], int(time.time())))
            self.lock.notify_all()
        else:
            wake_at = min(progress.wake_at, self._missing.report_at)
            self.lock.wait(None if wake_at == math.inf else max(0.0, wake_at - now))

    # The replica

    def _replicate(self, call: Callable[[ReplicaSender], Any]) -> None:
        if self._sender is None:
            return
        try:
            call(self._sender)
        except BrokenError as broken:
            log.warning("the replica of shard %d is lost: %s", self.number, broken)
            self._sender.close()
            self._sender = None
            if self._place is not None and self._place.replica == self._sender_server:
                self._report(is_complete=False)

    def _is_replica_uncertain(self) -> bool:
        """Whether the map has a replica, or may get one, that does not receive the changes."""
        if self._sender is not None or self._place is None:
            return False
        return self._place.replica is not None or self._complete_map == self.map_number

    def _report(self, *, is_complete: bool) -> None:
        if is_complete:
            self._complete_map = self.map_number
        self._settings.report_replica(self.map_number, self.number, is_complete)

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = self._sender_server = None

    def _copy_to(self, to: ShardServer) -> None:
        """Create a replica, on a thread of its own, until it is complete or no longer wanted."""
        hello = {"shard": self.number, "primary": list(self._settings.me)}
        for tries in count(1):
            with self.lock:
                is_wanted = self.is_primary and self._place is not None and self._place.joining == to
                if not is_wanted:
                    self._copying_to = None if self._copying_to == to else self._copying_to
                    return
                hello |= {"map": self.map_number, "era": self.era}
                shard = self.shard
            sender = None
            try:
                endpoint = self._settings.servers[to.server]
                sender = ReplicaSender(self.number, endpoint, self._settings.secret, hello, self._settings.tls)
                sender.copy(shard, self.lock)
            except _COPY_ERRORS as broken:
                level = logging.DEBUG if tries % _WARN_EVERY_TRIES else logging.WARNING
                log.log(
                    level,
                    "shard %d has no replica on server %d after %d tries: %s",
                    self.number,
                    to.server,
                    tries,
                    broken,
                )
                if sender is not None:
                    sender.close()
                time.sleep(_RETRY_S)
                continue
            try:  # `copy` has returned with the lock held
                if self._adopt_sender(sender, to, shard):
                    return
            finally:
                self.lock.release()

    def _adopt_sender(self, sender: ReplicaSender, to: ShardServer, shard: Shard) -> bool:
        """Send changes to a complete replica from now on; return whether it is still wanted."""
        place = self._place
        if not self.is_primary or self.shard is not shard or place is None or place.joining != to:
            sender.close()
            return False
        self._copying_to = None
        self._close_sender()
        self._sender, self._sender_server = sender, to
        self._report(is_complete=True)
        self.lock.notify_all()
        return True
