"""Holding a port for what listens there later, or again.

A port is picked long before the process that listens on it exists, and other programs must not get it meanwhile. A
socket that is bound with SO_REUSEADDR and does not listen does that: a listener with SO_REUSEADDR (etcd and torch's
stores set it) may still bind the port, while the kernel gives it neither to `bind(0)` nor to an outgoing connection.
"""

from __future__ import annotations

import socket


def hold_port(host: str) -> socket.socket:
    """Hold a free port of this IP address; `::` stands for all of both families. It is free again once this is closed.

    Raises:
        OSError: there is none, or the host has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((host, 0))
        # Only now: set before, the kernel might pick a port that another such socket holds.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held


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
