"""The loop: one inbox, one state, the core's step, its effects.

Everything that happens is an event in one queue, put there by other threads and by signal handlers. The loop takes
one (of views in a row, the last), calls the core, and carries out the effects in order. Nothing here may block: what
waits (the store, the workers' ends) has a thread of its own. When nothing happens the loop wakes at the time that the
core named, and often enough to show the lease keeper that it lives.

A part of the agent that cannot go on ends it, past the core, with an `Exit` in the inbox: an agent of which only a
part works must not hold its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from agent import clock
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.lifecycle import step, wake_at
from agent.core.state import AgentState
from agent.errors import EXIT_USAGE, RecordError
from agent.observe.log import log
from agent.runtime.preflight import limit_behind


class Inbox:
    """Events in the order of their arrival. `put` may be called from any thread and from a signal handler.

    Of views that came one after the other only the last is handed out: the core decides from a whole view, so those
    before it would be work for nothing. One that is older than the one before it is never left out, nor one that it
    follows: it tells of lost data.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[ev.Event | fx.Exit] = SimpleQueue()
        self.put: Callable[[ev.Event | fx.Exit], None] = self._queue.put
        self._next: ev.Event | fx.Exit | None = None
        """Taken from the queue already."""
        self._revision = 0
        """Of the last view handed out."""

    def get(self, timeout_s: float) -> ev.Event | fx.Exit:
        """The next event, or the order to end; `Ticked` if none comes in time."""
        try:
            event = self._take(timeout_s)
            while isinstance(event, ev.ViewChanged) and self._is_superseded(event):
                event = self._take(0.0)
        except Empty:
            return ev.Ticked()
        if isinstance(event, ev.ViewChanged):
            self._revision = event.view.revision
        return event

    def _take(self, timeout_s: float) -> ev.Event | fx.Exit:
        if self._next is None:
            return self._queue.get(timeout=timeout_s)
        event, self._next = self._next, None
        return event

    def _is_superseded(self, viewed: ev.ViewChanged) -> bool:
        try:
            self._next = self._queue.get_nowait()
        except Empty:
            return False
        newer = self._next
        return isinstance(newer, ev.ViewChanged) and self._revision <= viewed.view.revision <= newer.view.revision


def end_with_any_thread(inbox: Inbox) -> None:
    """Let the agent end once a thread has, by an error that nobody foresaw: it would do half of its work."""

    def end(failed: threading.ExceptHookArgs) -> None:
        name = failed.thread.name if failed.thread is not None else "without a name"
        limit = limit_behind(failed.exc_value) if failed.exc_value is not None else ""
        if limit:
            inbox.put(fx.Exit(EXIT_USAGE, limit))
            return
        log.error("internal error in a thread", thread=name, exc_info=failed.exc_value)
        inbox.put(fx.Exit(1, f"internal error in the thread {name}: {failed.exc_value!r}"))

    threading.excepthook = end


class Heartbeat:
    """Whether the loop has lately completed a turn: a hung agent must lose its place."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.on_beat: Callable[[], None] = lambda: None
        """Called on the loop's thread after each turn."""
        self._last = time.monotonic()

    def beat(self) -> None:
        """A turn was completed."""
        self._last = time.monotonic()
        self.on_beat()

    def is_alive(self) -> bool:
        """Whether that was within the limit."""
        return time.monotonic() - self._last <= self.limit_s


def run_loop(
    state: AgentState,
    inbox: Inbox,
    heartbeat: Heartbeat,
    act: Callable[[fx.Effect], None],
    look: Callable[[AgentState, float], None] = lambda _state, _now: None,
) -> fx.Exit:
    """Turn until the core, or the inbox, says `Exit`. `look` is shown the state after each turn."""
    now = clock.now()
    while True:
        due = wake_at(state, now)  # as of the last step: what fell due since then is due at once
        timeout_s = heartbeat.limit_s / 2 if due is None else min(due - clock.now(), heartbeat.limit_s / 2)
        event = inbox.get(max(0.0, timeout_s))
        if isinstance(event, fx.Exit):
            return event
        now = clock.now()
        state, effects = step(state, event, now)
        for effect in effects:
            if isinstance(effect, fx.Exit):
                return effect
            act(effect)
        look(state, now)
        heartbeat.beat()


class StoreThread:
    """Carries out effects on the store one after another, and puts each answer into the inbox."""

    def __init__(self, run: Callable[[fx.StoreEffect], ev.WriteAnswered], inbox: Inbox) -> None:
        self._run = run
        self._inbox = inbox
        self._queue: SimpleQueue[fx.StoreEffect | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    def do(self, effect: fx.StoreEffect) -> None:
        """Carry out an effect later, in its turn."""
        self._queue.put(effect)

    def close(self) -> None:
        """End the thread once what was queued is done."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (effect := self._queue.get()) is not None:
            try:
                answer = self._run(effect)
            except RecordError as error:
                log.error(str(error))
                answer = ev.WriteAnswered(effect, ev.Outcome.UNKNOWN)
            self._inbox.put(answer)
