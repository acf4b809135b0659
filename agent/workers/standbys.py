"""The standbys of this node: for each local rank a process that is started ahead and replaces it at a restart.

A standby runs the rank's own command. It is held during the start of Python, before the script, with modules imported:
torch (mode `torch`), or what the script had imported by its first step last time (mode `learned`).
`trainer_runtime.standby` holds it there. Nothing waits for a standby: a rank whose standby is not warm when its group
starts is started cold.

| event | action |
|---|---|
| the agent starts | start all standbys, so that a new or a spare node is warm too |
| a group has completed its first step, or has run for a while | replace standbys that it took, and outdated ones |
| a standby fails, or is not warm after minutes | start another, without the modules that it blamed |
| three failures in a row | start no more for this rank |
| memory is short | start none, and check again after a while |

A warm standby that lacks packages which the script has imported since then is kept until its successor is warm.

In mode `hot` a warm standby goes on: it sets up the script in a world of one, beside the ranks that train, and waits
at `State.run`, once the ranks of this script have shown that they can enter a group there. It stays a standby until
then; if it fails, the next one stays warm.

A standby becomes a rank only if its command, its directory, its environment except for `GROUP_VARIABLES`, the Python
interpreter and the installed packages are unchanged since its start. Until then it has the highest OOM score: the
kernel kills it first if memory runs out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from agent.core.events import StandbyChanged
from agent.observe.log import log
from agent.workers.channel import MessageError
from agent.workers.process import RankProcess, Standby, Warm
from agent.workers.process_resources import memory_bytes, restore_priority
from agent.workers.process_watcher import ProcessWatcher
from agent.workers.standby_hook import installation_state, takes_hook
from trainer_runtime.free_memory import free_memory
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

_PREPARING_S = 60.0
"""The node reports for at most this time that it is preparing standbys."""
_WARM_TIMEOUT_S = 300.0
"""Limit for the imports, which take half a minute. A standby that takes longer is blocked, for instance on its
output."""
_RETRY_S = 10.0
"""Interval of checks while memory is short."""
_FIRST_GUESS_BYTES = 600 << 20
_MEMORY_FACTOR = 2
"""Standbys are started only if this many times their expected size is free."""
_SET_UP_MEMORY_FACTOR = 1.5
"""Standbys set up only if this many times the memory of the largest rank is free for each."""
_MAX_FAILURES = 3
_MAX_NAMED = 3
"""Number of modules to name in one line."""


@dataclass
class _StandbySlot:
    """The standby of one local rank, and its successor."""

    command: StandbyCommand
    standby: _Standby | None = None
    successor: _Standby | None = None
    """Replaces the standby once it is warm."""
    failures: int = 0
    """Number of failures in a row."""
    given_up: str = ""
    """Why no standby is started for this rank any more; empty: not given up."""

    def promote_successor(self) -> _Standby | None:
        """Make the successor the standby, and return the previous one. The caller holds the lock."""
        previous, self.standby, self.successor = self.standby, self.successor, None
        return previous


class _Standby:
    """One process, from its start until it has become a rank or is gone."""

    def __init__(self, pool: Standbys, slot: _StandbySlot, imports: Imports) -> None:
        self.imports = imports
        self.warm: Warm | None = None
        self.is_discarded = False
        """Discarded by the agent, so its end is no failure."""
        self.blamed: tuple[str, ...] = ()
        self.size_bytes = 0
        """Its memory once it has set up; 0: it has not."""
        self._pool = pool
        self._slot = slot
        self._installation = installation_state()
        self._directory_id = _directory_id(slot.command.cwd)
        self._end_reason = ""
        self.watcher = pool.watch(RankProcess(Standby(slot.command, imports)), self)

    def on_guardian_message(self, message: Message) -> None:
        """Handle a packet from the guardian."""
        if message.warm:
            self.warm = message.warm
            self._pool.on_warm(self._slot, self, message.warm)
        if message.tainted:
            self.blamed += message.tainted
        if message.exited:
            last = message.exited.tail.strip().rpartition("\n")[2]
            self._end_reason = (
                message.exited.error or last or _describe_end(message.exited.exit_code, message.exited.signal)
            )
        if message.gone and not self.is_discarded:
            self._pool.on_end(self._slot, self, self._end_reason)

    def on_worker_message(self) -> bool:
        """Note when it has set up: it sends nothing else on its channel. Return False if there will be no more."""
        try:
            is_open = self._pool.receive(self)
        except MessageError as error:
            log.warning(f"a standby sent an invalid message to the agent: {error}")
            return True
        if self.watcher.process.channel.awaits_place and not self.size_bytes:
            self._pool.on_set_up(self)
        return is_open

    @property
    def is_ahead(self) -> bool:
        """It sets up the script, or has done so."""
        return self.watcher.process.is_ahead

    def discard(self) -> None:
        """Kill the process."""
        self.is_discarded = True
        self.watcher.process.kill()

    def differs_from(self, command: RankCommand) -> str:
        """Name what has changed since the start of this standby. Empty: it can become that rank."""
        own, wanted = self._slot.command, command.standby_command
        if own.argv != wanted.argv:
            return "its command"
        if own.cwd != wanted.cwd or self._directory_id != _directory_id(wanted.cwd):
            return "the directory"
        if own.env != wanted.env:
            names = sorted(dict(own.env.items() ^ wanted.env.items()))
            return f"the environment ({', '.join(names)})"
        return "" if self._installation == installation_state() else "the Python installation"


class Standbys:
    """The standbys of all local ranks. Methods run on the reactor's thread unless they say otherwise."""

    def __init__(self, plan: StandbyPlan, reactor: Reactor, lock: Lock, post: Callable[[Event], None]) -> None:
        self._mode = plan.mode
        self._reactor = reactor
        self._lock = lock
        """Held whenever the process of a slot changes."""
        self._post = post
        self._slots = {command.local_rank: _StandbySlot(command) for command in plan.commands}
        self._learned = Imports()
        self._left_out: set[str] = set()
        """Modules that could not be imported."""
        self._blamed: set[str] = set()
        """Modules that may not be imported ahead."""
        self._size_bytes = _FIRST_GUESS_BYTES
        self._shortage = ""
        self._is_retry_scheduled = False
        self._ahead: dict[int, RankCommand] = {}
        """What each local rank's standby may run to set up. Empty: none may."""
        self._ranks: tuple[int, ...] = ()
        """The processes of the ranks beside which they set up."""
        self._ahead_failed = False
        """A standby has failed to set up: the others stay warm."""
        self._ahead_shortage = ""
        """Why standbys do not set up for now: memory is short; empty: it is not."""
        self._preparing = 0
        """Number of times that standbys were prepared: at the start, and each time after they were taken."""
        self._is_preparing = False
        self._is_closed = False
        self._posted: StandbyChanged | None = None

    def begin(self) -> None:
        """Start the first standbys. Thread-safe."""
        self._reactor.call_soon(self._begin)

    def take(self, command: RankCommand, owner: ProcessOwner, *, takes_set_up: bool) -> ProcessWatcher | None:
        """Hand over the warm standby that can become this rank, or None. Thread-safe; the caller holds the lock.

        Args:
            command: the rank.
            owner: receives what happens to the process from now on.
            takes_set_up: the process may have set up the script before.
        """
        slot = self._slots.get(command.local_rank)
        if slot is None or slot.standby is None or slot.standby.warm is None:
            return None
        standby = slot.standby
        slot.promote_successor()
        if standby.is_ahead and not takes_set_up:
            standby.discard()
            return None
        if difference := standby.differs_from(command):
            log.warning(f"rank {command.rank} starts cold: {difference} changed after its standby was started")
            standby.discard()
            return None
        if not standby.watcher.adopt(owner):
            return None
        slot.failures = 0
        if standby.is_ahead:
            standby.watcher.process.renew_memory()
            restore_priority(standby.watcher.process.worker_pid)
        return standby.watcher

    def set_up_ahead(self, commands: Iterable[RankCommand], ranks: Sequence[int]) -> None:
        """Let warm standbys set up the script, now and later, each if there is enough memory.

        Args:
            commands: what to run, for each local rank.
            ranks: process ids of the ranks beside which they set up: standbys will need as much memory.
        """
        self._ahead = {command.local_rank: command for command in commands}
        self._ranks = tuple(ranks)
        self._set_up_warm()
        self._post_status()

    def refill(self, imports: Imports | None) -> None:
        """Replace the standbys that were taken.

        Args:
            imports: what the script is now known to import. None: nothing new is known.
        """
        self._learned = imports or self._learned
        with self._lock:
            for slot in self._slots.values():
                if slot.successor and self._is_outdated(slot.successor):
                    slot.successor.discard()
                    slot.successor = None
                if slot.standby and not slot.standby.warm and self._is_outdated(slot.standby):
                    slot.standby.discard()
                    slot.promote_successor()
        self._prepare()

    def receive(self, standby: _Standby) -> bool:
        """Read one message of a standby. Return False if there will be no more.

        Raises:
            MessageError: it is invalid.
        """
        with self._lock:
            return standby.watcher.process.channel.receive()

    def on_set_up(self, standby: _Standby) -> None:
        """Handle that a standby has set up the script."""
        standby.size_bytes = memory_bytes(standby.watcher.process.worker_pid)
        self._post_status()

    def close(self) -> None:
        """Kill all standbys. The reactor can end when they are gone. Thread-safe."""
        with self._lock:
            self._is_closed = True
            for slot in self._slots.values():
                for standby in filter(None, (slot.standby, slot.successor)):
                    standby.discard()

    def watch(self, process: RankProcess, owner: ProcessOwner) -> ProcessWatcher:
        """Start a process and watch it."""
        watcher = ProcessWatcher(process, owner, self._reactor, self._lock)
        watcher.start()
        process.start()
        return watcher

    def on_warm(self, slot: _StandbySlot, standby: _Standby, warm: Warm) -> None:
        """Handle the report that a standby is warm."""
        with self._lock:
            if slot.successor is standby and (predecessor := slot.promote_successor()):
                predecessor.discard()
        self._size_bytes = warm.rss_bytes
        if new := [name for name in warm.left_out if name not in self._left_out]:
            first = f"; {new[0]}" if len(new) > 1 else ""
            log.warning(f"standbys do not preload {_join_names(new)}, which failed{first}: {warm.left_out[new[0]]}")
        self._left_out.update(warm.left_out)
        self._set_up_warm()
        self._post_status()

    def on_end(self, slot: _StandbySlot, standby: _Standby, why: str) -> None:
        """Handle the end of a standby that was not discarded before it was taken."""
        with self._lock:
            if slot.standby is standby:
                slot.promote_successor()
            elif slot.successor is standby:
                slot.successor = None
        if standby.is_ahead:
            self._ahead_failed = True
            log.warning(
                f"standbys do not set up the script any more: one of local rank {slot.command.local_rank} ended in it "
                f"({why}); its output is in {self._ahead[slot.command.local_rank].log_path}"
            )
        elif set(standby.blamed) - set(standby.imports.avoided):
            if new := [name for name in _outermost(standby.blamed) if name not in self._blamed]:
                log.info(
                    "standbys do not preload modules whose import depends on the rank or on what the script does "
                    f"before: {_join_names(new)}"
                )
            self._blamed.update(standby.blamed)
        else:
            self._count_failure(slot, why or f"blamed {', '.join(standby.blamed)}")
        self.start_missing()

    def start_missing(self) -> None:
        """Start the missing standbys if there is enough free memory."""
        missing = [slot for slot in self._slots.values() if self._needs_standby(slot)]
        if self._mode == "off" or self._is_closed:
            return
        free, wanted = free_memory(), _MEMORY_FACTOR * self._size_bytes * len(missing)
        # Keep the first numbers: otherwise the node record would be written at each check.
        short = self._shortage or f"{_format_bytes(free)} free, {_format_bytes(wanted)} wanted"
        self._shortage = "" if free > wanted else short
        if self._shortage:
            self._retry_later()
        for slot in missing if not self._shortage else ():
            self._start(slot)
        self._set_up_warm()
        self._post_status()

    def _set_up_warm(self) -> None:
        """Let the warm standbys set up, if they may and if there is enough memory."""
        may = self._ahead and not self._ahead_failed and not self._is_closed
        with self._lock:
            due = [slot for slot in self._slots.values() if may and self._is_due_to_set_up(slot)]
        if not due:
            return
        free = free_memory()
        wanted = int(_SET_UP_MEMORY_FACTOR * max(map(memory_bytes, self._ranks), default=0)) * len(due)
        short = self._ahead_shortage or f"{_format_bytes(free)} free, {_format_bytes(wanted)} wanted"
        self._ahead_shortage = "" if free > wanted else short
        if self._ahead_shortage:
            self._retry_later()
            return
        for slot in due:
            with self._lock:
                standby = slot.standby if self._is_due_to_set_up(slot) else None  # it may just have become a rank
                if standby is not None:
                    standby.watcher.process.set_up_ahead(self._ahead[slot.command.local_rank])
            if standby is not None:
                standby.watcher.watch_channel()

    def _is_due_to_set_up(self, slot: _StandbySlot) -> bool:
        standby = slot.standby
        if standby is None or standby.warm is None or standby.is_discarded or slot.successor:
            return False
        return not (standby.is_ahead or self._is_outdated(standby))

    def _retry_later(self) -> None:
        if not self._is_retry_scheduled:
            self._is_retry_scheduled = True
            self._reactor.call_later(_RETRY_S, self._retry_start)

    def _begin(self) -> None:
        for slot in self._slots.values():
            if not takes_hook(slot.command.argv):
                slot.given_up = "the command is not this Python with a script or a module"
        self._prepare()
        self._post_status()

    def _prepare(self) -> None:
        self._preparing += 1
        self._is_preparing = True
        self._reactor.call_later(_PREPARING_S, partial(self._end_preparing, self._preparing))
        self.start_missing()

    def _start(self, slot: _StandbySlot) -> None:
        try:
            standby = _Standby(self, slot, self._imports_to_preload())
        except OSError as error:
            self._count_failure(slot, str(error))
            return
        with self._lock:
            if slot.standby is None:
                slot.standby = standby
            else:
                slot.successor = standby
            if self._is_closed:
                standby.discard()
        self._reactor.call_later(_WARM_TIMEOUT_S, partial(self._discard_if_cold, slot, standby))

    def _discard_if_cold(self, slot: _StandbySlot, standby: _Standby) -> None:
        if standby in {slot.standby, slot.successor} and not (standby.warm or standby.is_discarded):
            standby.discard()
            self.on_end(slot, standby, f"it was not warm within {_WARM_TIMEOUT_S:g} s")

    def _needs_standby(self, slot: _StandbySlot) -> bool:
        if slot.given_up or slot.successor:
            return False
        return slot.standby is None or self._is_outdated(slot.standby)

    def _is_outdated(self, standby: _Standby) -> bool:
        """Whether a new standby would import packages that this one lacks."""
        if standby.is_ahead:
            return False  # it imports by itself what the script does
        return bool(_packages(self._imports_to_preload().modules) - _packages(standby.imports.modules))

    def _imports_to_preload(self) -> Imports:
        modules = () if self._mode == "torch" else self._learned.modules
        excluded = self._left_out | self._blamed
        wanted = tuple(name for name in modules or DEFAULT_MODULES if excluded.isdisjoint(parents(name)))
        return replace(self._learned, modules=wanted, avoided=tuple(sorted(self._blamed)))

    def _count_failure(self, slot: _StandbySlot, why: str) -> None:
        slot.failures += 1
        if slot.failures == _MAX_FAILURES:
            slot.given_up = f"{_MAX_FAILURES} failed in a row ({why})"
            log.warning(f"no more standbys are started for local rank {slot.command.local_rank}: {slot.given_up}")

    def _retry_start(self) -> None:
        self._is_retry_scheduled = False
        self.start_missing()

    def _end_preparing(self, number: int) -> None:
        self._is_preparing &= number != self._preparing
        self._post_status()

    def _post_status(self) -> None:
        """Post the status if it has changed."""
        slots = self._slots.values()
        is_due = any(not slot.given_up and not (slot.standby and slot.standby.warm) for slot in slots)
        self._is_preparing &= self._mode != "off" and is_due and not self._shortage
        status = StandbyChanged(self._status_text(), is_warming=self._is_preparing)
        if status != self._posted and not self._is_closed:
            self._posted = status
            self._post(status)

    def _status_text(self) -> str:
        if self._mode == "off":
            return "off"
        standbys = [slot.standby for slot in self._slots.values() if slot.standby]
        warm = [standby.warm for standby in standbys if standby.warm]
        set_up = [standby.size_bytes for standby in standbys if standby.size_bytes]
        if set_up:
            return f"{len(set_up)} of {len(self._slots)} set up, {_format_bytes(max(set_up))} each"
        if warm:
            each = max(report.rss_bytes for report in warm)
            return f"{len(warm)} of {len(self._slots)} warm, {_format_bytes(each)} each{self._pending_text()}"
        if standbys:
            return "warming up"
        if self._shortage:
            return f"none: memory is short ({self._shortage})"
        return "none: " + next(
            (slot.given_up for slot in self._slots.values() if slot.given_up),
            "the next are started after the first step",
        )

    def _pending_text(self) -> str:
        """Describe the state of the successors."""
        if any(slot.successor for slot in self._slots.values()):
            return "; successors warming up"
        if any(slot.standby and slot.standby.is_ahead for slot in self._slots.values()):
            return "; setting up"
        if self._ahead_shortage:
            return f"; to set up memory is short ({self._ahead_shortage})"
        if self._shortage and any(map(self._needs_standby, self._slots.values())):
            return f"; for better ones memory is short ({self._shortage})"
        return ""


def _packages(modules: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


def _outermost(names: Iterable[str]) -> list[str]:
    """Leave out modules whose parent is in the list."""
    named = set(names)
    return sorted(name for name in named if named.isdisjoint(parents(name)[:-1]))


def _directory_id(directory: Path) -> tuple[int, int] | None:
    """Identify a directory whatever its path. None: it does not exist."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _describe_end(exit_code: int | None, signal: int | None) -> str:
    return f"signal {signal}" if exit_code is None else f"exit code {exit_code}"


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _join_names(names: Sequence[str]) -> str:
    """Join the first names; there may be dozens."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
