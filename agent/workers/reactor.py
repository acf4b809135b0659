"""One thread that waits: on descriptors, for a time, and for what other threads give it to do.

Everything that it calls is called on it, one after another, and must not wait.
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
    """What can be waited on."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


class Reactor:
    """`soon` and `later` may be called from any thread, `on`, `off` and `is_on` from its own."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._soon: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._is_closing = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def soon(self, call: Callable[[], None]) -> None:
        """Call it, after all that was given before."""
        self._soon.append(call)
        with suppress(BlockingIOError):  # full of wakes already
            self._wake_w.send(b".")

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it after so long. What is not due when the thread is closed is not called."""
        due = time.monotonic() + delay_s
        self.soon(lambda: heapq.heappush(self._later, (due, next(self._serial), call)))

    def on(self, source: HasFileno | int, handler: Callable[[], None]) -> None:
        """Call the handler whenever the source is readable."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def off(self, source: HasFileno | int) -> None:
        """No longer."""
        self._selector.unregister(source)

    def is_on(self, source: HasFileno | int) -> bool:
        """Whether it is waited on."""
        return any(key.fileobj is source for key in self._selector.get_map().values())

    def close(self) -> None:
        """End once nothing is waited on, and return then; or at once if an error has ended the thread."""
        self.soon(self._begin_to_close)
        self._thread.join()
        self._selector.close()
        self._wake_r.close()
        self._wake_w.close()

    def _begin_to_close(self) -> None:
        self._is_closing = True

    def _run(self) -> None:
        while not self._is_closing or self._soon or len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select(self._timeout_s()):
                if self._selector.get_map().get(key.fd) is key:  # else another's handler has ended it just now
                    key.data()
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()

    def _timeout_s(self) -> float | None:
        return max(0.0, self._later[0][0] - time.monotonic()) if self._later else None

    def _on_wake(self) -> None:
        self._wake_r.recv(_WAKE_BYTES)
        while self._soon:
            self._soon.popleft()()
