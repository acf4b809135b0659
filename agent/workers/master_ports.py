"""Ports held for the master of the next group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.endpoints import hold_port

if TYPE_CHECKING:
    import socket


class PortHold:
    """Holds the port for the next master, and the one before, which the current master may be about to bind."""

    def __init__(self) -> None:
        self._current = _hold()
        self._previous: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port for the next master."""
        return int(self._current.getsockname()[1])

    def renew(self) -> int:
        """Hold another port and return it. The one before stays held until the next call."""
        following = _hold()
        if self._previous:
            self._previous.close()
        self._previous, self._current = self._current, following
        return self.port

    def close(self) -> None:
        """Let go of both."""
        for held in (self._previous, self._current):
            if held:
                held.close()


def _hold() -> socket.socket:
    try:
        return hold_port("::")
    except OSError:  # no IPv6 on this host
        return hold_port("0.0.0.0")  # noqa: S104 - never listens
