"""One shard as one server has it: as its primary, as a copy, or not at all; and who talks to it.

All methods that change something are called with `lock` held, unless they say otherwise. A push is answered when every
copy that the map knows of has it: while one does not answer, pushes wait until a map says that it is none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_runtime.ps.client import Endpoint
from trainer_runtime.ps.keeping import Keeper
from trainer_runtime.ps.pace import Mode
from trainer_runtime.ps.replica import ReplicaLine
from trainer_runtime.ps.shard import Author, Change, Shard
from trainer_runtime.ps.wire import BrokenError, Connection, Kind
from trainer_runtime.shard_map import Holder, Place

log = logging.getLogger(__name__)

_TRY_AGAIN_S = 0.1


@dataclass(frozen=True)
class Settings:
    """What is the same for all shards of a server.

    `keep` makes what keeps a shard on disk, which it first fills from there if that is wanted. `say` tells the agent
    whether a copy of a shard is whole, with the number of the map that this goes by.
    """

    me: Holder
    servers: tuple[Endpoint, ...]
    secret: bytes
    mode: Mode
    keep: Callable[[int, Shard, threading.Condition, bool], Keeper | None]
    say: Callable[[int, int, bool], None]


class Hosted:
    """A shard here, by its number."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number = number
        self.lock = threading.Condition()
        self.shard = Shard(settings.mode)
        self.is_primary = False
        self.map = 0
        """Number of the newest that said where the shard is."""
        self.here: dict[int, Connection] = {}
        """The newest connection of each worker."""
        self.source: Connection | None = None
        """The primary's, whose copy this is."""
        self.source_map = 0
        """By which that gave it: maps that are older, and come later, say nothing of it."""
        self.era = 0
        """Whose rows these are; 0: none, or not all of them."""
        self._settings = settings
        self._place: Place | None = None
        self._line: ReplicaLine | None = None
        """To a copy that has all."""
        self._line_to: Holder | None = None
        self._promised = 0
        """The map by which it was last said that the copy is whole."""
        self._copying: Holder | None = None
        self._keeper: Keeper | None = None

    # Where it is

    def take_place(self, number: int, place: Place) -> None:
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
            self._drop_line()
            keeper, self._keeper = self._keeper, None
            self._place = None
            self.lock.notify_all()
        if keeper is not None:
            keeper.close()

    def _be_primary(self, place: Place) -> None:
        if self.source is not None:
            self.source.close()
            self.source = None
        if not self.is_primary or self.era != place.era:
            self.is_primary = True
            if self.era != place.era:
                self._forget()
            self._begin(place)
        if place.replica is None and place.joining is None:
            self._drop_line()
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

    def _begin(self, place: Place) -> None:
        """Serve: what was copied here, if it is all there is, else what was kept on disk."""
        is_new = self.era != place.era
        if is_new:
            self.shard = Shard(self._settings.mode)
            self.era = place.era
        self._keeper = self._settings.keep(self.number, self.shard, self.lock, is_new)

    def _be_none(self, place: Place) -> None:
        """A copy at most."""
        if self.is_primary:
            self.is_primary = False
            self.era = 0
            self._drop_line()
            for connection in self.here.values():
                connection.close()
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

    def do(self, changes: Sequence[Change]) -> None:
        """Do it in all copies. Raises `BrokenError`: the shard is elsewhere, and this is for nothing."""
        for change in changes:
            self._replicate(lambda line, change=change: line.send(change))  # type: ignore[misc]
            self.shard.apply(change)
            self._replicate(lambda line: line.wait())
        if changes:
            self.lock.notify_all()
            self.wait_primary()

    def tell_copy(self, kind: Kind, words: bytes) -> None:
        """Let the copy have what else has changed. Raises `BrokenError` as `do`."""
        self._replicate(lambda line: line.tell(kind, words))
        self.wait_primary()

    def leave(self, author: Author, connection: Connection, now_s: int) -> None:
        """A worker's connection has ended."""
        if self.here.get(author.worker) is connection:
            del self.here[author.worker]
            if self.is_primary:
                self.do(self.shard.leave(author, now_s))
            self.lock.notify_all()

    # Its copy

    def _replicate(self, tell: Callable[[ReplicaLine], Any]) -> None:
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

    def _copy(self, to: Holder) -> None:
        """On a thread of its own: until it has all, or is not to have it any more."""
        hello = {"shard": self.number, "primary": list(self._settings.me)}
        while True:
            with self.lock:
                is_wanted = self.is_primary and self._place is not None and self._place.joining == to
                if not is_wanted:
                    self._copying = None if self._copying == to else self._copying
                    return
                hello |= {"map": self.map, "era": self.era}
                shard = self.shard
            line = None
            try:
                line = ReplicaLine(self.number, self._settings.servers[to.server], self._settings.secret, hello)
                line.copy(shard, self.lock)
            except BrokenError as broken:
                log.debug("shard %d cannot be copied yet: %s", self.number, broken)
                if line is not None:
                    line.close()
                time.sleep(_TRY_AGAIN_S)
                continue
            try:  # with the lock, which `copy` has left to us
                if self._take_line(line, to, shard):
                    return
            finally:
                self.lock.release()

    def _take_line(self, line: ReplicaLine, to: Holder, shard: Shard) -> bool:
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
