"""An event loop on one thread: it waits for descriptors, timers, and calls from other threads.

All callbacks run on this thread, one after another, and may not block.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_WAKE_BYTES = 64


class HasFileno(Protocol):
    """An object that can be waited for."""

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


class Reactor:
    """The event loop. `call_soon` and `call_later` are thread-safe; the other methods belong to its thread."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._is_closing = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function, after those that were given before."""
        self._soon.append(call)
        with suppress(BlockingIOError):  # enough wake-ups are pending
            self._wake_w.send(b".")

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call a function after a delay. Calls that are not due when the reactor is closed are dropped."""
        due = time.monotonic() + delay_s
        self.call_soon(lambda: heapq.heappush(self._timers, (due, next(self._serial), call)))

    def add_reader(self, source: HasFileno | int, handler: Callable[[], None]) -> None:
        """Call the handler whenever the source is readable."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def remove_reader(self, source: HasFileno | int) -> None:
        """Stop waiting for the source."""
        self._selector.unregister(source)

    def has_reader(self, source: HasFileno | int) -> bool:
        """Whether the source is waited for."""
        return any(key.fileobj is source for key in self._selector.get_map().values())

    def close(self) -> None:
        """Return once no source is waited for, or at once if an error has ended the thread."""
        self.call_soon(self._start_closing)
        self._thread.join()
        self._selector.close()
        self._wake_r.close()
        self._wake_w.close()

    def _start_closing(self) -> None:
        self._is_closing = True

    def _run(self) -> None:
        while not self._is_closing or self._soon or len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select(self._timeout_s()):
                if self._selector.get_map().get(key.fd) is key:  # otherwise another handler has just removed it
                    key.data()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def _timeout_s(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _on_wake(self) -> None:
        self._wake_r.recv(_WAKE_BYTES)
        while self._soon:
            self._soon.popleft()()
