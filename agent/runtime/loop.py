"""The loop of an agent: one inbox, one state, the step of a core, its effects.

Everything that happens is an event in one queue, put there by other threads and by signal handlers. The loop takes
one event, calls the core, and carries out the effects in order. Nothing here may block: what waits (the store, the
ends of workers) has a thread of its own. When nothing happens the loop wakes at the time that the core named, and
often enough to show the lease keeper that it is alive.

The loop runs either core: that of collective jobs (`agent.core.lifecycle`) or that of parameter-server jobs
(`agent.roles.core`).

A part of the agent that cannot go on ends the agent, past the core, by an `Exit` in the inbox: an agent of which only
a part works must not keep its place in the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from agent import clock
from agent.core import events as ev
from agent.core.effects import Exit
from agent.errors import EXIT_USAGE
from agent.observe.log import log
from agent.runtime.preflight import limit_behind

State = TypeVar("State")
Event = TypeVar("Event")
Effect = TypeVar("Effect")

BEATS_PER_LEASE = 8
"""A hung agent loses its place one lease after its loop's last turn, and later by at most a lease divided by this."""


@dataclass(frozen=True)
class SnapshotArrived(Generic[Event]):
    """A snapshot of the store, which becomes an event only when it is handed out: one that is left out costs nothing.

    `decode` is called on the loop's thread. It returns None, and logs why, if the snapshot cannot be read.
    """

    revision: int
    decode: Callable[[], Event | None]


class Inbox(Generic[Event]):
    """Events in the order of their arrival. `put` may be called from any thread and from a signal handler.

    Of several snapshots in a row only the last is handed out: the core of collective jobs decides from a whole view, so
    the earlier ones would be work for nothing. A snapshot that is older than the one before it is never left out, nor
    one that follows an older one: it shows that etcd lost data. (Views of a parameter-server job are events from the
    beginning, and all handed out: there lost data may also show as a record that is missing in one view and back in the
    next.)
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Event | SnapshotArrived[Event] | Exit] = SimpleQueue()
        self.put: Callable[[Event | SnapshotArrived[Event] | Exit], None] = self._queue.put
        self._next: Event | SnapshotArrived[Event] | Exit | None = None
        """Taken from the queue already."""
        self._revision = 0
        """Revision of the last snapshot handed out."""

    def get(self, timeout_s: float) -> Event | ev.Ticked | Exit:
        """Return the next event, or the order to end; `Ticked` if none comes in time."""
        left_out: SnapshotArrived[Event] | None = None
        try:
            event = self._take(timeout_s)
            while isinstance(event, SnapshotArrived) and self._is_superseded(event):
                left_out, event = event, self._take(0.0)
        except Empty:
            return ev.Ticked()
        if not isinstance(event, SnapshotArrived):
            return event
        self._revision = event.revision
        decoded = event.decode()
        if decoded is None and left_out is not None:  # the newest cannot be read: rather the one before than none
            decoded = left_out.decode()
        return decoded or ev.Ticked()

    def _take(self, timeout_s: float) -> Event | SnapshotArrived[Event] | Exit:
        if self._next is None:
            return self._queue.get(timeout=timeout_s)
        event, self._next = self._next, None
        return event

    def _is_superseded(self, snapshot: SnapshotArrived[Event]) -> bool:
        try:
            self._next = self._queue.get_nowait()
        except Empty:
            return False
        newer = self._next
        return isinstance(newer, SnapshotArrived) and self._revision <= snapshot.revision <= newer.revision


def end_with_any_thread(inbox: Inbox[Any]) -> None:
    """End the agent when one of its threads ends by an unexpected error: it would do only half of its work."""

    def end(failed: threading.ExceptHookArgs) -> None:
        name = failed.thread.name if failed.thread is not None else "without a name"
        limit = limit_behind(failed.exc_value) if failed.exc_value is not None else ""
        if limit:
            inbox.put(Exit(EXIT_USAGE, limit))
            return
        log.error("internal error in a thread", thread=name, exc_info=failed.exc_value)
        inbox.put(Exit(1, f"internal error in the thread {name}: {failed.exc_value!r}"))

    threading.excepthook = end


class Heartbeat:
    """Whether the loop has lately completed a turn: a hung agent must lose its place."""

    def __init__(self, lease_ttl_s: float) -> None:
        self.limit_s = lease_ttl_s / BEATS_PER_LEASE
        self.on_beat: Callable[[], None] = lambda: None
        """Called on the loop's thread after each turn."""
        self._last = time.monotonic()

    def beat(self) -> None:
        """Note that a turn was completed."""
        self._last = time.monotonic()
        self.on_beat()

    def is_alive(self) -> bool:
        """Whether the last turn was completed within the limit."""
        return time.monotonic() - self._last <= self.limit_s


@dataclass(frozen=True)
class Core(Generic[State, Event, Effect]):
    """The pure functions that decide for one kind of job."""

    step: Callable[[State, Event | ev.Ticked, float], tuple[State, Sequence[Effect | Exit]]]
    """From a state, an event and the time to the next state and its effects."""
    wake_at: Callable[[State, float], float | None] = lambda _state, _now: None
    """When the core wants its next `Ticked`, as of the time of the last step; None: no time in particular."""


def run_loop(
    core: Core[State, Event, Effect],
    state: State,
    inbox: Inbox[Event],
    heartbeat: Heartbeat,
    act: Callable[[Effect], None],
    look: Callable[[State, float], None] = lambda _state, _now: None,
) -> Exit:
    """Turn until the core or the inbox yields an `Exit`.

    Args:
        core: decides.
        state: the first one.
        inbox: yields the events.
        heartbeat: beats after each turn.
        act: carries out an effect; must not block.
        look: is shown the state after each step, with its time, before the effects are carried out.
    """
    now = clock.now()
    while True:
        due = core.wake_at(state, now)  # as of the last step: what fell due since then is due at once
        timeout_s = heartbeat.limit_s / 2 if due is None else min(due - clock.now(), heartbeat.limit_s / 2)
        event = inbox.get(max(0.0, timeout_s))
        if isinstance(event, Exit):
            return event
        now = clock.now()
        state, effects = core.step(state, event, now)
        look(state, now)
        for effect in effects:
            if isinstance(effect, Exit):
                return effect
            act(effect)
        heartbeat.beat()
