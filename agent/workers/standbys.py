"""The standbys of this node: for each local rank a process that is started ahead and takes its place at a restart.

A standby is the rank's own command, held within Python's start, before its script, with modules imported: torch
(`torch`), or what the script had imported by its first step last time (`learned`). `trainer_runtime.standby` is what
holds it there. Nothing waits for a standby: a rank whose standby is not warm when its group starts is started cold.

| when | what |
|---|---|
| the agent starts | all are started, so that a newcomer or a spare is warm, too |
| a group has made its first step, or has run for a while | those that it has taken, and successors |
| one has ended of itself, or is not warm after minutes | another, without what it blamed; not after three in a row |
| memory is short | none is started; it is looked at again after a while |

A warm standby that lacks packages which the script has imported by now stays until its successor is warm.

It becomes a rank only if its command, its directory, every variable but those of `TOLD`, and the interpreter with the
packages that are installed are what they were when it was started. Until then the kernel takes it before anything else
if memory runs out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import TYPE_CHECKING

from agent.core.events import StandbyChanged
from agent.observe.log import log
from agent.workers.installed import installed
from agent.workers.node_memory import available_bytes
from agent.workers.process import RankProcess, Standby, Warm
from agent.workers.process_watcher import ProcessWatcher
from agent.workers.standby_hook import takes_hook
from trainer_runtime.standby import DEFAULT_MODULES, Imports
from trainer_runtime.standby.origins import parents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from threading import Lock

    from agent.core.events import Event
    from agent.workers.launch_plan import RankCommand, StandbyCommand, StandbyPlan
    from agent.workers.process import Message
    from agent.workers.process_watcher import ProcessOwner
    from agent.workers.reactor import Reactor

_WARM_WITHIN_S = 60.0
"""Nobody waits for longer for those that were just started to be warm."""
_NEVER_WARM_S = 300.0
"""Who is not warm by then waits for something, or for somebody to read what it prints; imports take half a minute."""
_LOOK_AGAIN_S = 10.0
"""Where memory was short: nothing tells that it is there again."""
_FIRST_GUESS_BYTES = 600 << 20
_ROOM = 2
"""So many times what the standbys will take must be free."""
_FAILURES = 3
_NAMED = 3
"""Modules that are left out, in one line."""


@dataclass
class _StandbySlot:
    """A local rank's."""

    command: StandbyCommand
    standby: _Standby | None = None
    successor: _Standby | None = None
    """Takes the standby's place once it is warm."""
    failures: int = 0
    """In a row."""
    given_up: str = ""
    """Why there will be no more."""

    def vacate(self) -> _Standby | None:
        """With the lock held: the standby that has left its place, to which its successor moves up."""
        left, self.standby, self.successor = self.standby, self.successor, None
        return left


class _Standby:
    """One process, from its start until it has become a rank or is gone."""

    def __init__(self, pool: Standbys, seat: _StandbySlot, imports: Imports) -> None:
        self.imports = imports
        self.warm: Warm | None = None
        self.is_discarded = False
        """By us: its end is no failure."""
        self.blamed: tuple[str, ...] = ()
        self._pool = pool
        self._seat = seat
        self._installed = installed()
        self._place = _place(seat.command.cwd)
        self._why = ""
        self.ward = pool.tend(RankProcess(Standby(seat.command, imports)), self)

    def hear(self, message: Message) -> None:
        """What its guardian tells."""
        if message.warm:
            self.warm = message.warm
            self._pool.on_warm(self._seat, self, message.warm)
        if message.tainted:
            self.blamed += message.tainted
        if message.exited:
            last = message.exited.tail.strip().rpartition("\n")[2]
            self._why = message.exited.error or last or _how(message.exited.exit_code, message.exited.signal)
        if message.gone and not self.is_discarded:
            self._pool.on_end(self._seat, self, self._why)

    def hear_question(self) -> bool:
        """It has nothing to say there before it is a rank."""
        return False

    def discard(self) -> None:
        """Have it end."""
        self.is_discarded = True
        self.ward.process.kill()

    def differs_from(self, command: RankCommand) -> str:
        """What is not as it was when this was started; empty: it can become that rank."""
        own, wanted = self._seat.command, command.standing
        if own.argv != wanted.argv:
            return "its command"
        if own.cwd != wanted.cwd or self._place != _place(wanted.cwd):
            return "the directory"
        if own.env != wanted.env:
            names = sorted(dict(own.env.items() ^ wanted.env.items()))
            return f"the environment ({', '.join(names)})"
        return "" if self._installed == installed() else "what is installed"


class Standbys:
    """All of them. Methods are called on the reactor's thread unless they say otherwise."""

    def __init__(self, plan: StandbyPlan, reactor: Reactor, lock: Lock, post: Callable[[Event], None]) -> None:
        self._mode = plan.mode
        self._reactor = reactor
        self._lock = lock
        """Held whenever a seat changes hands."""
        self._post = post
        self._seats = {command.local_rank: _StandbySlot(command) for command in plan.commands}
        self._learned = Imports()
        self._left_out: set[str] = set()
        """Could not be imported."""
        self._blamed: set[str] = set()
        """May not be imported ahead."""
        self._size_bytes = _FIRST_GUESS_BYTES
        self._short = ""
        self._is_looking_again = False
        self._preparing = 0
        """Counts how often they were prepared, at the start and after they were taken."""
        self._is_preparing = False
        self._is_closed = False
        self._told: StandbyChanged | None = None

    def begin(self) -> None:
        """Start the first ones. May be called from any thread."""
        self._reactor.soon(self._begin)

    def take(self, command: RankCommand, owner: ProcessOwner) -> ProcessWatcher | None:
        """The warm standby that can become this rank, now its owner's. With the lock held, from any thread."""
        seat = self._seats.get(command.local_rank)
        if seat is None or seat.standby is None or seat.standby.warm is None:
            return None
        standby = seat.standby
        seat.vacate()
        if other := standby.differs_from(command):
            log.warning(f"rank {command.rank} starts cold: {other} is not what it was when its standby was started")
            standby.discard()
            return None
        if not standby.ward.adopt(owner):
            return None
        seat.failures = 0
        return standby.ward

    def refill(self, imports: Imports | None) -> None:
        """Have those again that were taken, now that this is known of what the script imports; None: nothing new is."""
        self._learned = imports or self._learned
        with self._lock:
            for seat in self._seats.values():
                if seat.successor and self._is_outdated(seat.successor):
                    seat.successor.discard()
                    seat.successor = None
                if seat.standby and not seat.standby.warm and self._is_outdated(seat.standby):
                    seat.standby.discard()
                    seat.vacate()
        self._prepare()

    def close(self) -> None:
        """Kill them all; the reactor ends when they are gone. May be called from any thread."""
        with self._lock:
            self._is_closed = True
            for seat in self._seats.values():
                for standby in filter(None, (seat.standby, seat.successor)):
                    standby.discard()

    def tend(self, process: RankProcess, owner: ProcessOwner) -> ProcessWatcher:
        """Look after a new process."""
        ward = ProcessWatcher(process, owner, self._reactor, self._lock)
        ward.look_after()
        process.start()
        return ward

    def on_warm(self, seat: _StandbySlot, standby: _Standby, warm: Warm) -> None:
        """One is warm now."""
        with self._lock:
            if seat.successor is standby and (predecessor := seat.vacate()):
                predecessor.discard()
        self._size_bytes = warm.rss_bytes
        if new := [name for name in warm.left_out if name not in self._left_out]:
            whose = f"; {new[0]}" if len(new) > 1 else ""
            log.warning(f"standbys are started without {_some(new)}{whose}: {warm.left_out[new[0]]}")
        self._left_out.update(warm.left_out)
        self._tell()

    def on_end(self, seat: _StandbySlot, standby: _Standby, why: str) -> None:
        """One has ended of itself before it was taken."""
        with self._lock:
            if seat.standby is standby:
                seat.vacate()
            elif seat.successor is standby:
                seat.successor = None
        if set(standby.blamed) - set(standby.imports.avoided):
            if anew := [name for name in _outermost(standby.blamed) if name not in self._blamed]:
                log.info(
                    "standbys are started without what depends, while it is imported, on its rank or on what the "
                    f"script does first: {_some(anew)}"
                )
            self._blamed.update(standby.blamed)
        else:
            self._count_failure(seat, why or f"blamed {', '.join(standby.blamed)}")
        self.fill()

    def fill(self) -> None:
        """Start those that are missing, if there is memory for them beside all that there are."""
        missing = [seat for seat in self._seats.values() if self._lacks_one(seat)]
        if self._mode == "off" or self._is_closed:
            return
        free, wanted = available_bytes(), _ROOM * self._size_bytes * len(missing)
        # As when it began: the node's record is not written anew with each look.
        short = self._short or f"{_in_words(free)} free, {_in_words(wanted)} wanted"
        self._short = "" if free > wanted else short
        if self._short and not self._is_looking_again:
            self._is_looking_again = True
            self._reactor.later(_LOOK_AGAIN_S, self._look_again)
        for seat in missing if not self._short else ():
            self._start(seat)
        self._tell()

    def _begin(self) -> None:
        for seat in self._seats.values():
            if not takes_hook(seat.command.argv):
                seat.given_up = "the command is not this Python with a script or a module"
        self._prepare()
        self._tell()

    def _prepare(self) -> None:
        self._preparing += 1
        self._is_preparing = True
        self._reactor.later(_WARM_WITHIN_S, partial(self._end_preparing, self._preparing))
        self.fill()

    def _start(self, seat: _StandbySlot) -> None:
        try:
            standby = _Standby(self, seat, self._wanted())
        except OSError as error:
            self._count_failure(seat, str(error))
            return
        with self._lock:
            if seat.standby is None:
                seat.standby = standby
            else:
                seat.successor = standby
            if self._is_closed:
                standby.discard()
        self._reactor.later(_NEVER_WARM_S, partial(self._end_if_cold, seat, standby))

    def _end_if_cold(self, seat: _StandbySlot, standby: _Standby) -> None:
        if standby in {seat.standby, seat.successor} and not (standby.warm or standby.is_discarded):
            standby.discard()
            self.on_end(seat, standby, f"it was not warm within {_NEVER_WARM_S:g} s")

    def _lacks_one(self, seat: _StandbySlot) -> bool:
        if seat.given_up or seat.successor:
            return False
        return seat.standby is None or self._is_outdated(seat.standby)

    def _is_outdated(self, standby: _Standby) -> bool:
        """Whether the next one would import packages that this one has not."""
        return bool(_packages(self._wanted().modules) - _packages(standby.imports.modules))

    def _wanted(self) -> Imports:
        modules = self._learned.modules if self._mode == "learned" else ()
        out = self._left_out | self._blamed
        left = tuple(name for name in modules or DEFAULT_MODULES if out.isdisjoint(parents(name)))
        return changed(self._learned, modules=left, avoided=tuple(sorted(self._blamed)))

    def _count_failure(self, seat: _StandbySlot, why: str) -> None:
        seat.failures += 1
        if seat.failures == _FAILURES:
            seat.given_up = f"{_FAILURES} failed in a row ({why})"
            log.warning(f"there will be no standby for local rank {seat.command.local_rank}: {seat.given_up}")

    def _look_again(self) -> None:
        self._is_looking_again = False
        self.fill()

    def _end_preparing(self, number: int) -> None:
        self._is_preparing &= number != self._preparing
        self._tell()

    def _tell(self) -> None:
        """Say what has changed."""
        seats = self._seats.values()
        is_due = any(not seat.given_up and not (seat.standby and seat.standby.warm) for seat in seats)
        self._is_preparing &= self._mode != "off" and is_due and not self._short
        told = StandbyChanged(self._sentence(), is_warming=self._is_preparing)
        if told != self._told and not self._is_closed:
            self._told = told
            self._post(told)

    def _sentence(self) -> str:
        if self._mode == "off":
            return "off"
        standbys = [seat.standby for seat in self._seats.values() if seat.standby]
        warm = [standby.warm for standby in standbys if standby.warm]
        if warm:
            each = max(told.rss_bytes for told in warm)
            return f"{len(warm)} of {len(self._seats)} warm, {_in_words(each)} each{self._to_come()}"
        if standbys:
            return "warming up"
        if self._short:
            return f"none: memory is short ({self._short})"
        return "none: " + next(
            (seat.given_up for seat in self._seats.values() if seat.given_up),
            "the next are started after the first step",
        )

    def _to_come(self) -> str:
        """What is to be said of those that are better than those that are warm."""
        if any(seat.successor for seat in self._seats.values()):
            return "; successors warming up"
        if self._short and any(map(self._lacks_one, self._seats.values())):
            return f"; for better ones memory is short ({self._short})"
        return ""


def _packages(modules: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


def _outermost(names: Iterable[str]) -> list[str]:
    """Without those that are in one of the others."""
    named = set(names)
    return sorted(name for name in named if named.isdisjoint(parents(name)[:-1]))


def _place(directory: Path) -> tuple[int, int] | None:
    """What a directory is, whatever its name; None: it is not there."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _how(exit_code: int | None, signal: int | None) -> str:
    return f"signal {signal}" if exit_code is None else f"exit code {exit_code}"


def _in_words(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _some(names: Sequence[str]) -> str:
    """The first of them: there may be dozens."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
