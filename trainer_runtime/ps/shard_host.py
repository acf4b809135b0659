"""One shard as one server has it: as its primary, as a copy, or not at all; and who talks to it.

All methods that change something are called with `lock` held, unless they say otherwise. A push is answered when every
copy that the map knows of has it: while one does not answer, pushes wait until a map says that it is none.
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

_TRY_AGAIN_S = 0.1
_TELL_MISSING_EVERY_S = 10.0
_TELL_EVERY = 50
"""Tries of a copy, until one that is made is a matter for people."""
_NO_COPY = (BrokenError, OSError, RuntimeError, MemoryError)
"""What a try may end with: torch's lack of memory is a RuntimeError."""
WAIT_WORKERS_S = 60.0
GRACE_S = 5.0


@dataclass(frozen=True)
class Settings:
    """What is the same for all shards of a server.

    `keep` makes what keeps a shard on disk, which it first fills from there if that is wanted. `say` tells the agent
    whether a copy of a shard is whole, with the number of the map that this goes by.
    """

    me: ShardServer
    servers: tuple[Endpoint, ...]
    secret: bytes
    mode: Mode
    keep: Callable[[int, Shard, threading.Condition, bool], ShardPersistence | None]
    say: Callable[[int, int, bool], None]
    workers: int = 0
    """The job's: where they wait for each other, they begin together."""
    wait_workers_s: float = WAIT_WORKERS_S
    """How long those that have not come yet are waited for, by the first one that needs them."""
    grace_s: float = GRACE_S
    """How long one is waited for whose connection has ended, or that a server's successor has not seen yet."""
    tls: ssl.SSLContext | None = None
    """By which servers call each other. None: in the clear."""


class Missing:
    """Says for whom a shard's workers wait, and since when, every so often as long as they do.

    Times are of one clock, in seconds.
    """

    def __init__(self, shard: int) -> None:
        self.tell_at = math.inf
        """When to look again. Infinite: nobody is missing."""
        self._shard = shard
        self._workers: list[int] = []
        self._since = 0.0

    def look(self, workers: list[int], now: float) -> None:
        """Take who is missing now; also after a while in which nobody has waited."""
        if workers != self._workers or now > self.tell_at + _TELL_MISSING_EVERY_S:
            self._workers, self._since = workers, now
            self.tell_at = now + _TELL_MISSING_EVERY_S if workers else math.inf
        elif now >= self.tell_at:
            self.tell_at += _TELL_MISSING_EVERY_S
            names = ", ".join(f"worker {worker}" for worker in workers)
            log.warning("shard %d waits; missing: %s (%.0f s)", self._shard, names, now - self._since)


class ShardHost:
    """A shard here, by its number."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number = number
        self.lock = threading.Condition()
        self.shard = Shard(settings.mode)
        self.is_primary = False
        self.map = 0
        """Number of the newest that said where the shard is."""
        self.here: dict[int, FrameConnection] = {}
        """The newest connection of each worker."""
        self.incarnations: dict[int, int] = {}
        """Of the process that has that."""
        self.source: FrameConnection | None = None
        """The primary's, whose copy this is."""
        self.source_map = 0
        """By which that gave it: maps that are older, and come later, say nothing of it."""
        self.era = 0
        """Whose rows these are; 0: none, or not all of them."""
        self._settings = settings
        self._place: ShardPlace | None = None
        self._line: ReplicaSender | None = None
        """To a copy that has all."""
        self._line_to: ShardServer | None = None
        self._promised = 0
        """The map by which it was last said that the copy is whole."""
        self._copying: ShardServer | None = None
        self._keeper: ShardPersistence | None = None
        self._missing = Missing(number)
        self._patience_s = settings.grace_s
        """How long a worker is waited for that has not been here yet."""

    # Where it is

    def take_place(self, number: int, place: ShardPlace) -> None:
        """Go by a new map. Takes the lock."""
        with self.lock:
            if number <= self.map or number < self.source_map:
                return
            self.map, self._place = number, place
            if place.primary == self._settings.me:
                self._be_primary(place)
            else:
                self._be_none(place)
            self.lock.notify_all()

    def close(self) -> None:
        """Let everybody go, and keep what is here. Takes the lock."""
        with self.lock:
            for connection in (*self.here.values(), *([self.source] if self.source else [])):
                connection.close()
            self.here.clear()
            self._drop_line()
            keeper, self._keeper = self._keeper, None
            self._place = None
            self.lock.notify_all()
        if keeper is not None:
            keeper.close()

    def _be_primary(self, place: ShardPlace) -> None:
        if self.source is not None:
            self.source.close()
            self.source = None
        if not self.is_primary or self.era != place.era:
            if self.era != place.era:
                self._forget()
            self._begin(place)
            self.is_primary = True  # not before it has all: beginning may fail
        wanted = place.replica or place.joining
        if self._line_to != wanted:
            self._drop_line()
        if self._line is not None and place.joining == self._line_to:
            self._promise(is_whole=True)
        elif self._line is None and place.replica is not None:
            self._promise(is_whole=False)
        elif self._line is None and place.joining is not None and self._copying != place.joining:
            self._copying = place.joining
            threading.Thread(target=self._copy, args=(place.joining,), name="ps-copy", daemon=True).start()

    def _forget(self) -> None:
        """Another has had it since: what is here, its copy, and what keeps it are of rows that are no more."""
        self._drop_line()
        self._drop_keeper()

    def _begin(self, place: ShardPlace) -> None:
        """Serve: what was copied here, if it is all there is, else what was kept on disk."""
        is_new = self.era != place.era
        if is_new:
            for connection in self.here.values():
                connection.close()  # who was here comes again, and is known to the new one then
            self.shard = Shard(self._settings.mode)
            self.era = place.era
        self._keeper = self._settings.keep(self.number, self.shard, self.lock, is_new)
        if self._settings.mode.waits:
            begins = not self.shard.applied or (is_new and place.era == 1)
            self._patience_s = self._settings.wait_workers_s if begins else self._settings.grace_s
            self.shard.expect(self._settings.workers, begins=begins)

    def _be_none(self, place: ShardPlace) -> None:
        """A copy at most."""
        if self.is_primary:
            self.is_primary = False
            self.era = 0
            self._drop_line()
            for connection in self.here.values():
                connection.close()
            self.here.clear()
            self.shard = Shard(self._settings.mode)
            self._drop_keeper()
        if self._settings.me not in (place.replica, place.joining) and self.source is not None:
            self.source.close()
            self.source = None
            self.era = 0

    def _drop_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            threading.Thread(target=keeper.drop, name="ps-keeper-end").start()

    # What changes it

    def wait_primary(self) -> None:
        """Wait until no copy is in question. Raises `BrokenError`: it is elsewhere."""
        self.lock.wait_for(lambda: not self.is_primary or not self._is_in_question())
        if not self.is_primary:
            raise BrokenError(f"shard {self.number} is elsewhere")

    def do(self, changes: Sequence[ShardChange]) -> None:
        """Do it in all copies. Raises `BrokenError`: the shard is elsewhere, and this is for nothing."""
        for change in changes:
            self._replicate(lambda line, change=change: line.send(change))  # type: ignore[misc]
            self.shard.apply(change)
            self._replicate(lambda line: line.wait())
        if changes:
            self.lock.notify_all()
            self.wait_primary()

    def tell_copy(self, kind: MessageKind, words: bytes) -> None:
        """Let the copy have what else has changed. Raises `BrokenError` as `do`."""
        self._replicate(lambda line: line.tell(kind, words))
        self.wait_primary()

    def leave(self, worker: int, connection: FrameConnection) -> None:
        """A worker's connection has ended: it has a while to come again, unless it rests, or has left."""
        if self.here.get(worker) is not connection:
            return
        del self.here[worker]
        if self.is_primary and worker in self.shard.pace.steps:
            self.shard.pace.lose(worker, time.monotonic() + self._settings.grace_s)
        elif self.is_primary:
            self.do(self.shard.leave(worker, int(time.time())))
        self.lock.notify_all()

    def wait_change(self) -> None:
        """Wait until something has changed, be it that a worker has not come in time. Raises `BrokenError` as `do`."""
        now = time.monotonic()
        pace = self.shard.pace
        pace.limit(now + self._patience_s)
        late = pace.late(now)
        self._missing.look(sorted(pace.away), now)
        if late:  # one by one: the others may come while this is done
            log.warning("shard %d goes on without worker %d, which has not come in time", self.number, late[0])
            self.do(self.shard.leave(late[0], int(time.time())))
            self.lock.notify_all()
        else:
            wake_at = min(pace.wake_at, self._missing.tell_at)
            self.lock.wait(None if wake_at == math.inf else max(0.0, wake_at - now))

    # Its copy

    def _replicate(self, tell: Callable[[ReplicaSender], Any]) -> None:
        if self._line is None:
            return
        try:
            tell(self._line)
        except BrokenError as broken:
            log.warning("the copy of shard %d is lost: %s", self.number, broken)
            self._line.close()
            self._line = None
            if self._place is not None and self._place.replica == self._line_to:
                self._promise(is_whole=False)

    def _is_in_question(self) -> bool:
        """Whether the map knows of a copy, or may come to, that does not get what changes."""
        if self._line is not None or self._place is None:
            return False
        return self._place.replica is not None or self._promised == self.map

    def _promise(self, *, is_whole: bool) -> None:
        if is_whole:
            self._promised = self.map
        self._settings.say(self.map, self.number, is_whole)

    def _drop_line(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = self._line_to = None

    def _copy(self, to: ShardServer) -> None:
        """On a thread of its own: until it has all, or is not to have it any more."""
        hello = {"shard": self.number, "primary": list(self._settings.me)}
        for tries in count(1):
            with self.lock:
                is_wanted = self.is_primary and self._place is not None and self._place.joining == to
                if not is_wanted:
                    self._copying = None if self._copying == to else self._copying
                    return
                hello |= {"map": self.map, "era": self.era}
                shard = self.shard
            line = None
            try:
                endpoint = self._settings.servers[to.server]
                line = ReplicaSender(self.number, endpoint, self._settings.secret, hello, self._settings.tls)
                line.copy(shard, self.lock)
            except _NO_COPY as broken:
                level = logging.DEBUG if tries % _TELL_EVERY else logging.WARNING
                log.log(
                    level, "shard %d has no copy on server %d after %d tries: %s", self.number, to.server, tries, broken
                )
                if line is not None:
                    line.close()
                time.sleep(_TRY_AGAIN_S)
                continue
            try:  # with the lock, which `copy` has left to us
                if self._take_line(line, to, shard):
                    return
            finally:
                self.lock.release()

    def _take_line(self, line: ReplicaSender, to: ShardServer, shard: Shard) -> bool:
        """Whether a copy that is whole is still wanted: what changes goes there from now on."""
        place = self._place
        if not self.is_primary or self.shard is not shard or place is None or place.joining != to:
            line.close()
            return False
        self._copying = None
        self._drop_line()
        self._line, self._line_to = line, to
        self._promise(is_whole=True)
        self.lock.notify_all()
        return True
